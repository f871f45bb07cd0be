"""The measurements of `quality`, which `publish` takes, too."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_gguf.gguf_tools.machine.interrupted import Interrupted
from mtp_gguf.gguf_tools.machine.processors import computing_threads
from mtp_gguf.gguf_tools.machine.text import human_bytes
from mtp_gguf.gguf_tools.model import open_model, shard_paths

from .file_report import can_draft
from .options import usable_gpu_layers
from .progress import say, share_progress

if TYPE_CHECKING:
    from mtp_gguf.bench.quality import Candidate


@dataclass(frozen=True)
class MeasuredQuality:
    """Files compared with a reference on windows of a text; logits: the file of the reference's."""

    candidates: "list[Candidate]"
    windows: int
    logits: Path


def measure_quality(
    source: Path,
    files: Sequence[Path],
    contents: str,
    *,
    context: int,
    chunks: int | None,
    base: Path | None,
    drafting: bool,
    threads: int | None,
    gpu_layers: int,
    quiet: bool,
) -> MeasuredQuality:
    """Compare `files` with the reference `source` on a text; the options are those of `quality`.

    quiet: without the line about the reference's logits.
    """
    from mtp_gguf.bench.imatrix import windows_of  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.bench.logit_file import LogitFile  # noqa: PLC0415
    from mtp_gguf.bench.model import BenchModel  # noqa: PLC0415
    from mtp_gguf.bench.quality import (  # noqa: PLC0415
        Candidate,
        check_same_model,
        measure_divergence,
        measure_drafting,
        store_reference,
    )
    from mtp_gguf.gguf_tools.profile import identify  # noqa: PLC0415
    from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415
    from mtp_gguf.native.vocabulary import Vocabulary  # noqa: PLC0415
    from mtp_gguf.server.upstream_source import cache_folder  # noqa: PLC0415

    with open_model(source) as known:
        for file in files:
            with open_model(file) as opened:
                check_same_model(known, opened)
    tell_crashes()
    cores = threads or computing_threads()
    gpu_layers = usable_gpu_layers(gpu_layers)
    with Vocabulary(source) as vocabulary:
        ids = vocabulary.encode(contents, special=False).tolist()
        windows = windows_of(ids, context, chunks, vocabulary.bos)
        n_vocab = vocabulary.size
    if base is None:
        key = repr(identify(source)).encode() + repr(windows.shape).encode() + windows.tobytes()
        base = cache_folder("logits") / f"{hashlib.sha256(key).hexdigest()[:32]}.kld"
    stored = LogitFile(base, windows, n_vocab)
    try:
        if not stored.complete():
            stored.check_space()
            if not quiet:
                say(f"mtp-gguf: logits of the reference: {human_bytes(stored.nbytes)} in {base}")
            with (
                BenchModel(source, n_ctx=context, threads=cores, gpu_layers=gpu_layers) as model,
                model.reader(context) as reader,
                share_progress("reference") as show,
            ):
                store_reference(reader, stored, partial(_show_window, show, len(windows)))
        candidates = []
        for file in files:
            with (
                BenchModel(file, n_ctx=context, threads=cores, gpu_layers=gpu_layers) as model,
                share_progress(file.name) as show,
            ):
                with model.reader(context) as reader:
                    divergence = measure_divergence(
                        reader,
                        stored,
                        partial(_show_window, show, len(windows)),
                        threads=cores,
                    )
                drafts = measure_drafting(model, windows) if drafting and can_draft(file) else None
            nbytes = sum(shard.stat().st_size for shard in shard_paths(file))
            candidates.append(Candidate(file.name, nbytes, divergence, drafts))
    except KeyboardInterrupt:
        begun = f"the same command continues with the logits in {base}"
        raise Interrupted(begun if stored.begun() else "nothing was written") from None
    return MeasuredQuality(candidates, len(windows), base)


def _show_window(show: Callable[[float, str], None], count: int, done: int) -> None:
    show(done / count, f"window {done} of {count}")

"""`mtp_gguf.train_head(...)`: trains a head, with all options of `mtp-gguf train-head`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mtp_gguf.convert.heads.acceptance import AcceptanceCheck, is_measured, record_acceptance
from mtp_gguf.convert.options import (
    StrPath,
    check_range,
    draft_size,
    head_type_named,
    listed,
    output_file,
)
from mtp_gguf.gguf_tools.errors import OptionError, RequestError
from mtp_gguf.gguf_tools.files.new_file import head_warnings, output_path
from mtp_gguf.gguf_tools.files.output import check_output
from mtp_gguf.gguf_tools.heads.acceptance import LEAST
from mtp_gguf.gguf_tools.hub.resolve import local_gguf
from mtp_gguf.gguf_tools.machine.system import MAX_THREADS
from mtp_gguf.gguf_tools.machine.text_files import paragraphs, whole_texts
from mtp_gguf.gguf_tools.progress import QUIET, Progress

from .options import (
    EPOCHS,
    GPU_LAYERS,
    LEAST_MINUTES,
    LEAST_RATE,
    LENGTH,
    RANK,
    SEED,
    STEPS,
    TOKENS,
)

_SAFETENSORS = ".safetensors"


@dataclass(frozen=True, eq=False)
class Trained:
    """What a training wrote.

    figures: acceptance rates, steps, tokens and speed, as `train-head --json` prints them.
    kept: the folder with the trunk's states; None if it was removed. acceptance: of the written
    model, on the corpus of all files; None if it was not measured.
    """

    path: Path
    figures: dict[str, Any]
    kept: Path | None
    acceptance: AcceptanceCheck | None = None

    @property
    def is_gguf(self) -> bool:
        """Whether a GGUF was written, rather than mtp.* tensors."""
        return self.path.suffix != _SAFETENSORS

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about the training and the head."""
        poor = self.acceptance.warning if self.acceptance else None
        found = head_warnings(self.path) if self.is_gguf else []
        return (*self.figures["warnings"], *found, *([poor] if poor else ()))


def let_threads_sleep() -> None:
    """Make OpenMP's threads sleep where they wait. To be called before OpenMP is loaded.

    Threads that spin keep the CPUs from those that they wait for if another program computes, and
    training takes hours on a machine that is used (docs/train.md).
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def train_head(
    model: StrPath,
    output: StrPath | None = None,
    *,
    text: StrPath | Sequence[StrPath] = (),
    prompts: StrPath | Sequence[StrPath] = (),
    head_from: StrPath | None = None,
    from_scratch: bool = False,
    mtp_f16: bool = False,
    mtp_type: str | None = None,
    head_only: bool = False,
    fastmtp: int | bool | None = None,
    minutes: float | None = None,
    tokens: int = TOKENS.default,
    length: int = LENGTH.default,
    raw: bool = False,
    steps: int = STEPS.default,
    epochs: float = EPOCHS.default,
    rate: float | None = None,
    rank: int = RANK.default,
    seed: int = SEED.default,
    device: str | None = None,
    threads: int | None = None,
    gpu_layers: int = GPU_LAYERS.default,
    work: StrPath | None = None,
    overwrite: bool = False,
    no_check: bool = False,
    chart: StrPath | None = None,
    least_acceptance: float = LEAST,
    progress: Progress = QUIET,
) -> Trained:
    """Train the MTP head of a GGUF for its trunk. Needs the extra `mtp-gguf[train]`.

    The arguments are the options of `mtp-gguf train-head`, whose help describes them. An
    interrupted run continues where it stopped if the same call is made again.

    Args:
        model: A GGUF, also on the hub: OWNER/NAME:QUANT.
        output: A GGUF, a .safetensors file for mtp.* tensors, or an existing folder; None for
            MODEL-tuned.gguf.
        text: Files to train on.
        prompts: The option --prompt-file: files with prompts, to whose answers the head is trained.
            With texts, too, both are interleaved.
        fastmtp: Number of tokens of a new draft vocabulary; True for the default number.
        chart: A PNG, drawn anew after each evaluation.
        progress: Shows the progress; by default nothing is shown.

    Raises:
        OptionError: Options contradict each other, or have impossible values.
        MtpGgufError: Something else prevents the training; its subclasses say what.

    Example:
        >>> made = mtp_gguf.train_head("model.gguf", "tuned.gguf", text="notes.txt", minutes=60)
        >>> made.figures["acceptance"]["after"], made.warnings

    """
    let_threads_sleep()
    texts_of, prompts_of = _files(text), _files(prompts)
    if not texts_of and not prompts_of:
        raise OptionError("expected --text, --prompt-file or both")
    if head_from and from_scratch:
        raise OptionError("--head-from and --from-scratch contradict each other")
    head_type = head_type_named(mtp_f16, mtp_type)
    check_range("--minutes", minutes, LEAST_MINUTES)
    check_range("--rate", rate, LEAST_RATE)
    check_range("--threads", threads, 1, MAX_THREADS)
    check_range("--least-acceptance", least_acceptance, 0, 1)
    for option, value, limits in (
        ("--tokens", tokens, TOKENS),
        ("--length", length, LENGTH),
        ("--steps", steps, STEPS),
        ("--epochs", epochs, EPOCHS),
        ("--rank", rank, RANK),
        ("--seed", seed, SEED),
        ("--gpu-layers", gpu_layers, GPU_LAYERS),
    ):
        check_range(option, value, limits.least, limits.most)
    size = draft_size(fastmtp)
    files = [*texts_of, *prompts_of]
    target = output_path(
        None if output is None else output_file(str(output)), Path(model), "{}-tuned"
    )
    if target.suffix == _SAFETENSORS and (head_only or head_type or size):
        raise OptionError("the options of the GGUF's head do not apply to a .safetensors")
    for name in ("torch", "safetensors", *(["matplotlib"] if chart else [])):
        if find_spec(name) is None:
            raise RequestError(
                f"train-head: expected {name}, which is not installed; "
                'pip install "mtp-gguf[train]"'
            )
    whole = whole_texts(texts_of) if texts_of else ()
    questions = tuple(paragraphs(prompts_of)) if prompts_of else ()
    path = local_gguf(str(model), with_head=False, say=progress.download).path
    check_output(target, [path, *files], overwrite)
    picture = None if chart is None else output_file(str(chart))
    if picture is not None and picture.absolute() == target.absolute():
        raise OptionError(f"--chart: expected another file than the output, found {chart}")
    if gpu_layers:
        from mtp_gguf.native.libraries.offload import usable_gpu_layers  # noqa: PLC0415  (loads llama.cpp)

        gpu_layers = usable_gpu_layers(gpu_layers, progress.say)
    from .collect import Texts  # noqa: PLC0415  (loads llama.cpp)
    from .head_job import Job, Start, run  # noqa: PLC0415  (imports PyTorch)

    job = Job(
        model=path,
        texts=Texts(whole, questions),
        files=len(files),
        target=target,
        start=Start(None if head_from is None else str(head_from), from_scratch),
        head_type=head_type,
        head_only=head_only,
        fastmtp=size,
        minutes=minutes,
        tokens=tokens,
        length=length,
        chat=not raw,
        steps=steps,
        epochs=epochs,
        rate=rate,
        rank=rank,
        seed=seed,
        device=device,
        threads=threads,
        gpu_layers=gpu_layers,
        work=None if work is None else Path(work),
        measured=is_measured(no_check=no_check),
        chart=picture,
        progress=progress,
    )
    if picture is not None:  # that of an interrupted run, which goes on, is drawn anew
        check_output(picture, [path, *files], overwrite or job.has_checkpoint)
    figures = run(job)
    check = None
    if job.stores_acceptance:
        taught = figures["acceptance"]["after"][0]
        check = record_acceptance(target, progress, least_acceptance, elsewhere=taught)
    return Trained(target, figures, job.folder if job.folder.exists() else None, check)


def _files(values: StrPath | Sequence[StrPath]) -> list[Path]:
    return [Path(value) for value in listed(values)]

"""What the native fuzz target starts from.

A tiny model, heads and checkpoints of its shape, session files, and indexes of texts.

    python tests/fuzz/native_corpus.py FOLDER

writes FOLDER/model.gguf, for MTP_FUZZ_MODEL, FOLDER/corpus/, and its session files again in
FOLDER/sessions/.
"""

from __future__ import annotations

import shutil
import struct
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from mtp_gguf.gguf_tools.files.format import Value, ValueType, open_gguf
from mtp_gguf.gguf_tools.files.tensor_types import I64
from mtp_gguf.native.checkpoint import CheckpointKind
from mtp_gguf.native.depth import DepthChooser, Outcome
from mtp_gguf.native.lookup_files import Corpus
from mtp_gguf.native.sessions.session_file import write_session
from support.checkpoints import Spec
from support.gguf_files import Tensor, rewritten
from support.models import Models
from support.native_trunk import opened_session
from support.session_files import parse_session, version_1

DENSE = Spec(
    "fuzz",
    hidden=32,
    intermediate=32,
    layers=2,
    interval=2,
    heads=2,
    kv_heads=1,
    head_dim=64,
    k_heads=1,
    v_heads=1,
    linear_dim=32,
    tied=True,
)
MOE = replace(DENSE, name="fuzz-moe", experts=4, fused_mtp_experts=True)
ROWS = 16  # of the embedding in a head file


def head_file(path: Path, keys: dict[str, Value], extra: dict[str, Tensor]) -> bytes:
    """The head of a model with an embedding of few rows and no tokenizer: a few KiB."""
    with open_gguf(path) as file:
        block = (file.integer(f"{file.scalar('general.architecture')}.block_count") or 1) - 1
        tokenizer = {key: None for key in file.keys if "tokenizer" in key}
        trunk = {t.name: None for t in file.tensors if not t.name.startswith(f"blk.{block}.")}
        table = file.by_name["token_embd.weight"]
        width = table.nbytes // max(table.shape)
        few = bytes(file.source.read(table.offset, ROWS * width))
    embedding = {"token_embd.weight": ((DENSE.hidden, ROWS), table.type, few)}
    out = path.with_suffix(".head")
    return rewritten(path, out, {**tokenizer, **keys}, {**trunk, **embedding, **extra}).read_bytes()


def heads(models: Models) -> list[bytes]:
    """Dense and mixed, F32 and quantized, with each layout of a draft vocabulary."""
    dense = models.gguf(DENSE)
    few = [5, 3, 11]
    with open_gguf(dense) as file:
        table = file.by_name["token_embd.weight"]
        width = table.nbytes // max(table.shape)
        short = bytes(file.source.read(table.offset, len(few) * width))
    d2t = ((len(few),), I64, struct.pack(f"<{len(few)}q", *few))
    rows = ((DENSE.hidden, len(few)), table.type, short)
    ids = {"mtp_gguf.fastmtp.token_ids": Value(ValueType.U32, few)}
    return [
        head_file(dense, {}, {}),
        head_file(models.gguf(DENSE, head="Q8_0"), {}, {}),
        head_file(models.gguf(MOE, head="F16"), {}, {}),
        head_file(dense, ids, {}),
        head_file(dense, {}, {"d2t": d2t, "blk.2.nextn.shared_head_head.weight": rows}),
        head_file(dense, {}, {"d2t": d2t, "output.weight": rows}),
    ]


def checkpoints(path: Path) -> list[bytes]:
    """Of a prompt, of a text, of a head or a recurrent state alone; with drafts from the text and
    without.
    """
    out = []
    for lookup in (0, 2):
        with opened_session(path, "snapshot", 2, lookup=lookup) as (session, _):
            session.decode([1, 2, 3])
            for kind in (CheckpointKind.WHOLE, CheckpointKind.HEAD, CheckpointKind.HOST):
                with session.save(kind) as saved:
                    out.append(saved.to_bytes())
            for token in (4, 5, 6):
                session.step(token, 2)
            with session.save() as saved:
                out.append(saved.to_bytes())
    return out


def indexes(folder: Path) -> list[bytes]:
    """Two indexes of lookup files, steps of a suffix index and of a text, and a chooser's state."""
    out = []
    for texts in ([[1, 2, 3, 1, 2, 4]], [[], [5], [5, 5, 5, 5, 5]]):
        Corpus.write(folder / "texts.index", texts, n_vocab=16, tokenizer=0)
        out.append((folder / "texts.index").read_bytes())
    steps = bytes(i * i % 7 for i in range(90)) + b"\xe0\0\1\xd0\2" * 9
    with closing(DepthChooser(2)) as chooser:
        for n in range(1, 4):
            chooser.report_batch(n, 10.0 + n)
            chooser.report(Outcome([0.9, 0.4], verified=2, accepted=n % 3, draft_ms=2.0))
        state = chooser.state()
    return [*out, b"S" + steps, b"D" + steps, b"A" + state]


def sessions(folder: Path) -> list[bytes]:
    """Session files of MTPLlama and of llama-server, with and without what they may lack."""
    out = []
    identity = {"program": "MTPLlama", "model": "1 bytes 00", "rope_freq_base": "0.0", "none": ""}
    for n_earlier, fields in ((0, {}), (0, identity), (1, identity), (3, identity)):
        earlier = {n + 1: bytes([n] * 9) for n in range(n_earlier)}
        tokens = np.arange(4, dtype=np.int32)
        write_session(folder / "a.session", tokens, b"state", fields, {"a": [1]}, earlier)
        out.append((folder / "a.session").read_bytes())
    server = parse_session(out[1])
    numbers = server.numbers | {"program": 2, "owner": 2**64 - 1}
    return [*out, server.with_header(numbers=numbers, extra=b"").data(), version_1(b"{}")]


def main() -> None:
    folder = Path(sys.argv[1])
    for name in ("corpus", "sessions"):
        (folder / name).mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        models = Models(Path(scratch))
        model = Path(shutil.copy(models.gguf(DENSE), folder / "model.gguf"))
        files = sessions(Path(scratch))
        inputs = [*heads(models), *checkpoints(model), *indexes(Path(scratch)), *files]
        for name, contents in (("corpus", inputs), ("sessions", files)):
            for index, data in enumerate(contents):
                (folder / name / f"{index:02}").write_bytes(data)


if __name__ == "__main__":
    main()

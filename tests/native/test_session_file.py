"""Session files: another process goes on as if nothing had ended; damaged files are refused."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.gguf_tools.errors import FormatError, MtpGgufError, OutputError, RequestError
from mtp_gguf.gguf_tools.files.rewrite import TensorCopy
from mtp_gguf.native import MTPLlama, NativeError
from mtp_gguf.native.errors import ContextFullError
from mtp_gguf.native.sessions import session_file
from mtp_gguf.native.sessions.session_file import (
    check_session,
    read_header,
    read_session,
    write_session,
)
from support import generation
from support.generation import in_another_process, random_tokens, take
from support.gguf_files import edited
from support.models import Dial, Models
from support.session_files import (
    NUMBERS,
    SessionFile,
    parse_session,
    version_1,
    with_checksum,
    write_twin,
)

PROMPT = random_tokens(20, 2)
MORE = [5, 6, 7]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temp": 0.0},
    "seeded": {"temp": 6.0, "top_k": 8, "top_p": 1.0, "min_p": 0.0},  # the model is very sure
}


load = partial(generation.load, depth=3, seed=5)


def go_on(llm: MTPLlama, text: list[int], sampling: dict[str, Any]) -> dict[str, Any]:
    """What a session does after `text`: its tokens, drafts, acceptance and tokens read."""
    llm.session.reset_stats()
    tokens = take(llm, 24, [*text, *MORE], **sampling)
    did = llm.mtp_stats
    return {
        "tokens": tokens,
        "drafted": list(did.drafted),
        "accepted": list(did.accepted),
        "cycles": did.cycles,
        "read": did.prefilled,
    }


CONTINUE = """
import json, sys
from pathlib import Path
from native.test_session_file import go_on, load
model, file, text, sampling, options = sys.argv[1:]
with load(Path(model), **json.loads(options)) as llm:
    extra = llm.load_session(file)
    print(json.dumps([extra, go_on(llm, json.loads(text), json.loads(sampling))]))
"""


def test_a_head_that_is_damaged_leaves_a_session(models: Models, tmp_path: Path) -> None:
    """No reader takes NaNs of a head, so they are not written; the trunk goes on from the file."""

    def spoil(tensors: dict[str, TensorCopy]) -> None:
        name = next(n for n in tensors if n.endswith("4.attn_k_norm.weight"))
        spec = tensors[name].spec
        tensors[name] = TensorCopy(spec, data=np.full(spec.shape, np.nan, np.float32).tobytes())

    path = edited(models.gguf("demo", "Q4_K_M", "F16"), tmp_path / "m.gguf", tensors=spoil)
    with load(path) as llm:
        text = take(llm, 9, PROMPT)
        llm.save_session(tmp_path / "s.session")
        want = take(llm, 12, [*PROMPT, *text, *MORE])
    with load(path) as llm:
        llm.load_session(tmp_path / "s.session")
        assert take(llm, 12, [*PROMPT, *text, *MORE]) == want
        assert llm.mtp_stats.prefilled <= len(MORE) + 1


@pytest.mark.sample(2)
@pytest.mark.parametrize("sampling", SAMPLING)
@pytest.mark.parametrize("options", [{}, {"lookup": True}, {"rollback": "checkpoint"}], ids=str)
def test_another_process_goes_on(
    dial: Dial, tmp_path: Path, sampling: str, options: dict[str, Any]
) -> None:
    path, file = dial("tiny"), tmp_path / "a.session"
    with load(path, **options) as llm:
        text = [*PROMPT, *take(llm, 30, PROMPT, **SAMPLING[sampling])]
        llm.save_session(file, extra={"next": text[-1:], "größe": 1})
        read = llm.n_tokens
        want = go_on(llm, text, SAMPLING[sampling])
    result = in_another_process(
        CONTINUE, path, file, json.dumps(text), json.dumps(SAMPLING[sampling]), json.dumps(options)
    )
    assert not result.stderr
    extra, found = json.loads(result.stdout)
    assert extra == {"next": text[-1:], "größe": 1}
    assert found == want
    assert found["read"] == len(text) + len(MORE) - read
    assert sum(found["accepted"]) > 0
    if sampling == "seeded":  # of the numbers drawn, too
        with load(path, seed=6, **options) as llm:
            llm.load_session(file)
            assert go_on(llm, text, SAMPLING[sampling])["tokens"] != want["tokens"]


EARLIER = random_tokens(900, 3)


def talk(llm: MTPLlama) -> dict[int, list[int]]:
    """Two long prompts, and prompts that leave the text in the first answer and in the second."""
    first = EARLIER[:400]
    first += take(llm, 12, first)
    second = [*first, *EARLIER[400:]]
    take(llm, 12, second)
    return {400 - 64: [*first[:405], 9, 8, 7], len(second) - 64: [*second, 9, 8, 7]}


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{}, {"lookup": True}, {"rollback": "checkpoint"}], ids=str)
def test_a_changed_prompt_goes_on_from_an_earlier_checkpoint(
    dial: Dial, tmp_path: Path, options: dict[str, Any]
) -> None:
    """In another process as in the one that saved the session."""
    path, file = dial("tiny"), tmp_path / "a.session"
    options = {**options, "n_ctx": 2048}
    with load(path, **options) as llm:
        prompts = talk(llm)
        llm.save_session(file)
    assert list(read_header(file).earlier) == list(prompts)
    for start, prompt in prompts.items():
        with load(path, **options) as llm:
            talk(llm)
            want = go_on(llm, prompt, SAMPLING["greedy"])
        result = in_another_process(
            CONTINUE, path, file, json.dumps(prompt), json.dumps({"temp": 0.0}), json.dumps(options)
        )
        assert not result.stderr
        assert json.loads(result.stdout) == [{}, want]
        assert want["read"] == len(prompt) + len(MORE) - start
        assert sum(want["accepted"]) > 0
    with load(path, **options, keep_prompt=0) as llm:
        prompts = talk(llm)
        llm.save_session(file)
        assert read_header(file).earlier == ()
        llm.load_session(file)
        assert go_on(llm, prompt, SAMPLING["greedy"])["read"] == len(prompt) + len(MORE)


def test_wrong_contents_of_earlier_checkpoints(dial: Dial, tmp_path: Path) -> None:
    """Whatever the checksums and lengths say; the model stays usable, and empty at worst."""
    path, file, broken = dial("tiny"), tmp_path / "a.session", tmp_path / "b.session"
    with load(path, n_ctx=2048) as llm:
        prompt = talk(llm)[400 - 64]
        llm.save_session(file)
        found = read_session(file)
        n_tokens = found.header.n_tokens
        lengths, arrays = found.header.earlier, [array.tobytes() for array in found.earlier]
        want = go_on(llm, prompt, SAMPLING["greedy"])["tokens"]

        def write(earlier: dict[int, bytes]) -> None:
            identity, tokens = found.header.identity, found.tokens
            write_session(broken, tokens, found.checkpoint, identity, {}, earlier)

        for earlier, message in (
            ({lengths[0] + 1: arrays[0]}, f"expected a checkpoint of {lengths[0] + 1} tokens"),
            ({n_tokens: found.checkpoint.tobytes()}, "expected one in host memory that was read"),
            ({lengths[0]: arrays[0][:-1]}, "bytes after its header"),
            ({lengths[0]: b"x"}, "expected 104 bytes or more, found 1"),
        ):
            write(earlier)
            with pytest.raises(MtpGgufError, match=message) as caught:
                llm.load_session(broken)
            assert str(broken) in str(caught.value)
            assert llm.session.length() == llm.n_tokens
            assert go_on(llm, prompt, SAMPLING["greedy"])["tokens"] == want
        for earlier in (
            {lengths[1]: arrays[1], lengths[0]: arrays[0]},
            {n_tokens + 1: arrays[0]},
            {0: arrays[0]},
        ):
            with pytest.raises(RequestError, match=rf"rising numbers from 1 to {n_tokens}, found "):
                write(earlier)
        data = file.read_bytes()
        for value, index in itertools.product((0, lengths[0] - 1, n_tokens + 1, 2**32 - 1), (2, 3)):
            parts = parse_session(data)
            parts.sections[index][3] = value
            if (index, value) != (2, lengths[0] - 1):
                broken.write_bytes(parts.data())
                assert "earlier: expected rising numbers from 1 to" in refused(llm, broken)


def test_what_an_earlier_checkpoint_has_learned_from_the_text_is_complete(
    dial: Dial, tmp_path: Path
) -> None:
    """Its bytes are read as a struct."""
    file = tmp_path / "a.session"
    with load(dial("tiny"), n_ctx=2048, lookup=True) as llm:
        talk(llm)
        llm.save_session(file)
        found = read_session(file)
        state = found.earlier[0].tobytes()
        *before, n_text = struct.unpack("<4Q", state[48:80])
        end = 104 + sum(before) + n_text
        shorter = state[:72] + struct.pack("<Q", n_text - 4) + state[80 : end - 4] + state[end:]
        earlier = {found.header.earlier[0]: shorter}
        write_session(file, found.tokens, found.checkpoint, found.header.identity, {}, earlier)
        with pytest.raises(MtpGgufError, match=rf"expected {n_text} bytes, found {n_text - 4}"):
            llm.load_session(file)


OVERRIDES = {"qwen35.attention.layer_norm_rms_epsilon": 0.3, "general.name": "another"}


def test_a_session_is_continued_with_the_same_overrides(dial: Dial, tmp_path: Path) -> None:
    path, file = dial("tiny"), tmp_path / "a.session"
    with load(path, kv_overrides=OVERRIDES) as llm:
        text = [*PROMPT, *take(llm, 8, PROMPT)]
        llm.save_session(file)
    with load(path) as llm, pytest.raises(RequestError, match=r"override .*: expected none"):
        llm.load_session(file)
    others = {**OVERRIDES, "qwen35.attention.layer_norm_rms_epsilon": 0.25}
    with load(path, kv_overrides=others) as llm, pytest.raises(RequestError, match=r"0\.25.*0\.3"):
        llm.load_session(file)
    with load(path, kv_overrides=dict(reversed(OVERRIDES.items()))) as llm:
        llm.load_session(file)
        llm.session.reset_stats()
        take(llm, 3, text)
        assert llm.mtp_stats.prefilled <= 2


Saved = tuple[Path, Path, list[int]]


@pytest.fixture
def saved(dial: Dial, tmp_path: Path) -> Saved:
    """A model, the file of a session with it, and the text of that session."""
    path, file = dial("tiny"), tmp_path / "a.session"
    with load(path) as llm:
        text = [*PROMPT, *take(llm, 8, PROMPT)]
        llm.save_session(file)
        return path, file, llm.input_ids[: llm.n_tokens].tolist() + text[-1:]


def test_a_misfit_is_refused_by_its_field(saved: Saved, dial: Dial, tmp_path: Path) -> None:
    path, file, text = saved
    twin = write_twin(path, tmp_path / "twin.gguf")
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (dial("tiny-3v"), {}, "name: expected .*3v.*, found "),
        (dial("tiny", quant="Q8_0"), {}, "model: expected "),
        (twin, {}, "model: expected .* bytes .*, found .* bytes"),
        (path, {"type_k": 8}, "type_k: expected 'Q8_0' .*, found 'F16'"),
        (path, {"flash_attn": False}, "flash_attn_type: expected '0' .*, found '1'"),
        (path, {"kv_overrides": OVERRIDES}, "override .*: expected '.* another'.*, found none"),
        (path, {"rope_freq_base": 5e5}, r"rope_freq_base: expected '500000\.0' .*, found '0\.0'"),
    ]
    for model, options, message in cases:
        with load(model, **options) as llm:
            want = take(llm, 6, PROMPT)
            with pytest.raises(RequestError, match=message):
                llm.load_session(file)
            assert take(llm, 6, PROMPT) == want
    with load(path, mtp_head=str(twin)) as llm, pytest.raises(RequestError, match="head: expected"):
        llm.load_session(file)
    with load(path, logits_all=True) as llm, pytest.raises(NativeError, match="logits_all=False"):
        llm.load_session(file)
    with load(path, depth=0) as llm:  # its trunk goes on
        llm.load_session(file)
        llm.session.reset_stats()
        take(llm, 3, text)
        assert llm.mtp_stats.prefilled == 1


def test_a_text_longer_than_the_context(saved: Saved) -> None:
    path, file, _ = saved
    large = file.with_name("large.session")
    with load(path, n_ctx=512) as llm:
        llm.eval((PROMPT * 20)[:256])
        llm.save_session(file)  # there would be no room for another token
        llm.eval((PROMPT * 20)[256:301])
        llm.save_session(large)
    with load(path) as llm:
        want = take(llm, 6, PROMPT)
        for n, session in ((256, file), (301, large)):
            message = rf"n_ctx: expected more than the {n} .* 256"
            with pytest.raises(ContextFullError, match=message):
                llm.load_session(session)
            assert take(llm, 6, PROMPT) == want


def test_nothing_to_save(dial: Dial, tmp_path: Path) -> None:
    with load(dial("tiny")) as llm:
        with pytest.raises(NativeError, match="expected evaluated tokens, found none"):
            llm.save_session(tmp_path / "a")
        llm.eval(PROMPT)
        for extra in ({"a": object()}, {"a": float("nan")}):
            with pytest.raises(RequestError, match="extra: expected what JSON can hold"):
                llm.save_session(tmp_path / "a", extra=extra)
        with pytest.raises(OutputError, match="expected its folder to exist"):
            llm.save_session(tmp_path / "none" / "a")
        with pytest.raises(FormatError, match="cannot be opened: No such file"):
            llm.load_session(tmp_path / "a")
    assert not list(tmp_path.iterdir())
    with pytest.raises(NativeError, match="the model is closed"):
        llm.save_session(tmp_path / "a")


def refused(llm: MTPLlama, path: Path) -> str:
    """The sentence with which a file is refused; the model is as it was before."""
    length = llm.n_tokens
    with pytest.raises(MtpGgufError) as caught:
        llm.load_session(path)
    message = str(caught.value)
    assert str(path) in message
    assert "\n" not in message
    assert len(message) < 600
    assert llm.session.length() == llm.n_tokens == length
    return message


@pytest.mark.parametrize("count", [350, pytest.param(3000, marks=pytest.mark.slow)])
def test_damaged_files_are_refused(saved: Saved, tmp_path: Path, count: int) -> None:
    path, file, text = saved
    data = file.read_bytes()
    sections = read_header(file).sections
    meaningful = [
        *range(len(data) - len(parse_session(data).body)),
        *(i for s in sections for i in range(s.offset, s.offset + s.nbytes)),
    ]
    rng = random.Random(3)
    broken = tmp_path / "broken.session"
    with load(path) as llm:
        take(llm, 5, PROMPT)
        for at in [*range(64), *rng.sample(meaningful, count * 5 // 7)]:
            changed = bytearray(data)
            changed[at] ^= 1 << rng.randrange(8)
            broken.write_bytes(changed)
            refused(llm, broken)
        lengths = (rng.randrange(len(data)) for _ in range(count * 2 // 7))
        for length in [*range(40), *lengths, len(data) - 1]:
            broken.write_bytes(data[:length])
            refused(llm, broken)
        broken.write_bytes(data + b"\0")
        assert f"expected {len(data)} bytes, found {len(data) + 1}" in refused(llm, broken)
        llm.load_session(file)
        llm.session.reset_stats()
        take(llm, 3, text)
        assert llm.mtp_stats.prefilled == 1


def test_a_session_that_others_use_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder notes the last use as the file's time, which is no change of it."""
    path, really = tmp_path / "a.session", session_file._File.read
    write_session(path, np.arange(5, dtype=np.int32), b"x", {}, {})

    def read(*args: Any) -> Any:
        os.utime(path, (1, 1))
        return really(*args)

    monkeypatch.setattr(session_file._File, "read", read)
    assert read_session(path).checkpoint.tobytes() == b"x"
    assert path.stat().st_mtime == 1


def test_files_that_change_while_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is replaced is read as it was; one that is cut ends in a sentence."""
    path, other, really = tmp_path / "a.session", tmp_path / "b", session_file._File.read
    pending: list[Callable[[], object]] = []

    def read(*args: Any) -> Any:
        while pending:
            pending.pop()()
        return really(*args)

    def written(change: Callable[[], object]) -> Path:
        write_session(path, np.arange(5, dtype=np.int32), b"x", {}, {})
        pending.append(change)
        return path

    monkeypatch.setattr(session_file._File, "read", read)
    write_session(other, np.arange(9, dtype=np.int32), b"y", {}, {})
    assert read_session(written(lambda: other.replace(path))).checkpoint.tobytes() == b"x"
    assert read_session(written(path.unlink)).checkpoint.tobytes() == b"x"
    with pytest.raises(FormatError, match=r"expected bytes after \d+, found the end; the file"):
        read_session(written(lambda: os.truncate(path, 100)))


BLOCK = 256 << 10  # of libmtp's reader


def test_a_section_of_several_blocks(tmp_path: Path) -> None:
    """Sections are read in blocks, each of which counts."""
    path = tmp_path / "a.session"
    rng = np.random.default_rng(7)
    for length in (BLOCK - 1, BLOCK, 3 * BLOCK, 3 * BLOCK + 17):
        checkpoint = rng.bytes(length)
        write_session(path, np.arange(5, dtype=np.int32), checkpoint, {}, {})
        assert read_session(path).checkpoint.tobytes() == checkpoint
        assert check_session(path).sections[1].checksum == zlib.crc32(checkpoint)
        data = path.read_bytes()
        for at in (0, min(BLOCK, length - 1), length - 1):
            changed = bytearray(data)
            changed[len(data) - length + at] ^= 1
            path.write_bytes(changed)
            for reader in (read_session, check_session):
                with pytest.raises(FormatError, match=r"checkpoint: expected checksum .* damaged"):
                    reader(path)


def test_checksums_of_every_length(tmp_path: Path) -> None:
    """They are those of zlib, whether 64 bytes are computed at once, or 16, 8 or one."""
    path = tmp_path / "a.session"
    data = np.random.default_rng(8).bytes(64 + 64 + 3 * 16 + 15)
    for length in range(1, len(data) + 1):
        write_session(path, np.arange(5, dtype=np.int32), data[:length], {}, {})
        assert check_session(path).sections[1].checksum == zlib.crc32(data[:length])


LARGE = [0, 1, 2, 63, 2**16, 2**31, 2**32 - 1]
LARGER = [*LARGE, 2**32, 2**63, 2**64 - 1]


def deep(levels: int) -> bytes:
    """JSON that nests that many levels."""
    return b"[" * levels + b"]" * levels


def test_forged_headers_are_refused(saved: Saved, tmp_path: Path) -> None:
    path, file, _ = saved
    data = file.read_bytes()
    whole = parse_session(data)
    assert whole.data() == data
    broken = tmp_path / "broken.session"

    with load(path) as llm:

        def check(*, found: str = "", **changes: Any) -> None:
            broken.write_bytes(whole.with_header(**changes).data())
            message = refused(llm, broken)
            assert "header: expected checksum" not in message
            assert found in message

        for name in NUMBERS:
            if name == "owner":  # every number is one
                continue
            for value in LARGER if name == "nbytes" else LARGE:
                if value != {"program": 1, "sections": 2, "extra": len(whole.extra)}.get(name):
                    check(numbers=whole.numbers | {name: value})
        counts = [[*section[:3], 9] for section in whole.sections]
        numbers = whole.numbers | {"n_tokens": 9}
        broken.write_bytes(replace(whole, numbers=numbers, sections=counts).data())
        assert "tokens: expected 36 bytes, found " in refused(llm, broken)
        name_at = data.index(whole.identity[-1][0]) - 4
        for length, place in itertools.product((2**8 - 1, 2**12 - 1, 2**16 - 1), (0, 2)):
            longer = (
                data[: name_at + place] + struct.pack("<H", length) + data[name_at + place + 2 :]
            )
            broken.write_bytes(with_checksum(longer))
            message = refused(llm, broken)
            assert ("found the end" if (length, place) == (4095, 2) else "identity: ") in message
        check(reserved=1, found="reserved: expected 0 to 0, found 1")
        for name, many in (("fields", 1024), ("sections", 1026), ("extra", 64 << 20)):
            check(numbers=whole.numbers | {name: many}, found="header: expected ")
        for index, place in itertools.product((0, 1), range(4)):
            for value in LARGER if place < 2 else LARGE:
                sections = [list(section) for section in whole.sections]
                sections[index][place] = value
                broken.write_bytes(replace(whole, sections=sections).data())
                assert (place == 2) == ("expected checksum" in refused(llm, broken))
        first, text = whole.identity[0]
        others = whole.identity[1:]
        for field in ((b"", text), (b"n" * 256, text), (b"n\n", text), (b"n\xff", text)):
            check(identity=[field, *others], found="identity: ")
        for wrong in (b"v" * 4096, b"\0", b"a\x1b", b"\xc3\xa9", b"\x7f"):
            check(identity=[(first, wrong), *others], found="identity: ")
        check(identity=[(first, text), *whole.identity], found=f"found {first.decode()} twice")
        check(identity=[(str(n).encode(), b"") for n in range(1025)], found="identity: expected 0")
        check(identity=[], found="program: expected 'MTPLlama' as in the loaded model, found none")
        further = [*whole.identity, (b"of the next version", b"x")]
        check(identity=further, found="of the next version: expected none as in the loaded model")
        for json_text in (b"", b"[]", deep(4000), b"\xff", b'{"a":' * 1000, b"1" * 5000, b"null"):
            check(extra=json_text, found="extra: expected ")
        check(extra=b'{"a":' + deep(255) + b"}", found="extra: expected 255 levels at most")
        for version in (0, 1, 3, 2**32 - 1):
            check(version=version, found=f"version: expected 2, found {version}; ")
        broken.write_bytes(version_1(b'{"n_tokens": 1}'))
        assert "an older mtp-gguf wrote it: save the session anew" in refused(llm, broken)
        llm.eval(PROMPT)
        extra = json.loads(b'{"a":' + deep(254) + b"}")
        llm.save_session(broken, extra=extra)
        assert llm.load_session(broken) == extra
        with pytest.raises(RequestError, match="extra: expected 255 levels at most, found more"):
            llm.save_session(broken, extra={"b": extra})


def test_a_section_that_ends_before_it_begins(tmp_path: Path) -> None:
    """Its size is that of a negative number, after which the next one fills the file."""
    path = tmp_path / "a.session"
    parts = SessionFile(numbers={"program": 2}, extra=b"", body=bytes(100))
    parts.sections = [[128, 2**64 - 127, 0, 1], [64, 64 + 2 * 24 + 100 - 64, 0, 1]]
    path.write_bytes(parts.data())
    with pytest.raises(FormatError, match=r"tokens: expected 1 byte or more within the file"):
        check_session(path)


def test_headers_that_a_reader_would_refuse_are_not_written(tmp_path: Path) -> None:
    path, one = tmp_path / "a.session", np.ones(1, np.int32)
    for identity, message in (
        ({"n": "é"}, "identity: expected printable ASCII"),
        ({"": "v"}, "identity: bytes of a name: expected 1 to 255, found 0"),
        ({"n" * 256: "v"}, "identity: a name: expected at most 255 bytes, found 256"),
        ({"n": "v" * 4096}, "identity: a value: expected at most 4095 bytes, found 4096"),
        ({str(n): "" for n in range(1025)}, "n_fields: expected 0 to 1024, found 1025"),
    ):
        with pytest.raises(RequestError, match=message):
            write_session(path, one, b"x", identity, {})
    with pytest.raises(RequestError, match="extra: expected at most 67108864 bytes"):
        write_session(path, one, b"x", {}, {"a": "x" * (64 << 20)})
    assert not list(tmp_path.iterdir())
    most = {f"{n}".ljust(255): "v" * 4095 for n in range(1024)}
    write_session(path, one, b"x", most, {"a": 1})
    assert read_header(path).identity == most


def test_a_section_that_memory_cannot_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its size is at most that of the file, which may have no blocks on the disk."""
    path = tmp_path / "a.session"
    write_session(path, np.ones(1, np.int32), b"state", {}, {})

    def empty(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(np, "empty", empty)
    with pytest.raises(RequestError, match="tokens: needs 4 bytes of memory, which are not free"):
        read_session(path)


def test_valid_checksums_of_wrong_contents(saved: Saved, tmp_path: Path) -> None:
    """The tokens and the checkpoint are checked as well, whatever the checksums say."""
    path, file, _ = saved
    found = read_session(file)
    whole = found.checkpoint.tobytes()
    broken = tmp_path / "broken.session"

    def write(tokens: Any = found.tokens, checkpoint: bytes = whole) -> None:
        write_session(broken, np.asarray(tokens, np.int32), checkpoint, found.header.identity, {})

    rng = random.Random(4)
    with load(path) as llm:
        take(llm, 5, PROMPT)
        write(found.tokens[:-1])
        assert "checkpoint: expected a whole one of" in refused(llm, broken)
        write([10**6, *found.tokens[1:]])
        assert "expected ids below" in refused(llm, broken)
        write([-5, -5, *found.tokens[2:]])  # a picture, as far as the tokens say
        llm.load_session(broken)
        assert llm.input_ids[:3].tolist() == [-1, -1, found.tokens[2]]
        assert take(llm, 5, PROMPT)
        for length in (1, 50, 100, 5000, len(whole) - 1):
            write(checkpoint=whole[:length])
            refused(llm, broken)
        for at in [*range(96), *(rng.randrange(len(whole)) for _ in range(30))]:
            changed = bytearray(whole)
            changed[at] ^= 0x80
            write(checkpoint=bytes(changed))
            with suppress(MtpGgufError):  # some bits are numbers, any of which is valid
                llm.load_session(broken)
            assert llm.session.length() == llm.n_tokens
        assert len(take(llm, 6, PROMPT)) == 6


SAVE = """
import sys
from pathlib import Path
import numpy as np
from mtp_gguf.native.sessions.session_file import write_session
count = 0
while True:
    count += 1
    write_session(Path(sys.argv[1]), np.full(9, count, np.int32), bytes([count % 256]) * 3_000_000,
                  {}, {"count": count})
    print(count, flush=True)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_leaves_a_whole_file(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "a.session"
    rng = random.Random(1)
    for _ in range(kills):
        with subprocess.Popen(
            [sys.executable, "-c", SAVE, str(path)], stdout=subprocess.PIPE
        ) as child:
            assert child.stdout
            child.stdout.readline()
            time.sleep(rng.uniform(0, 0.05))
            child.send_signal(signal.SIGKILL)
        found = read_session(path)
        count = found.header.extra["count"]
        assert set(found.tokens.tolist()) == {count}
        assert set(found.checkpoint.tolist()) == {count % 256}
    write_session(path, np.ones(1, np.int32), b"x", {}, {})
    assert [p.name for p in tmp_path.iterdir()] == [path.name]  # and no leftovers


FULL = """
import resource, sys
from pathlib import Path
import numpy as np
from mtp_gguf.gguf_tools.errors import OutputError
from mtp_gguf.native.sessions.session_file import write_session
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_session(Path(sys.argv[1]), np.ones(9, np.int32), bytes(100_000), {}, {})
except OutputError as error:
    sys.exit(str(error))
"""


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a.session"
    write_session(path, np.ones(1, np.int32), b"old", {}, {})
    result = in_another_process(FULL, path)
    assert result.returncode == 1
    assert result.stderr.startswith(f"{path}: no space for its 100")
    assert len(result.stderr.splitlines()) == 1
    assert read_session(path).checkpoint.tobytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]

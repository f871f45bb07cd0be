"""Session files: another process goes on as if nothing had ended; damaged files are refused."""

from __future__ import annotations

import itertools
import json
import os
import random
import resource
import signal
import struct
import subprocess
import sys
import time
import zlib
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.gguf_tools.errors import FormatError, MtpGgufError, OutputError, RequestError
from mtp_gguf.native import MTPLlama, NativeError, session_file
from mtp_gguf.native.errors import ContextFullError
from mtp_gguf.native.session_file import read_header, read_session, write_session
from support.models import Dial
from support.tiny_llama import write_tiny_llama

PROMPT = [int(t) for t in np.random.PCG64(2).random_raw(20) % np.uint64(700)]
MORE = [5, 6, 7]
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temp": 0.0},
    "seeded": {"temp": 6.0, "top_k": 8, "top_p": 1.0, "min_p": 0.0},  # the model is very sure
}


def load(path: Path, **options: Any) -> closing[MTPLlama]:
    given = {"depth": 3, "n_ctx": 256, "n_threads": 1, "n_threads_batch": 1, "seed": 5, **options}
    return closing(MTPLlama(str(path), **given))


def take(llm: MTPLlama, n: int, prompt: list[int], **options: Any) -> list[int]:
    stream = llm.generate(prompt, **{"temp": 0.0, **options})
    try:
        return list(itertools.islice(stream, n))
    finally:
        stream.close()


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
from test_session_file import go_on, load
model, file, text, sampling, options = sys.argv[1:]
with load(Path(model), **json.loads(options)) as llm:
    extra = llm.load_session(file)
    print(json.dumps([extra, go_on(llm, json.loads(text), json.loads(sampling))]))
"""


def in_another_process(program: str, *arguments: object) -> Any:
    tests = Path(__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [tests, Path(__file__).parent]))}
    words = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(words, check=False, env=env, capture_output=True, text=True, timeout=120)


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


EARLIER = [int(t) for t in np.random.PCG64(3).random_raw(900) % np.uint64(700)]


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
            ({lengths[0]: b"x"}, "expected 96 bytes or more, found 1"),
            ({lengths[1]: arrays[1], lengths[0]: arrays[0]}, "rising numbers from 1 to"),
            ({n_tokens + 1: arrays[0]}, f"rising numbers from 1 to {n_tokens}, found others"),
            ({0: arrays[0]}, "rising numbers from 1 to"),
        ):
            write(earlier)
            with pytest.raises(MtpGgufError, match=message) as caught:
                llm.load_session(broken)
            assert str(broken) in str(caught.value)
            assert llm.session.length() == llm.n_tokens
            assert go_on(llm, prompt, SAMPLING["greedy"])["tokens"] == want
        data = file.read_bytes()
        for value in (
            *NUMBERS,
            [1],
            [1, 2, 3],
            [1, "2"],
            [1, 2.0],
            [True, 2],
            list(range(1, 2000)),
        ):
            broken.write_bytes(forged(data, lambda f: {**f, "earlier": value}))  # noqa: B023
            refused(llm, broken)


OVERRIDES = {"qwen35.attention.layer_norm_rms_epsilon": 0.3, "general.name": "another"}


def test_a_session_is_continued_with_the_same_overrides(dial: Dial, tmp_path: Path) -> None:
    path, file = dial("tiny"), tmp_path / "a.session"
    with load(path, kv_overrides=OVERRIDES) as llm:
        text = [*PROMPT, *take(llm, 8, PROMPT)]
        llm.save_session(file)
    with load(path) as llm, pytest.raises(RequestError, match="kv_overrides: expected none"):
        llm.load_session(file)
    others = {**OVERRIDES, "qwen35.attention.layer_norm_rms_epsilon": 0.25}
    with load(path, kv_overrides=others) as llm, pytest.raises(RequestError, match=r"0\.25.*0\.3"):
        llm.load_session(file)
    with load(path, kv_overrides=dict(reversed(OVERRIDES.items()))) as llm:
        llm.load_session(file)
        llm.session.reset_stats()
        take(llm, 3, text)
        assert llm.mtp_stats.prefilled <= 2


@pytest.fixture
def saved(dial: Dial, tmp_path: Path) -> tuple[Path, Path, list[int]]:
    """A model, the file of a session with it, and the text of that session."""
    path, file = dial("tiny"), tmp_path / "a.session"
    with load(path) as llm:
        text = [*PROMPT, *take(llm, 8, PROMPT)]
        llm.save_session(file)
        return path, file, llm.input_ids[: llm.n_tokens].tolist() + text[-1:]


def test_a_misfit_is_refused_by_its_field(
    saved: tuple[Path, Path, list[int]], dial: Dial, tmp_path: Path
) -> None:
    path, file, text = saved
    twin = tmp_path / "twin.gguf"
    data = path.read_bytes()
    quarter = len(data) // 4  # other weights of the same shape and size
    twin.write_bytes(data[:-quarter] + bytes(byte ^ 1 for byte in data[-quarter:]))
    cases: list[tuple[Path, dict[str, Any], str]] = [
        (dial("tiny-3v"), {}, "name: expected .*3v.*, found "),
        (dial("tiny", quant="Q8_0"), {}, "model: expected "),
        (twin, {}, "model: expected .* bytes .*, found .* bytes"),
        (path, {"type_k": 8}, "cache_type_k: expected 'Q8_0' .*, found 'F16'"),
        (path, {"flash_attn": False}, "flash_attn_type: expected 0 .*, found 1"),
        (path, {"kv_overrides": OVERRIDES}, "kv_overrides: expected {'general.name.*, found none"),
        (path, {"rope_freq_base": 5e5}, "rope_freq_base: expected 500000.0 .*, found 0.0"),
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


def test_a_text_longer_than_the_context(saved: tuple[Path, Path, list[int]]) -> None:
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
def test_damaged_files_are_refused(
    saved: tuple[Path, Path, list[int]], tmp_path: Path, count: int
) -> None:
    path, file, text = saved
    data = file.read_bytes()
    sections = read_header(file).sections
    meaningful = [
        *range(sections[0].offset - 64),
        *(i for s in sections for i in range(s.offset, s.offset + s.nbytes)),
    ]
    rng = random.Random(3)
    broken = tmp_path / "broken.session"
    with load(path) as llm:
        take(llm, 5, PROMPT)
        for at in [*range(48), *rng.sample(meaningful, count * 5 // 7)]:
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
    path, really = tmp_path / "a.session", session_file._read_section
    write_session(path, np.arange(5, dtype=np.int32), b"x", {}, {})

    def read(*args: Any) -> Any:
        os.utime(path, (1, 1))
        return really(*args)

    monkeypatch.setattr(session_file, "_read_section", read)
    assert read_session(path).checkpoint.tobytes() == b"x"
    assert path.stat().st_mtime == 1


def test_a_section_of_several_blocks(tmp_path: Path) -> None:
    """Sections are read in blocks, each of which counts."""
    path, block = tmp_path / "a.session", session_file._BLOCK
    rng = np.random.default_rng(7)
    for length in (block - 1, block, 3 * block, 3 * block + 17):
        checkpoint = rng.bytes(length)
        write_session(path, np.arange(5, dtype=np.int32), checkpoint, {}, {})
        assert read_session(path).checkpoint.tobytes() == checkpoint
        data = path.read_bytes()
        for at in (0, min(block, length - 1), length - 1):
            changed = bytearray(data)
            changed[len(data) - length + at] ^= 1
            path.write_bytes(changed)
            with pytest.raises(FormatError, match=r"checkpoint: expected checksum .* is damaged"):
                read_session(path)


def forged(data: bytes, change: Any) -> bytes:
    """The file with a changed JSON, and a checksum that fits it."""
    magic, version, _, length, size = struct.unpack_from("<8sIIQQ", data)
    fields = json.loads(data[32 : 32 + length])
    text = change(fields)
    text = (text if isinstance(text, bytes) else json.dumps(text).encode()).ljust(length)
    prefix = struct.pack("<8sIIQQ", magic, version, 0, len(text), size)
    checksum = zlib.crc32(text, zlib.crc32(prefix))
    prefix = struct.pack("<8sIIQQ", magic, version, checksum, len(text), size)
    return prefix + text + data[32 + len(text) :]


NUMBERS: list[Any] = [
    -1,
    0,
    1,
    63,
    2**31,
    2**32,
    2**63,
    2**64,
    10**400,
    1.5,
    True,
    None,
    "1",
    [],
    {},
]


def deep(levels: int) -> bytes:
    """JSON that nests that many levels."""
    return b"[" * levels + b"]" * levels


def test_forged_headers_are_refused(saved: tuple[Path, Path, list[int]], tmp_path: Path) -> None:
    path, file, _ = saved
    data = file.read_bytes()
    broken = tmp_path / "broken.session"
    with load(path) as llm:
        for value in NUMBERS:
            for name in ("n_tokens", "identity", "extra", "earlier", "sections"):
                if (name, value) in (("extra", {}), ("earlier", [])):
                    continue
                broken.write_bytes(forged(data, lambda f: {**f, name: value}))  # noqa: B023
                refused(llm, broken)
            for index, name in itertools.product((0, 1), ("name", "offset", "nbytes", "checksum")):

                def change(fields: Any) -> Any:
                    fields["sections"][index][name] = value  # noqa: B023
                    return fields

                broken.write_bytes(forged(data, change))
                message = refused(llm, broken)
                assert name == "checksum" or "checksum" not in message
        for text in (
            b"",
            b"[]",
            b"[" * 4000,
            b"\xff",
            b'{"a":' * 1000,
            deep(300),
            b"1" * 5000,
            b"null",
        ):
            broken.write_bytes(forged(data, lambda _: text))  # noqa: B023
            refused(llm, broken)
        for length in (0, 2**31, 2**63, 2**64 - 1):
            broken.write_bytes(data[:16] + struct.pack("<Q", length) + data[24:])
            refused(llm, broken)
        broken.write_bytes(data[:8] + struct.pack("<I", 2) + data[12:])
        assert "version: expected 1, found 2" in refused(llm, broken)
        llm.eval(PROMPT)
        extra = json.loads(b'{"a":' + deep(254) + b"}")
        llm.save_session(broken, extra=extra)
        assert llm.load_session(broken) == extra
        with pytest.raises(RequestError, match="extra: expected 255 levels at most, found more"):
            llm.save_session(broken, extra={"b": extra})
    write_session(broken, np.ones(1, np.int32), b"x", {}, {})
    broken.write_bytes(forged(broken.read_bytes(), lambda f: {**f, "n_tokens": True}))
    with pytest.raises(FormatError, match=r"n_tokens: expected 1 to .*, found something else"):
        read_header(broken)


def test_valid_checksums_of_wrong_contents(
    saved: tuple[Path, Path, list[int]], tmp_path: Path
) -> None:
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
from mtp_gguf.native.session_file import write_session
count = 0
while True:
    count += 1
    write_session(Path(sys.argv[1]), np.full(9, count, np.int32), bytes([count % 256]) * 3_000_000,
                  {}, {"count": count})
    print(count, flush=True)
"""


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
from mtp_gguf.native.session_file import write_session
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


def test_a_model_without_recurrent_state(tmp_path: Path) -> None:
    """Its session can be cut: a prompt that shares a part of the text is read from there."""
    model, file = write_tiny_llama(tmp_path / "llama.gguf"), tmp_path / "a.session"
    prompt = [t % 128 for t in PROMPT]
    with load(model, depth=0) as llm:
        want = take(llm, 9, prompt)
        llm.save_session(file)
    with load(model, depth=0) as llm:
        llm.load_session(file)
        llm.session.reset_stats()
        assert take(llm, 1, [*prompt, *want[:-1]]) == want[-1:]  # the logits are not in the file
        assert llm.mtp_stats.prefilled == 1
        llm.session.reset_stats()
        assert take(llm, 9, prompt) == want
        assert llm.mtp_stats.prefilled == 1


def test_alignment_and_sizes(saved: tuple[Path, Path, list[int]]) -> None:
    header = read_header(saved[1])
    assert header.n_tokens == len(saved[2]) - 1
    assert all(s.offset % session_file.ALIGNMENT == 0 for s in header.sections)
    assert header.nbytes == saved[1].stat().st_size
    assert resource.getpagesize() % session_file.ALIGNMENT == 0

"""Conversions whose weights are read by ranges from a server, against those of a local folder."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from signal import SIGINT, SIGKILL
from socket import SO_LINGER, SOL_SOCKET
from struct import pack
from threading import Condition, Event
from time import sleep

import numpy as np
import pytest

from mtp_gguf.convert.checkpoints.checkpoint import Checkpoint, open_checkpoint
from mtp_gguf.convert.checkpoints.source_rows import SourceRows
from mtp_gguf.convert.families.target_model import HeadChoice
from mtp_gguf.convert.heads.acceptance import VARIABLE
from mtp_gguf.convert.options import DraftOptions
from mtp_gguf.convert.pipeline import run
from mtp_gguf.convert.plans.plan import Request
from mtp_gguf.convert.plans.plan_checkpoint import make_plans
from mtp_gguf.gguf_tools.errors import CheckpointError, FormatError, OutputError, RemoteError
from mtp_gguf.gguf_tools.files.safetensors import SafetensorsFile, read_safetensors
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.gguf_tools.heads.acceptance import read_stored
from mtp_gguf.gguf_tools.heads.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.hub import read_ahead, remote
from mtp_gguf.gguf_tools.hub.remote import RemoteSource
from mtp_gguf.gguf_tools.machine import os_files
from mtp_gguf.gguf_tools.model import open_model
from support.checkpoint_edits import edit_tensors
from support.checkpoints import SMALL, SPECS, TINY, Array, Spec
from support.commands import HEARS_SIGNALS, held
from support.hub_commands import environment, run_commands
from support.hub_server import Hub
from support.models import Models
from support.quantized_layouts import LAYOUTS
from support.range_server import Behaviour, Handler, Web
from support.serving import PATIENCE

MODEL = "somebody/Tiny-3.5"
SHARDED = replace(TINY, name="sharded", layers=4, shards=12)
CHUNK = 50_000


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a tiny checkpoint has many, and slices that end within them; and no pauses."""
    monkeypatch.setattr(read_ahead.ReadAhead, "_sleep", lambda *_: None)
    monkeypatch.setattr(remote, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(read_ahead, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr("mtp_gguf.convert.pipeline._RESUMABLE_VALUES", 256 * 31)


def request(output: Path, layout: DraftLayout | None = None, **options: object) -> Request:
    """Two precisions, by default with a head and no draft vocabulary."""
    draft = DraftOptions(True, 100, layout=layout) if layout else None
    head = HeadChoice.ALONE if layout is DraftLayout.SIDECAR else HeadChoice.WITH_TRUNK
    made = Request("Q4_K_M", head, also=("F16",), draft=draft, output=output / "x.gguf")
    return replace(made, **options)  # type: ignore[arg-type]


def convert(checkpoint: Checkpoint, asked: Request, progress: object = lambda _: None) -> None:
    with checkpoint:
        plans = make_plans(checkpoint, asked)
        run(plans, SourceRows(checkpoint), progress, 3, resumable=True)  # type: ignore[arg-type]


def from_web(folder: Path, web: Web, hashes: dict[str, str] | None = None) -> Checkpoint:
    """The checkpoint in `folder` with its weights on the server."""
    away = folder.parent / "without weights" / folder.name
    away.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        if path.suffix != ".safetensors":
            (away / path.name).write_bytes(path.read_bytes())

    def open_shard(name: str) -> SafetensorsFile:
        sleeps = lambda _: None  # noqa: E731
        return read_safetensors(RemoteSource(web.url(name), sleeps, (hashes or {}).get(name)))

    return open_checkpoint(away, elsewhere=open_shard)


def local(folder: Path, asked: Request) -> dict[str, bytes]:
    """The files of a conversion of the local folder, beside those of `asked`."""
    output = asked.output
    assert output is not None
    apart = output.parent.parent / "local"
    apart.mkdir(exist_ok=True)
    convert(open_checkpoint(folder), replace(asked, output=apart / output.name))
    return held(apart)


def check_read_once(web: Web) -> None:
    asked_for = Counter((a.path, a.range) for a in web.asked if a.range and is_chunk(*a.range))
    assert len(asked_for) > 5
    assert set(asked_for.values()) == {1}, "each chunk is fetched once"


def is_chunk(first: int, last: int) -> bool:
    return first % CHUNK == 0 and last - first < CHUNK


KINDS = (
    replace(SMALL, name="small-3", shards=3),
    *(replace(SPECS[name], shards=3) for name in ("moe-mixed", "next-unfused")),
    replace(SMALL, name="fp8", fp8=True),
    *(replace(SMALL, name=name, layout=name) for name in LAYOUTS if "gptq" in name),
)


CASES = [
    *((spec, None) for spec in KINDS),
    (KINDS[0], DraftLayout.TABLE),
    (KINDS[1], DraftLayout.SIDECAR),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("spec", "layout"), CASES, ids=[f"{spec.name}-{layout}" for spec, layout in CASES]
)
def test_the_bytes_of_the_local_conversion(
    spec: Spec, layout: DraftLayout | None, models: Models, output: Path
) -> None:
    """All files from one read; with the whole head, a file of the head alone is one of them."""
    folder = models.checkpoint(spec)
    asked = request(output, layout, sidecar=None if layout else "Q8_0")
    with Web(folder) as web:
        convert(from_web(folder, web, hashes_of(folder)), asked)
    assert held(output) == local(folder, asked)
    assert len(held(output)) == (2 if layout else 3)
    check_read_once(web)


def test_only_bytes_that_are_read_are_fetched(models: Models) -> None:
    """A unit of a cluster shares chunks with others."""
    folder = models.checkpoint(KINDS[0])
    path = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = path.read_bytes()
    bounds = (10_000, 60_000, 130_000)
    assert len(data) > bounds[-1]
    with Web(folder) as web:
        source = RemoteSource(web.url(path.name), sha256=sha256(data).hexdigest())
        before = len(web.asked)
        steps = [[(source, *span)] for span in pairwise(bounds)]
        buffer = bytearray(bounds[-1] - bounds[0])
        with read_ahead.ReadAhead(steps) as ahead:
            ahead.begin(0)
            ahead.begin(1)
            source.read_into(bounds[0], memoryview(buffer))
            asked = sorted(a.range for a in web.asked[before:] if a.range)
            source.read_into(5_000, memoryview(elsewhere := bytearray(10_000)))
            ahead.check()
    assert buffer == data[bounds[0] : bounds[-1]]
    assert elsewhere == data[5_000:15_000]
    assert asked == [(10_000, CHUNK - 1), (CHUNK, 2 * CHUNK - 1), (2 * CHUNK, 129_999)]


def test_few_bytes_are_divided_among_all_connections(
    models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read_ahead, "_LEAST_CHUNK", 1000)
    folder = models.checkpoint(KINDS[0])
    path = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    start, stop = 10_001, 90_001
    with Web(folder) as web:
        source = RemoteSource(web.url(path.name))
        before = len(web.asked)
        buffer = bytearray(stop - start)
        with read_ahead.ReadAhead([[(source, start, stop)]]) as ahead:
            ahead.begin(0)
            source.read_into(start, memoryview(buffer))
        sizes = [a.range[1] - a.range[0] + 1 for a in web.asked[before:] if a.range]
    assert buffer == path.read_bytes()[start:stop]
    assert sum(sizes) == stop - start, "each byte is fetched once"
    assert len(sizes) >= 2 * read_ahead.CONNECTIONS


def test_readers_of_a_process_share_the_connections(models: Models) -> None:
    folder = models.checkpoint(KINDS[0])
    path = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    size = path.stat().st_size
    assert size > read_ahead.CONNECTIONS * CHUNK
    changed, active, most = Condition(), 0, 0

    def count(handler: Handler) -> bool:
        nonlocal active, most
        with changed:
            active += 1
            most = max(most, active)
            changed.notify_all()
            all_ask = changed.wait_for(lambda: most >= read_ahead.CONNECTIONS, PATIENCE)
        assert all_ask
        sleep(0.05)  # in which one more could ask
        with changed:
            active -= 1
        return handler.give()

    with Web(folder) as web, ExitStack() as stack:
        sources = [RemoteSource(web.url(path.name)) for _ in range(2)]
        web.behaviour = count
        for source in sources:
            ahead = stack.enter_context(read_ahead.ReadAhead([[(source, 0, size)]]))
            ahead.begin(0)
        for source in sources:
            source.read_into(0, memoryview(buffer := bytearray(size)))
            assert buffer == path.read_bytes()
    assert most == read_ahead.CONNECTIONS


def troubled(chance: random.Random) -> Behaviour:
    """Every third request fails, each time in another way."""

    def behave(handler: Handler) -> bool:
        kind = chance.choice(("429", "503", "reset", "cut", *("",) * 8))
        if kind == "cut":
            return handler.give(cut=chance.randrange(CHUNK))
        if kind == "reset":
            reset(handler)
        elif kind:
            handler.answer(int(kind), {"Retry-After": "1"})
        return bool(kind)

    return behave


@pytest.mark.sample(1)
@pytest.mark.parametrize("seed", range(3))
def test_a_server_in_trouble_changes_no_byte(seed: int, models: Models, output: Path) -> None:
    folder = models.checkpoint(KINDS[0])
    asked = request(output)
    with Web(folder, troubled(random.Random(seed))) as web:
        convert(from_web(folder, web, hashes_of(folder)), asked)
    assert held(output) == local(folder, asked)


def test_a_server_that_stays_in_trouble_is_one_sentence(models: Models, output: Path) -> None:
    folder = models.checkpoint(KINDS[0])
    with Web(folder) as web:
        checkpoint = from_web(folder, web)
        web.behaviour = lambda handler: handler.answer(503)
        with pytest.raises(RemoteError, match="answered 503; gave up after 12 attempts"):
            convert(checkpoint, request(output))
    assert not [path for path in held(output) if not path.startswith(".")]


def test_a_file_with_another_hash_is_refused(models: Models, output: Path) -> None:
    folder = models.checkpoint(KINDS[0])
    hashes = hashes_of(folder)
    name = min(hashes)
    hashes[name] = "0" * 64
    refusal = pytest.raises(FormatError, match=f"{name}: expected SHA-256 000.* found {'.' * 64};")
    with Web(folder) as web, refusal:
        convert(from_web(folder, web, hashes), request(output))
    assert not held(output), "what was written of it is of no use to a second run"


class TestResumes:
    def test_after_an_interruption(self, models: Models, output: Path) -> None:
        folder = models.checkpoint(KINDS[0])
        asked = request(output)
        with Web(folder) as web:
            interrupted(folder, web, asked, after=40)
            assert {Path(name).suffix for name in held(output)} == {".partial", ".done"}
            first = {(a.path, a.range) for a in web.asked if a.range and is_chunk(*a.range)}
            web.asked.clear()
            convert(from_web(folder, web), asked)
            second = {(a.path, a.range) for a in web.asked}
        assert held(output) == local(folder, asked)
        assert first - second, "what was written is not read again"

    def test_not_with_other_options(self, models: Models, output: Path) -> None:
        """What was written for these is removed."""
        folder = models.checkpoint(KINDS[0])
        asked = request(output)
        other = replace(asked, head_type=BY_NAME["Q6_K"])
        with Web(folder) as web:
            interrupted(folder, web, other, after=40)
            convert(from_web(folder, web), asked)
        assert held(output) == local(folder, asked)

    def test_not_with_a_part_that_is_gone(self, models: Models, output: Path) -> None:
        folder = models.checkpoint(KINDS[0])
        asked = request(output)
        with Web(folder) as web:
            interrupted(folder, web, asked, after=40)
            next(output.glob(".x-F16*.partial")).unlink()
            convert(from_web(folder, web), asked)
        assert held(output) == local(folder, asked)

    def test_not_with_a_local_file_that_changed(
        self, models: Models, output: Path, tmp_path: Path
    ) -> None:
        folder = models.copy(SMALL, tmp_path)
        asked = request(output)
        calls = iter(range(5))

        def progress(_: int) -> None:
            if next(calls, None) is None:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            convert(open_checkpoint(folder), asked, progress)
        assert held(output)
        edit_tensors(folder, doubled)
        convert(open_checkpoint(folder), asked)
        assert held(output) == local(folder, asked)

    def test_not_while_another_process_writes(self, models: Models, output: Path) -> None:
        """Neither its parts nor its record are touched."""
        folder = models.checkpoint(KINDS[0])
        asked = request(output)
        with Web(folder) as web:
            interrupted(folder, web, asked, after=40)
            before = held(output)
            partial = next(output.glob(".x-F16*.partial"))
            with partial.open("r+b") as file:
                assert os_files.lock(file.fileno())
                with pytest.raises(OutputError, match="another process is writing it"):
                    convert(from_web(folder, web), asked)
            assert held(output) == before

    def test_not_without_room(
        self, models: Models, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second file does not fit, and the first one does not stay."""
        folder = models.checkpoint(KINDS[0])
        whole, calls = shutil.disk_usage, iter([10**12, 9])
        usage = lambda path: whole(path)._replace(free=next(calls))  # noqa: E731
        monkeypatch.setattr("mtp_gguf.gguf_tools.files.output.shutil.disk_usage", usage)
        with Web(folder) as web, pytest.raises(OutputError, match="9 are free"):
            convert(from_web(folder, web), request(output))
        assert not held(output)

    def test_not_after_weights_that_cannot_be_written(
        self, models: Models, output: Path, tmp_path: Path
    ) -> None:
        folder = models.copy(SMALL, tmp_path)
        edit_tensors(folder, broken_norm)
        with Web(folder) as web, pytest.raises(CheckpointError, match="NaN"):
            convert(from_web(folder, web), request(output))
        assert not held(output)


class TestCommand:
    @pytest.fixture
    def hub(self, models: Models) -> Iterator[Hub]:
        with Hub(MODEL, {"main": models.checkpoint(SHARDED)}) as hub:
            yield hub

    def test_leaves_no_weights_on_the_disk(
        self, hub: Hub, models: Models, output: Path, tmp_path: Path
    ) -> None:
        folder = models.copy(SHARDED, tmp_path / "copies").rename(tmp_path / "Tiny-3.5")
        options = ("--also", "Q8_0", "--overwrite", "-o")
        home = output / "home"
        ours, theirs = run_commands(
            hub,
            home,
            ("convert", MODEL, "--stream", *options, output / "out.gguf"),
            ("convert", folder, *options, tmp_path / "out.gguf"),
        )
        assert (ours.code, theirs.code) == (0, 0), ours.stderr
        for name in ("out.gguf", "out-Q8_0.gguf"):
            assert (output / name).read_bytes() == (tmp_path / name).read_bytes()
        assert not [path for path in home.rglob("*") if path.suffix == ".safetensors"]

    @pytest.mark.thorough
    def test_measures_the_written_file(
        self, hub: Hub, output: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv(VARIABLE, "1")
        home = output / "home"
        (done,) = run_commands(hub, home, ("convert", MODEL, "--stream", "-o", output / "out.gguf"))
        assert done.code == 0, done.stderr
        with open_model(output / "out.gguf") as model:
            assert read_stored(model).acceptance is not None
        assert not [path for path in home.rglob("*") if path.suffix == ".safetensors"]

    @pytest.mark.thorough
    def test_is_the_default_without_room(self, hub: Hub, output: Path) -> None:
        no_room = (
            "import shutil; usage = shutil.disk_usage\n"
            "from mtp_gguf.convert.checkpoints import hub\n"
            "hub.shutil = type('shutil', (), {'disk_usage': lambda _: usage('/')._replace(free=9)})"
        )
        home = output / "home"
        arguments = ["convert", MODEL, "-o", str(output / "out.gguf"), "--quant", "F16"]
        for options, streamed in ((["--no-stream"], False), ([], True)):
            script = f"{no_room}\nimport sys; from mtp_gguf.cli import main; main()"
            done = subprocess.run(
                [sys.executable, "-c", script, *arguments, *options],
                env=environment(hub, home if streamed else output / "other"),
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            told = "bytes and 9 are free in" in done.stderr
            assert told == streamed
            (output / "out.gguf").unlink()
        assert not [path for path in home.rglob("*") if path.suffix == ".safetensors"]

    def test_needs_a_checkpoint_on_the_hub(self, hub: Hub, models: Models, output: Path) -> None:
        (done,) = run_commands(
            hub, output / "home", ("convert", models.checkpoint(SMALL), "--stream")
        )
        assert done.code == 2
        assert "--stream needs a checkpoint on the hub" in " ".join(done.stderr.split())

    @pytest.mark.thorough
    @pytest.mark.parametrize("number", [SIGINT, SIGKILL])
    def test_goes_on_after_a_signal(
        self, number: int, hub: Hub, models: Models, output: Path, tmp_path: Path
    ) -> None:
        """The first call stops where the server does."""
        prelude = (
            "from mtp_gguf.gguf_tools.files import output\n"
            "from mtp_gguf.gguf_tools.hub import read_ahead, remote\n"
            f"read_ahead.CHUNK_BYTES = remote.CHUNK_BYTES = {CHUNK}\n"
            "output._SYNC_SECONDS = 0\n"
            "from mtp_gguf.convert import pipeline; pipeline._RESUMABLE_VALUES = 256 * 31\n"
        )
        script = f"{HEARS_SIGNALS}\n{prelude}\nfrom mtp_gguf.cli import main; main()"
        words = ["convert", MODEL, "--stream", "--quant", "F16", "-o", str(output / "out.gguf")]
        command = [sys.executable, "-c", script, *words]
        env = environment(hub, tmp_path / "home")
        stall = Stall(hub, after=20)
        hub.trouble = stall
        with subprocess.Popen(command, env=env, stderr=subprocess.PIPE, text=True) as first:
            assert stall.reached.wait(60)
            first.send_signal(number)
            stderr = first.communicate(timeout=60)[1]
        stall.go_on.set()
        if number == SIGINT:
            assert "interrupted; the same command goes on from here" in stderr
        left = {Path(name).suffix for name in held(output)}
        assert left == {".partial", ".done"}
        subprocess.run(command, env=env, check=True, capture_output=True)
        folder = models.copy(SHARDED, tmp_path / "copies").rename(tmp_path / "Tiny-3.5")
        expected = tmp_path / "expected"
        expected.mkdir()
        (done,) = run_commands(
            hub, tmp_path / "home", ("convert", folder, *words[3:5], "-o", expected / "out.gguf")
        )
        assert done.code == 0
        assert held(output) == held(expected)


class Stall:
    """A hub's trouble: after some requests for weights it answers none until it may go on."""

    def __init__(self, hub: Hub, after: int) -> None:
        self.hub, self.left = hub, after
        self.reached, self.go_on = Event(), Event()

    def __call__(self) -> str:
        self.left -= 1
        if self.left < 0:
            self.reached.set()
            self.go_on.wait(60)
        return ""


def hashes_of(folder: Path) -> dict[str, str]:
    return {p.name: sha256(p.read_bytes()).hexdigest() for p in folder.glob("*.safetensors")}


def reset(handler: Handler) -> None:
    """Close the connection with a reset, which close() sends if the linger time is zero."""
    handler.close_connection = True
    handler.connection.setsockopt(SOL_SOCKET, SO_LINGER, pack("ii", 1, 0))
    handler.connection.close()


def interrupted(folder: Path, web: Web, asked: Request, after: int) -> None:
    """A conversion that Ctrl-C ends after some slices."""
    calls = iter(range(after + 1))

    def progress(_: int) -> None:
        if next(calls, None) is None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(from_web(folder, web), asked, progress)


def doubled(tensors: dict[str, Array]) -> None:
    for name, array in tensors.items():
        tensors[name] = array * array.dtype.type(2)


def broken_norm(tensors: dict[str, Array]) -> None:
    name = next(name for name in tensors if name.endswith("norm.weight"))
    tensors[name] = np.full_like(tensors[name], np.nan)

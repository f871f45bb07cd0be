"""Remote files: few requests, no extra bytes, no leaked token, errors of one sentence."""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_gguf.gguf_tools.errors import FormatError, RemoteError
from mtp_gguf.gguf_tools.files.format import Value, ValueType, open_gguf
from mtp_gguf.gguf_tools.hub import remote
from mtp_gguf.gguf_tools.hub.remote import (
    RemoteSource,
    absent_model,
    file_url,
    hub_gguf,
    hub_model,
    is_remote,
)
from support.checkpoints import DENSE, MOE, SPECS
from support.commands import invoke, refused, succeed
from support.gguf_files import edited
from support.hub_server import Hub
from support.models import Models
from support.range_server import Behaviour, Handler, Web

UNIFORM = ("--quant", "Q8_0")


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the user's token, cache and proxy, and without pauses between attempts."""
    empty = tmp_path_factory.mktemp("home")
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(empty / "token"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(empty / "hub"))
    monkeypatch.setattr(remote, "_FIRST_PAUSE", 0.0)


def ask(monkeypatch: pytest.MonkeyPatch, hub: Hub) -> None:
    """Let this process ask `hub` for what is on the Hugging Face hub."""
    monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.endpoint)
    monkeypatch.setattr(
        "huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE",
        hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}",
    )


@pytest.fixture
def random_file(tmp_path: Path) -> Path:
    path = tmp_path / "data"
    path.write_bytes(np.random.default_rng(1).bytes(9_000_000))
    return path


# A file much larger than the first block.
LARGE = dataclasses.replace(DENSE, name="large", layers=8, hidden=768, intermediate=1024)


def big_header(models: Models, path: Path) -> Path:
    """A GGUF whose header takes 11 MB, as that of 248,320 tokens and their merges does."""
    words = Value(ValueType.STRING, [f"token {i:>16}" for i in range(370_000)])
    return edited(models.convert(DENSE), path, metadata={"tokenizer.ggml.tokens": words})


# ------------------------------------------------------------------------------ reading


def test_bytes_are_those_of_the_file(random_file: Path) -> None:
    data = random_file.read_bytes()
    random = np.random.default_rng(2)
    with Web(random_file.parent) as web, closing(RemoteSource(web.url("data"))) as source:
        assert source.size == len(data)
        for _ in range(60):
            offset = int(random.integers(0, len(data)))
            length = int(random.integers(0, min(len(data) - offset, 6_000_000) + 1))
            assert source.read(offset, length) == data[offset : offset + length]
        buffer = bytearray(1000)
        source.read_into(5, memoryview(buffer))
        assert bytes(buffer) == data[5:1005]
        with pytest.raises(FormatError, match="the file ends at byte 9000000"):
            source.read(len(data) - 1, 2)


def test_small_reads_share_blocks_and_large_ones_are_exact(random_file: Path) -> None:
    with Web(random_file.parent) as web, closing(RemoteSource(web.url("data"))) as source:
        for offset in range(0, 200_000, 100):
            source.read(offset, 100)
        assert source.requests == 1
        before = source.fetched
        source.read(1_000_001, 5_000_000)
        assert source.fetched - before == 5_000_000
        assert list(source.pieces(17, 30_000)) != []
        assert source.fetched - before == 5_030_000
        assert web.asked[-1].range == (17, 30_016)
        assert source.requests == len(web.asked) == 3
        assert source.fetched == web.sent


def test_reading_on_asks_for_more_each_time(random_file: Path) -> None:
    with Web(random_file.parent) as web, closing(RemoteSource(web.url("data"))) as source:
        for offset in range(0, 9_000_000, 10_000):
            source.read(offset, 10_000)
        assert source.requests == 4
        assert source.fetched == 9_000_000


def test_a_listing_costs_its_header(models: Models, tmp_path: Path) -> None:
    path = big_header(models, tmp_path / "big.gguf")
    local = succeed("list-tensors", path, "--json")
    with Web(tmp_path) as web:
        assert succeed("list-tensors", web.url("big.gguf"), "--json") == local
        with open_gguf(path) as file:
            header = file.data_offset
        assert header > 11_000_000
        assert len(web.asked) <= 1 + 3
        assert web.sent < header + (16 << 20)


def test_commands_take_addresses(models: Models, tmp_path: Path) -> None:
    whole, trunk = models.convert(DENSE, *UNIFORM), models.convert(DENSE, *UNIFORM, "--no-mtp")
    with Web(whole.parent) as web:
        url = web.url("model.gguf")
        assert "can draft: MTP head in block 4" in succeed("list-tensors", url, "--mtp")
        assert f"{url}: can draft" in succeed("doctor", url)
        assert "70 tensors: 70 same" in succeed("compare", url, whole)
        web.sent = 0
        succeed("graft", "--no-check", trunk, "--from", url, "-o", tmp_path / "made.gguf")
        assert (tmp_path / "made.gguf").read_bytes() == whole.read_bytes()


# ------------------------------------------------------------------------- a base elsewhere


def test_a_base_elsewhere_is_downloaded_once(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The base is downloaded into the output: two requests for headers, one for tensors."""
    whole, trunk = models.convert(LARGE, *UNIFORM), models.convert(LARGE, *UNIFORM, "--no-mtp")
    monkeypatch.chdir(tmp_path)
    with Web(trunk.parent) as web:
        url = web.url("model.gguf") + "?signature=1"
        succeed("graft", "--no-check", url, "--from", whole)
        assert [p.name for p in tmp_path.iterdir()] == ["model-MTP.gguf"]
        assert (tmp_path / "model-MTP.gguf").read_bytes() == whole.read_bytes()
        assert len(web.asked) == 3
        with open_gguf(trunk) as file:
            last = file.tensors[-1]
            assert web.asked[-1].range == (file.data_offset, last.offset + last.nbytes - 1)
        assert web.sent < trunk.stat().st_size + 5 * (1 << 18)


def test_all_parts_elsewhere(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Base shards and donor on the hub: the token is sent to no other host."""
    folder = models.copy(DENSE, tmp_path)
    split = models.convert(DENSE, *UNIFORM, "--no-mtp", "--split-max-size", "1M")
    for shard in split.parent.iterdir():
        shutil.copy(shard, folder)
    whole = models.convert(DENSE, *UNIFORM, "--mtp-f16")
    with Hub("owner/model", {"main": folder}) as hub:
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        ask(monkeypatch, hub)
        base = "hf://owner/model/model-00001-of-00004.gguf"
        target = tmp_path / "made.gguf"
        succeed("graft", "--no-check", base, "--from", "owner/model", "--mtp-f16", "-o", target)
        assert target.read_bytes() == whole.read_bytes()
        files = [a for a in hub.requests if a.path.startswith("/owner") and ".gguf" in a.path]
        assert {bool(a.token) for a in files} == {True}
        assert not any(a.token for a in hub.requests if a.path.startswith("/cdn/"))


def test_bases_elsewhere_that_cannot_be_had(models: Models, tmp_path: Path) -> None:
    """Each gives an error of one sentence and leaves no output."""
    whole, trunk = models.convert(DENSE, *UNIFORM), models.convert(DENSE, *UNIFORM, "--no-mtp")

    def no_ranges(handler: Handler) -> bool:
        return handler.answer(200, {}, handler.data(), cut=100)

    def stops(handler: Handler) -> bool:
        later = handler.range is not None and handler.range[0] > 0
        return later and handler.give(cut=50)

    for behave, words in (
        (no_ranges, "does not support range requests"),
        (stops, "the connection was closed before the download was complete; gave up after 5"),
    ):
        with Web(trunk.parent, behave) as web:
            url = web.url("model.gguf")
            arguments = ("graft", url, "--from", whole, "-o", tmp_path / "made.gguf")
            refused(tmp_path, *arguments, words=(url, words))
            assert behave is stops or len(web.asked) == 1
    with Web(whole.parent) as web:
        sentence = ("has an MTP head in block 4 already",)
        refused(tmp_path, "graft", web.url("model.gguf"), "--from", whole, words=sentence)
        refused(tmp_path, "graft", web.url("none.gguf"), "--from", whole, words=("404",))
    refused(tmp_path, "graft", "hf://owner", "--from", whole, words=("expected hf://OWNER/NAME",))


def test_a_corpus_is_counted_by_a_local_file(models: Models, tmp_path: Path) -> None:
    whole, trunk = models.convert(DENSE, *UNIFORM), models.convert(DENSE, *UNIFORM, "--no-mtp")
    (tmp_path / "corpus.txt").write_text("def f(): pass\n" * 99)
    options = ("--fastmtp", 64, "--fastmtp-corpus", tmp_path / "corpus.txt")
    local, made = tmp_path / "local.gguf", tmp_path / "made.gguf"
    succeed("graft", "--no-check", trunk, "--from", whole, *options, "-o", local)
    with Web(trunk.parent) as trunks, Web(whole.parent) as wholes:
        base, donor = trunks.url("model.gguf"), wholes.url("model.gguf")
        succeed("graft", "--no-check", base, "--from", whole, *options, "-o", made)
        assert made.read_bytes() == local.read_bytes()
        arguments = ("graft", base, "--from", donor, *options, "-o", tmp_path / "x.gguf")
        refused(tmp_path, *arguments, words=("fastmtp add OUTPUT --corpus",), code=2)


def test_shards_and_safetensors(models: Models, tmp_path: Path) -> None:
    first = models.convert(DENSE, "--split-max-size", "1M")
    with Web(first.parent) as web:
        listed = succeed("list-tensors", web.url(first.name), "--json")
        assert json.loads(listed) == json.loads(succeed("list-tensors", first, "--json"))
        assert "can draft" in succeed("doctor", web.url(first.name) + "?signature=1")
        assert all(a.path.endswith("?signature=1") for a in web.asked[-3:])
        missing = web.url("model-00001-of-00009.gguf")
        refused(tmp_path, "list-tensors", missing, words=("model-00001-of-00009.gguf", "404"))
    folder = models.checkpoint(DENSE)
    with Web(folder) as web:
        output = succeed("list-tensors", web.url("model.safetensors"))
        assert "can draft once converted: 15 mtp.* tensors found" in output


def test_names_of_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert all(is_remote(place) for place in ("hf://a/b", "https://h/x", "HTTP://h/x"))
    assert not any(is_remote(place) for place in ("a/b", "./https"))
    assert hub_model("hf://a/b") == ("a/b", None)
    assert hub_model("hf://a/b@v1") == ("a/b", "v1")
    assert hub_model("hf://a/b/c.gguf") is None
    assert hub_model("owner/name") == ("owner/name", None)
    assert str(hub_model("owner/name.x@v1")) == "owner/name.x@v1"
    for local in ("name", "./owner/name", "/owner/name", "~/owner/name", "owner/name/x"):
        assert hub_model(local) is None
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for file in ("owner/name.gguf", "owner/name.safetensors", "models/mistyped"):
        assert hub_model(file) is None
    for name in ("hf://a/b:Q4_K_M", "hf.co/a/b:Q4_K_M", "huggingface.co/a/b:Q4_K_M"):
        assert str(hub_gguf(name)) == "a/b:Q4_K_M"
    for name in ("hf.co/a/b@v1/c/d.gguf", "a/b@v1/c/d.gguf"):
        assert str(hub_gguf(name)) == "hf://a/b@v1/c/d.gguf"
    for path in ("models/a/b.gguf", "./a/b/c.gguf", "/a/b/c.gguf", "../a/b/c.gguf", "hf.co/a"):
        assert hub_gguf(path) is None
    assert absent_model("models/a/b.gguf").endswith("on the hub it would be hf://models/a/b.gguf")
    base = "https://huggingface.co/a/b.c/resolve"
    assert file_url("hf://a/b.c/d/e f.gguf") == f"{base}/main/d/e%20f.gguf"
    assert file_url("hf://a/b.c@refs/x.gguf") == f"{base}/refs/x.gguf"
    monkeypatch.setenv("HF_ENDPOINT", "http://hub/")
    assert file_url("hf://a/b/x.gguf") == "http://hub/a/b/resolve/main/x.gguf"
    for bad in ("hf://a", "hf://a/b", "hf:///x"):
        with pytest.raises(RemoteError, match="expected hf://OWNER/NAME"):
            file_url(bad)


# ------------------------------------------------------------------------------- faults


def answering(*statuses: int, headers: dict[str, str] | None = None) -> Behaviour:
    """Answer the first requests with these statuses, and the rest correctly."""
    left = list(statuses)

    def behave(handler: Handler) -> bool:
        if not left:
            return False
        handler.answer(left.pop(0), headers)
        return True

    return behave


@pytest.mark.parametrize("status", [429, 500, 502, 503, 504, 408])
def test_passing_faults_are_retried(status: int, random_file: Path) -> None:
    slept: list[float] = []
    behave = answering(status, status, headers={"Retry-After": "7"})
    with (
        Web(random_file.parent, behave) as web,
        closing(RemoteSource(web.url("data"), slept.append)) as source,
    ):
        assert source.read(0, 100) == random_file.read_bytes()[:100]
        assert slept == [7.0, 7.0]


def test_lasting_faults_are_reported(random_file: Path) -> None:
    with Web(random_file.parent, lambda h: h.answer(503)) as web:
        with pytest.raises(RemoteError, match="answered 503; gave up after 5 attempts"):
            RemoteSource(web.url("data"))
        assert len(web.asked) == 5
    with pytest.raises(RemoteError, match="cannot be reached"):
        RemoteSource(web.url("data"))  # the server is closed
    for status, words in ((401, "hf auth login"), (403, "gated"), (404, "404"), (400, "400")):
        with Web(random_file.parent, lambda h, s=status: h.answer(s) is None) as web:  # type: ignore[misc]
            with pytest.raises(RemoteError, match=words):
                RemoteSource(web.url("data"))
            assert len(web.asked) == 1


def test_reasons_in_parentheses_are_whole() -> None:
    error = OSError("Max retries (Caused by E(\"C: Failed to resolve 'x' ([Errno -2] unknown)\"))")
    assert remote._reason(error) == "cannot be reached (Failed to resolve 'x' ([Errno -2] unknown))"


def test_connections_that_drop(random_file: Path) -> None:
    """Complete chunks are kept, and the next request continues after them."""
    data = random_file.read_bytes()
    piece = remote._PIECE_BYTES
    cuts = [2 * piece + 5, 0, piece + 5]

    def behave(handler: Handler) -> bool:
        if handler.range is None or handler.range[0] < 1_000_000 or not cuts:
            return False
        handler.give(cut=cuts.pop(0))
        return True

    with Web(random_file.parent, behave) as web, closing(RemoteSource(web.url("data"))) as source:
        assert source.read(1_000_000, 6_000_000) == data[1_000_000:7_000_000]
        starts = [a.range[0] for a in web.asked[1:] if a.range]
        assert starts == [1_000_000 + n * piece for n in (0, 2, 2, 3)]


def test_a_file_that_changes(random_file: Path) -> None:
    tags = iter(['"1"', '"2"'])
    with (
        Web(random_file.parent, lambda h: h.give(etag=next(tags))) as web,
        closing(RemoteSource(web.url("data"))) as source,
        pytest.raises(RemoteError, match="changed while it was read"),
    ):
        source.read(5_000_000, 10)
    with Web(random_file.parent) as web, closing(RemoteSource(web.url("data"))) as source:
        with random_file.open("ab") as file:
            file.write(b"more")
        with pytest.raises(RemoteError, match="changed while it was read"):
            source.read(5_000_000, 10)


LIES = ("bytes 5-10/9000000", "bytes 0-x/9", "", "bytes 0-9/" + "9" * 40, "bytes 0-1/*")
START = {"Content-Range": "bytes 0-262143/9000000", "ETag": '"1"'}
FAULTY: list[tuple[Behaviour, str]] = [
    *((lambda h, r=r: h.answer(206, {"Content-Range": r}), "a range from byte 0") for r in LIES),
    (lambda h: h.answer(206, START, bytes(400_000)), "sent more than requested"),
    (lambda h: h.answer(302, {"Location": h.path + "x"}), "redirects"),
]


@pytest.mark.parametrize(("behave", "words"), FAULTY)
def test_answers_that_cannot_be(behave: Behaviour, words: str, random_file: Path) -> None:
    with Web(random_file.parent, behave) as web, pytest.raises(RemoteError, match=words):
        RemoteSource(web.url("data"))


def test_empty_files(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"")
    with Web(tmp_path) as web, pytest.raises(FormatError, match="is empty"):
        RemoteSource(web.url("data"))


@pytest.mark.parametrize("place", ["http://", "https://[x/y", "http://127.0.0.1:99999/x.gguf"])
def test_addresses_that_are_none(place: str, tmp_path: Path) -> None:
    refused(tmp_path, "list-tensors", place)


# ---------------------------------------------------------------- redirects, links, tokens


def redirecting(target: list[str]) -> Behaviour:
    """Send requests for `hub/…` to the last target."""

    def behave(handler: Handler) -> bool:
        if not handler.name.startswith("hub/"):
            return False
        handler.answer(302, {"Location": target[-1]})
        return True

    return behave


def test_redirects_are_followed_once(random_file: Path) -> None:
    target: list[str] = []
    with Web(random_file.parent, redirecting(target)) as web:
        target.append(web.url("data?sig=1", "localhost"))
        source = RemoteSource(web.url("hub/data"))
        source.read(3_000_000, 10)
        source.read(7_000_000, 10)
        paths = [a.path for a in web.asked]
        assert paths == ["/hub/data", "/data?sig=1", "/data?sig=1", "/data?sig=1"]
        source.close()


@pytest.mark.parametrize("status", [401, 403, 404, 410])
def test_links_that_expire_are_renewed(status: int, random_file: Path) -> None:
    target: list[str] = []
    renew = redirecting(target)

    def behave(handler: Handler) -> bool:
        if "sig=1" in handler.path and len(web.asked) > 3:
            return handler.answer(status)
        return renew(handler)

    with Web(random_file.parent, behave) as web:
        target.append(web.url("data?sig=1", "localhost"))
        source = RemoteSource(web.url("hub/data"))
        source.read(3_000_000, 10)
        target.append(web.url("data?sig=2", "localhost"))
        assert source.read(7_000_000, 10) == random_file.read_bytes()[7_000_000:7_000_010]
        assert [a.path for a in web.asked][3:] == ["/data?sig=1", "/hub/data", "/data?sig=2"]
        source.close()


def test_tokens_go_to_the_hub_alone(random_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    target: list[str] = []
    with Web(random_file.parent, redirecting(target)) as web:
        target.append(web.url("data", "localhost"))
        monkeypatch.setenv("HF_ENDPOINT", web.url("").rstrip("/"))
        source = RemoteSource(web.url("hub/data"))
        source.read(5_000_000, 10)
        source.close()
        held = {(a.path, bool(a.authorization)) for a in web.asked}
        assert held == {("/hub/data", True), ("/data", False)}
        assert web.asked[0].authorization == "Bearer hf_secret"

        web.asked.clear()
        secret = RemoteSource(web.url("data").replace("//", "//me:password@"))
        assert "password" not in secret.name
        secret.close()

        web.asked.clear()
        monkeypatch.setenv("HF_ENDPOINT", "http://elsewhere")
        RemoteSource(web.url("data")).close()
        assert [a.authorization for a in web.asked] == [""]


# -------------------------------------------------------------------------------- the hub


def head_bytes(folder: Path) -> tuple[int, int]:
    """Bytes of the mtp.* tensors of a checkpoint, and of the headers of its files."""
    total = headers = 0
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        headers += 8 + length
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if "mtp." in name:
                total += entry["data_offsets"][1] - entry["data_offsets"][0]
    return total, headers


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "spec", [LARGE, dataclasses.replace(MOE, name="large-moe", nested=True)], ids=lambda s: s.name
)
@pytest.mark.parametrize("place", ["{}", "hf://{}"])
def test_a_graft_fetches_the_head_and_no_more(
    spec: object, place: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = models.checkpoint(spec)  # type: ignore[arg-type]
    whole = models.convert(spec, *UNIFORM, "--mtp-f16")  # type: ignore[arg-type]
    trunk = models.convert(spec, *UNIFORM, "--no-mtp")  # type: ignore[arg-type]
    head, headers = head_bytes(folder)
    with Hub(f"owner/{folder.name}", {"main": folder}) as hub:
        ask(monkeypatch, hub)
        counted: list[RemoteSource] = []
        made = RemoteSource.__init__

        def count(self: RemoteSource, *arguments: Any, **named: Any) -> None:
            counted.append(self)
            made(self, *arguments, **named)

        monkeypatch.setattr(RemoteSource, "__init__", count)
        target = tmp_path / "made.gguf"
        source = place.format(f"owner/{folder.name}")
        succeed("graft", "--no-check", trunk, "--from", source, "--mtp-f16", "-o", target)
        assert target.read_bytes() == whole.read_bytes()
        fetched = sum(source.fetched for source in counted)
        files = len(counted)
        assert fetched <= 1.05 * head + headers + files * (1 << 18)
        assert (
            fetched < sum(p.stat().st_size for p in folder.glob("*.safetensors")) / 2 or files > 1
        )
        assert not any(a.token for a in hub.requests)


@pytest.fixture
def on_hub(models: Models, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with the dense checkpoint as owner/model."""
    with Hub("owner/model", {"main": models.checkpoint(DENSE)}) as hub:
        ask(monkeypatch, hub)
        yield hub


@pytest.mark.parametrize("place", ["owner/model", "hf://owner/model@main"])
def test_a_source_on_the_hub(place: str, on_hub: Hub, models: Models) -> None:
    """The doctor fetches only the head, compare everything that it compares."""
    whole = models.convert(DENSE, *UNIFORM)
    assert "can draft" in succeed("doctor", whole, "--source", place)
    ranges = [a.range for a in on_hub.requests if a.path.startswith("/cdn/") and a.method == "GET"]
    assert all(ranges)
    assert "cannot" not in succeed("compare", whole, place)


def test_the_doctor_visits_the_hub(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, code in (("dense-untied", 0), ("dense-no-mtp", 1)):
        folder = models.checkpoint(SPECS[name])
        with Hub("owner/model", {"main": folder, "v1": folder}) as hub:
            ask(monkeypatch, hub)
            monkeypatch.setattr(
                "huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / f"cache-{name}")
            )
            result = invoke("doctor", "hf://owner/model@v1")
            assert result.exit_code == code, result.output
            ranges = [a for a in hub.requests if a.path.startswith("/cdn/") and a.method == "GET"]
            assert len(ranges) == len(list(folder.glob("*.safetensors")))


def test_the_fix_for_a_remote_file_downloads_it_first(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`strip` changes local files, so the printed command fetches the file before."""
    (tmp_path / "served").mkdir()
    hide = {"qwen35.nextn_predict_layers": None}
    hidden = tmp_path / "served" / "hidden.gguf"
    edited(models.convert(DENSE, *UNIFORM), hidden, metadata=hide)
    monkeypatch.chdir(tmp_path)
    with Web(hidden.parent) as web:
        url = web.url(hidden.name)
        result = invoke("doctor", url, "--json")
        assert result.exit_code == 1
        [finding] = json.loads(result.stdout)["findings"]
        download, *commands = finding["fix"].split(" && ")
        assert shlex.split(download) == ["curl", "-LO", url]
        shutil.copy(hidden, url.rpartition("/")[2])  # what curl does
    for command in commands:
        program, *words = shlex.split(command)
        assert program == "mtp-gguf"
        succeed(*words, *(["--no-check"] if words[0] == "graft" else []))
    succeed("doctor", "fixed.gguf")


def test_offline_nothing_is_asked_for(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    words = ("not in the local cache", "offline mode")
    refused(tmp_path, "list-tensors", "hf://a/b/c.gguf", words=words)
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    refused(tmp_path, "graft", trunk, "--from", "a/b", "-o", tmp_path / "x", words=("a/b",))

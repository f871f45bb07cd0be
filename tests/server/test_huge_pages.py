"""Weights in huge pages: of the file, or of the server's own memory (`serve --huge-pages`)."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from mtp_gguf.cli import serve
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.server import huge_pages
from support.cached_pages import in_small_pages
from support.commands import check_refusal, invoke
from support.models import Files
from support.real_server import PROMPTS, Client, Server, certain
from support.stand_in_server import STOCK_HELP, write_stand_in


@pytest.fixture
def system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the system says of huge pages; on demand, on a Linux of today."""
    path = tmp_path / "enabled"
    path.write_text("always [madvise] never\n")
    monkeypatch.setattr(huge_pages, "SWITCH", path)
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.35"))
    return path


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({}, "glibc.malloc.hugetlb=1"),
        ({"GLIBC_TUNABLES": ""}, "glibc.malloc.hugetlb=1"),
        (
            {"GLIBC_TUNABLES": "glibc.malloc.check=3"},
            "glibc.malloc.check=3:glibc.malloc.hugetlb=1",
        ),
        ({"GLIBC_TUNABLES": "glibc.malloc.hugetlb=2"}, "glibc.malloc.hugetlb=2"),
    ],
)
def test_glibc_is_asked_for_them(system: Path, before: dict[str, str], after: str) -> None:
    assert huge_pages.huge_page_environment({"A": "b", **before}) == {
        "A": "b",
        "GLIBC_TUNABLES": after,
    }


@pytest.mark.parametrize(
    ("said", "libc", "found"),
    [
        ("always madvise [never]\n", ("glibc", "2.35"), r"expected \[always\] or \[madvise\]"),
        (None, ("glibc", "2.35"), r"expected \[always\] or \[madvise\]"),
        ("[always]\n", ("glibc", "2.31"), "Linux with glibc 2.35 or newer, found glibc 2.31"),
        ("[always]\n", ("", ""), "Linux with glibc 2.35 or newer, found [A-Z][a-z]+"),
    ],
)
def test_a_system_without_them_is_named(
    system: Path,
    monkeypatch: pytest.MonkeyPatch,
    said: str | None,
    libc: tuple[str, str],
    found: str,
) -> None:
    system.unlink()
    if said:
        system.write_text(said)
    monkeypatch.setattr("platform.libc_ver", lambda: libc)
    with pytest.raises(RequestError, match=f"--huge-pages: .*{found}"):
        huge_pages.huge_page_environment({})


@pytest.mark.parametrize(
    ("usage", "words"),
    [
        (f"{STOCK_HELP} --load-mode MODE, --no-mmap", ["--load-mode", "none"]),
        (f"{STOCK_HELP} --no-mmap", ["--no-mmap"]),
    ],
)
def test_the_weights_are_copied(
    system: Path, tmp_path: Path, files: Files, usage: str, words: list[str]
) -> None:
    server = write_stand_in(tmp_path / "server", usage)
    command = ("serve", files("plain"), "--llama-server", server, "--print-command")
    mapped, copied = invoke(*command), invoke(*command, "--huge-pages")
    assert copied.exit_code == 0, copied.output
    assert set(shlex.split(copied.stdout)) - set(shlex.split(mapped.stdout)) == set(words)


def test_what_cannot_be_is_refused(
    system: Path, tmp_path: Path, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusal(usage: str, *passed: str) -> str:
        server = write_stand_in(tmp_path / "server", usage)
        words = ("--llama-server", server, "--print-command", "--huge-pages", "--", *passed)
        result = invoke("serve", files("plain"), *words)
        return check_refusal(result.exit_code, result.stderr)

    assert "serve without --huge-pages" in refusal(STOCK_HELP)
    usage = f"{STOCK_HELP} --load-mode MODE"
    assert "combined with --mlock" in refusal(usage, "--mlock")
    assert "combined with --load-mode" in refusal(usage, "--load-mode", "mmap")
    monkeypatch.setattr(serve, "finds_gpu", lambda _: False)
    monkeypatch.setattr(serve, "free_memory", lambda: 1000)
    assert re.search(r"expected .*MB of free memory for the weights, found 1 kB", refusal(usage))


def huge_bytes(client: Client, kind: str) -> int:
    """Memory of the server in huge pages."""
    (process,) = client.processes()
    said = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
    found = re.search(rf"{kind}:\s+(\d+) kB", said)
    assert found
    return int(found[1]) * 1024


@pytest.mark.server
def test_the_weights_of_a_server_are_in_huge_pages(server: Server, files: Files) -> None:
    try:
        huge_pages.huge_page_environment({})
    except RequestError as error:
        pytest.skip(str(error))
    model, found, texts = files("plain", "demo"), [], []
    for options in ([], ["--huge-pages"]):
        with server.running(model, options=options) as client:
            texts.append([certain(client.complete(text, n_probs=2)) for text in PROMPTS])
            found.append(huge_bytes(client, "AnonHugePages"))
    assert texts[0] == texts[1]
    assert found[1] - found[0] >= 1 << 21  # of 5 MB that need not begin at such a page


@pytest.mark.server
def test_a_file_is_mapped_in_huge_pages(server: Server, files: Files, tmp_path: Path) -> None:
    model = in_small_pages(tmp_path / "model.gguf", files("plain", "demo").read_bytes())
    with server.running(model) as client:
        client.complete(PROMPTS[0])
        assert huge_bytes(client, "FilePmdMapped") >= 1 << 21

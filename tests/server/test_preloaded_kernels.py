"""`serve` loads our kernels into a llama-server that is linked with ggml's own."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_gguf.native.runtime import native_library
from mtp_gguf.server.kernels import default_environment
from support.commands import invoke
from support.llama_libraries import stock_libraries
from support.models import Files
from support.stand_in_server import PATCHED_HELP, STOCK_HELP, write_stand_in

# A program that says of itself what a llama-server says, and which libraries are preloaded.
CODE = """
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
extern int ggml_cpu_has_avx2(void);
int main(int n, char ** words) {
    if (n == 2 && !strcmp(words[1], "--version")) return puts("version: compiled") < 0;
    if (n == 2 && !strcmp(words[1], "--help")) return puts(HELP) < 0;
    if (n == 2) return puts("Available devices:") < 0;
    const char * preloaded = getenv("LD_PRELOAD");
    printf("preloaded: %s %d\\n", preloaded ? preloaded : "none", ggml_cpu_has_avx2());
    return 3;
}
"""


@pytest.fixture(params=[STOCK_HELP, PATCHED_HELP], ids=["stock", "patched"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, bool]:
    """A compiled llama-server, and whether it needs kernels of ours."""
    compiler = shutil.which("cc")
    if not compiler or not sys.platform.startswith("linux"):
        pytest.skip("libraries are preloaded the Linux way")
    source, program, libraries = tmp_path / "server.c", tmp_path / "llama-server", stock_libraries()
    source.write_text(CODE)
    rpath = (f"-Wl,-rpath,{libraries}", f"-Wl,-rpath-link,{libraries}")
    command = [compiler, f'-DHELP="{request.param}"', "-o", program, source]
    command += [f"-L{libraries}", "-lggml-cpu", *rpath]
    subprocess.run(list(map(str, command)), check=True)
    return program, request.param == STOCK_HELP


@pytest.mark.parametrize("switch", ["", "0"])
def test_a_server_gets_the_kernels_unless_it_has_them(
    server: tuple[Path, bool],
    switch: str,
    files: Files,
    free_port: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program, needs_them = server
    monkeypatch.delenv("LD_PRELOAD", raising=False)
    monkeypatch.setenv("MTP_GGUF_KERNELS", switch)
    result = invoke("serve", files("plain"), "--llama-server", program, "--port", free_port)
    assert result.exit_code == 3
    gets_them = needs_them and switch != "0"
    preloaded = native_library("mtp_kernels") if gets_them else "none"
    assert f"preloaded: {preloaded} " in result.stderr
    assert ("uses the CPU kernels of this package" in result.stderr) == gets_them


def test_programs_of_unknown_libraries_are_left_alone(tmp_path: Path) -> None:
    assert default_environment(write_stand_in(tmp_path / "server"), {}) is None
    static = Path("/bin/true")
    assert default_environment(static, {}) is None

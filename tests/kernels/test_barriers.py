"""The barriers of the patched ggml-cpu under ThreadSanitizer.

`barriers.c` is compiled together with ggml-cpu.c, which has the barriers and the thread pool, and
replaces that part of the patched library; the operations themselves are the program's own. Threads
are those of ggml's pool, because ThreadSanitizer does not know OpenMP's, which only start threads.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mtp_gguf.server.patches import apply, read_patches
from mtp_gguf.server.upstream_source import fetch_archive, unpack_llama_cpp

pytestmark = [
    pytest.mark.upstream,
    pytest.mark.skipif(sys.platform != "linux", reason="links programs the Linux way"),
]

SOURCE = Path(__file__).parents[1] / "support" / "kernels" / "barriers.c"
FLAGS = ("-O1", "-g1", "-w", "-fsanitize=thread", "-D_GNU_SOURCE", "-march=native")
THREADS = 4


@pytest.fixture(scope="module")
def program(libraries: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program of barriers.c."""
    folder = tmp_path_factory.mktemp("barriers")
    tree, out = folder / "llama.cpp", folder / "barriers"
    unpack_llama_cpp(fetch_archive(), tree)
    apply(read_patches(), tree)
    ggml = tree / "ggml"
    headers = [f"-I{ggml / name}" for name in ("include", "src", "src/ggml-cpu")]
    linked = []
    for name in ("ggml-cpu", "ggml-base"):
        library = folder / f"lib{name}.so.0"  # its soname
        library.symlink_to(libraries / f"lib{name}.so")
        linked.append(str(library))
    sources = [str(SOURCE), str(ggml / "src" / "ggml-cpu" / "ggml-cpu.c")]
    command = ["cc", *FLAGS, *headers, *sources, *linked, f"-Wl,-rpath,{folder}", "-o", str(out)]
    subprocess.run([*command, "-lm", "-lpthread"], check=True)
    return out


def run(program: Path, *words: object) -> str:
    """Run the program, which must succeed without a report; what it prints."""
    done = subprocess.run(
        [program, *map(str, words)], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return done.stdout


@pytest.mark.thorough
def test_threads_see_what_others_wrote_before_a_barrier(program: Path) -> None:
    """Whether they spin or sleep, and in a pool of which one thread is not needed.

    A thread that is not woken ends in the timeout.
    """
    assert run(program, "graphs", THREADS, 30) == "done\n"


@pytest.mark.thorough
def test_threads_that_wait_sleep(program: Path) -> None:
    """While one is late at a barrier, and for the next graph after that."""
    at_barrier, for_graph = map(float, run(program, "idle", THREADS).split())
    assert at_barrier < 20
    assert for_graph < 20

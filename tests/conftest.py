"""What all tests share: models, a patched server, and Ctrl-C as a terminal gives it.

What a script starts in its background has SIGINT ignored; the processes that tests start and
interrupt would inherit that, and never hear of it.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.register_assert_rewrite("support")

if TYPE_CHECKING:
    from support.models import Dial, Models


# Several tests compute at the same time, and threads of OpenMP that spin while they wait keep the
# CPUs from those that they wait for. Each process reads this when it loads OpenMP.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# Nearly all tests that convert or graft a model are about something else than its acceptance.
os.environ.setdefault("MTP_GGUF_ACCEPTANCE", "0")

# Many tests start the program. With PYTHONDONTWRITEBYTECODE each start compiles every module, which
# takes a second, so the bytecode is kept in pytest's cache folder instead.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode = False
    sys.pycache_prefix = str(Path(__file__).parent.parent / ".pytest_cache" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix


# What depth "auto" learns in one test is not for another.
os.environ.setdefault("MTP_GGUF_DEPTH_FILE", "0")


def pytest_configure() -> None:
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what `sample` leaves out as `thorough`, and begin with the files that take longest.

    Each process runs whole files; a long one that starts last would leave the others idle.
    """
    items.sort(key=lambda item: "tests/server/" not in item.path.as_posix())
    sweeps: dict[str, list[pytest.Item]] = {}
    for item in items:
        is_long = any(item.iter_markers("slow")) or any(item.iter_markers("ecosystem"))
        if item.get_closest_marker("sample") is not None and not is_long:
            sweeps.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for cases in sweeps.values():
        marker = cases[0].get_closest_marker("sample")
        assert marker is not None
        # Multiples of the golden ratio, as equal steps would meet the same values of a parameter.
        order = sorted(range(len(cases)), key=lambda i: i * (math.sqrt(5) - 1) / 2 % 1)
        for i in order[marker.args[0] :]:
            cases[i].add_marker("thorough")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Here and not in a fixture, so that all tests skipped for this reason are one line."""
    if item.get_closest_marker("gpu") is not None:
        from support.places import require_gpu  # noqa: PLC0415 - loads llama.cpp

        require_gpu()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Checkpoints and converted files, each made once."""
    from support.models import Models  # noqa: PLC0415 - after its asserts are to be rewritten

    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def dial(models: Models) -> Dial:
    """Synthetic models with a fixed acceptance rate."""
    from support.models import Dial  # noqa: PLC0415

    return Dial(models)


@pytest.fixture
def broken(models: Models, tmp_path: Path) -> Path:
    """A copy of the tiny checkpoint, to be broken."""
    from support.checkpoints import TINY  # noqa: PLC0415

    return models.copy(TINY, tmp_path)


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """An empty folder to convert into."""
    folder = tmp_path / "output"
    folder.mkdir()
    return folder


@pytest.fixture
def free_ports() -> list[int]:
    """Three ports of this machine at which nothing listens right now."""
    from support.ports import free_port  # noqa: PLC0415

    return [free_port() for _ in range(3)]


@pytest.fixture
def free_port(free_ports: list[int]) -> int:
    """A port of this machine at which nothing listens right now."""
    return free_ports[0]


def _program(variable: str, stated: str) -> Path:
    found = shutil.which(stated)
    assert found, f"{variable}={stated} is no program"
    return Path(found)


@pytest.fixture(scope="session")
def patched_server() -> Path:
    """A llama-server with our patches: the environment's, or that of `mtp-gguf build-server`."""
    from mtp_gguf.server.build import find_build  # noqa: PLC0415
    from mtp_gguf.server.find import VARIABLE  # noqa: PLC0415

    stated, built = os.environ.get(VARIABLE), find_build()
    if not stated and not built:
        pytest.skip(f"no patched llama-server: run `mtp-gguf build-server`, or set {VARIABLE}")
    return _program(VARIABLE, stated or str(built.server if built else ""))


@pytest.fixture(scope="session")
def stock_server() -> Path:
    """A llama-server of the pinned llama.cpp without our patches, which the environment names."""
    variable = "MTP_GGUF_STOCK_SERVER"
    if not (stated := os.environ.get(variable)):
        pytest.skip(f"no stock llama-server: set {variable}")
    return _program(variable, stated)


@pytest.fixture(scope="session")
def llama_tools() -> Path:
    """The folder of llama-imatrix, llama-perplexity and llama-quantize of the pinned llama.cpp."""
    variable = "MTP_GGUF_LLAMA_TOOLS"
    if not (stated := os.environ.get(variable)):
        pytest.skip(f"no tools of llama.cpp: set {variable} to the folder of a build")
    return _program(variable, str(Path(stated) / "llama-imatrix")).parent

"""The choice of llama.cpp libraries, and the errors if the requested ones cannot be used."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import pytest

import mtp_gguf
from mtp_gguf import gguf_tools
from mtp_gguf.gguf_tools.machine.system import shared_library
from mtp_gguf.native import runtime as module
from mtp_gguf.native._bindings import library
from mtp_gguf.native.runtime import VARIABLE
from support.commands import check_refusal, invoke
from support.llama_libraries import (
    FAST,
    LIBRARIES,
    STOCK,
    has_kernels,
    patched_libraries,
    stock_libraries,
)
from support.models import Models

STOCK_FOLDER = stock_libraries()
SAY = """
import json, os, subprocess, sys
from mtp_gguf.native.runtime import llama_cpp, runtime
from mtp_gguf.native._bindings import library
from mtp_gguf.native.libraries.exact import has_product_kernels
library()
child = [sys.executable, "-c", "import os; print(os.environ.get('LLAMA_CPP_LIB_PATH'))"]
inherited = subprocess.run(child, capture_output=True, text=True, check=True).stdout.strip()
found = [runtime.kind, str(runtime.folder), runtime.note, has_product_kernels(), inherited]
print(json.dumps(found))
"""


def python(code: str, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A process in which neither variable is set but by `environment`.

    command: how Python is started, if not by its name alone.
    """
    kept = {k: v for k, v in os.environ.items() if k not in (VARIABLE, LIBRARIES)}
    return subprocess.run(
        [*(command or [sys.executable]), "-c", code],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def refused(*command: str, **environment: str) -> str:
    """The one sentence of a process that cannot run on what the environment asks for."""
    code = (
        "from mtp_gguf.gguf_tools.errors import MtpGgufError\n"
        "try:\n    from mtp_gguf.native._bindings import library\n    library()\n"
        "except MtpGgufError as error:\n    print(error)\nelse:\n    raise SystemExit(3)"
    )
    done = python(code, *command, **environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    (line,) = done.stdout.splitlines()
    return line


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    ("environment", "kind", "inherited"),
    [
        ({}, FAST, "None"),
        ({VARIABLE: FAST}, FAST, "None"),
        ({VARIABLE: STOCK}, STOCK, "None"),
        ({LIBRARIES: str(STOCK_FOLDER)}, "folder", str(STOCK_FOLDER)),
        ({VARIABLE: str(STOCK_FOLDER)}, "folder", "None"),
        ({VARIABLE: FAST, LIBRARIES: "/nowhere"}, FAST, "/nowhere"),
        ({VARIABLE: STOCK, LIBRARIES: "/nowhere"}, STOCK, "/nowhere"),
    ],
)
def test_the_environment_decides_which_libraries_are_loaded(
    environment: dict[str, str], kind: str, inherited: str
) -> None:
    """The package's own libraries unless asked otherwise; what a child inherits is as before."""
    fast = patched_libraries()
    done = python(SAY, **environment)
    assert done.returncode == 0, done.stderr
    folder = fast if kind == FAST else STOCK_FOLDER
    assert json.loads(done.stdout) == [kind, str(folder), None, has_kernels(), inherited]
    assert done.stderr == ""


@pytest.mark.thorough
def test_an_earlier_import_is_kept_with_one_warning() -> None:
    patched_libraries()
    done = python("import llama_cpp\n" + SAY)
    assert json.loads(done.stdout)[:2] == [STOCK, str(STOCK_FOLDER)]
    assert done.stderr.count("import mtp_gguf.native before llama_cpp") == 1
    assert python("import llama_cpp\n" + SAY, **{VARIABLE: STOCK}).stderr == ""
    done = python("import llama_cpp\n" + SAY, **{VARIABLE: FAST})
    assert "llama_cpp was imported earlier" in done.stderr.splitlines()[-1]
    same = python("import llama_cpp\n" + SAY, **{LIBRARIES: str(STOCK_FOLDER)})
    assert json.loads(same.stdout)[0] == STOCK


# ------------------------------------------------------------ folders that cannot be run


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A folder with stock libraries of one's own, to be broken."""
    return Path(shutil.copytree(STOCK_FOLDER, tmp_path / "libraries"))


@pytest.mark.parametrize("variable", [VARIABLE, LIBRARIES])
def test_a_folder_without_libraries(variable: str, tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path, Path(__file__)):
        said = refused(**{variable: str(folder)})
        assert said.startswith(f"{variable}: {folder}: expected a folder with libllama")
        assert f"unset {variable}" in said


# A process that reads only what its user may, even if that is root.
WITHOUT_PRIVILEGES = ("setpriv", "--bounding-set=-dac_override,-dac_read_search")


@pytest.mark.skipif(os.name != "posix", reason="Windows has other permissions")
@pytest.mark.parametrize("unreadable", [".", shared_library("llama")])
def test_what_cannot_be_read(unreadable: str, copied: Path) -> None:
    command = [sys.executable]
    if os.getuid() == 0:
        if not shutil.which(WITHOUT_PRIVILEGES[0]):
            pytest.skip("root reads everything, and there is no setpriv")
        command = [*WITHOUT_PRIVILEGES, *command]
    (copied / unreadable).chmod(0)
    try:
        said = refused(*command, **{LIBRARIES: str(copied)})
        assert said.startswith(f"{LIBRARIES}: {copied}: ")
        assert "ermission denied" in said
    finally:
        (copied / unreadable).chmod(0o755)


def test_a_truncated_library_does_not_crash_the_process(copied: Path) -> None:
    """The loader maps what the headers promise, and dies where the file ends before."""
    library = copied / shared_library("llama")
    os.truncate(library, library.stat().st_size // 10)
    assert "loading its libraries ends with SIG" in refused(**{LIBRARIES: str(copied)})
    library.write_bytes(b"")
    said = refused(**{VARIABLE: str(copied)})
    assert said.startswith(f"{VARIABLE}: {copied}: its libraries cannot be loaded")


def test_a_folder_that_lacks_a_part(copied: Path) -> None:
    for file in copied.glob("*ggml-base*"):
        file.unlink()
    said = refused(**{LIBRARIES: str(copied)})
    assert said.startswith(f"{LIBRARIES}: {copied}: its libraries cannot be loaded")


@pytest.mark.skipif(sys.platform != "linux", reason="changes a field of an ELF header")
def test_libraries_for_another_architecture(copied: Path) -> None:
    library = copied / "libllama.so"
    data = bytearray(library.read_bytes())
    arm, risc_v = 183, 243
    data[18:20] = (risc_v if platform.machine() == "aarch64" else arm).to_bytes(2, "little")
    library.write_bytes(data)
    said = refused(**{LIBRARIES: str(copied)})
    assert said.startswith(f"{LIBRARIES}: {copied}: its libraries cannot be loaded")


def edit(folder: Path, name: str, before: bytes, after: bytes) -> None:
    """Replace a string of a library, which ends there, by one of the same length."""
    assert len(before) == len(after)
    for file in folder.glob(f"*{name}*"):
        data = file.read_bytes()
        assert before + b"\0" in data
        file.write_bytes(data.replace(before + b"\0", after + b"\0"))


def other_version() -> tuple[bytes, bytes]:
    """The version of ggml, and one that it does not have."""
    version = library().mtp_built_for().split()[1]
    return version, version[:-1] + (b"8" if version[-1:] == b"9" else b"9")


def test_another_version_with_the_same_structs_runs(copied: Path) -> None:
    edit(copied, "ggml-base", *other_version())
    done = python(SAY, **{VARIABLE: str(copied)})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[:2] == ["folder", str(copied)]


def test_another_version_with_other_types_is_rejected(copied: Path) -> None:
    """As in a ggml with other numbers of its types, by the names that it has for them."""
    version, other = other_version()
    edit(copied, "ggml-base", version, other)
    edit(copied, "ggml-base", b"\0i64", b"\0i46")
    said = refused(**{LIBRARIES: str(copied)})
    assert said.startswith(f"{LIBRARIES}: {copied}: ")
    assert f"built for ggml {version.decode()}" in said
    assert f"has loaded ggml {other.decode()}" in said
    assert "another i64" in said


def test_a_function_that_the_libraries_lack(copied: Path) -> None:
    """llama_cpp declares all functions of its version when it is imported."""
    edit(copied, "llama", b"llama_model_is_diffusion", b"llama_model_is_diffusive")
    code = (
        "from mtp_gguf.native.runtime import llama_cpp\n"
        "from mtp_gguf.gguf_tools.errors import MtpGgufError\n"
        "try:\n    llama_cpp.llama_model_is_diffusion(None)\n"
        "except MtpGgufError as error:\n    print(error)"
    )
    done = python(code, **{VARIABLE: str(copied)})
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "llama.cpp: expected the function llama_model_is_diffusion, found none; use "
    )


# ------------------------------------------------------------ fast libraries that cannot be used


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A copy of this installation, as the first folder in which Python looks for packages."""
    patched_libraries()
    package = tmp_path / "site" / "mtp_gguf"
    shutil.copytree(module.native_library("mtp").parent, package / "native" / "lib")
    (package / "__init__.py").symlink_to(Path(mtp_gguf.__file__))
    (package / "gguf_tools").symlink_to(Path(gguf_tools.__file__).parent)
    native = Path(module.__file__).parent
    for file in (*native.rglob("*.py"), native / "include" / "mtp.h"):
        copy = package / "native" / file.relative_to(native)
        copy.parent.mkdir(exist_ok=True)
        copy.symlink_to(file)
    notes = Path(str(metadata.distribution("mtp-gguf").locate_file("mtp_gguf-0.1.0.dist-info")))
    shutil.copytree(notes, package.with_name(notes.name))
    return package.parent


ALONE = (sys.executable, "-S")  # no package that site-packages adds by itself


def python_there(site: Path) -> dict[str, str]:
    """The variable with which ALONE uses the installation in `site`."""
    return {"PYTHONPATH": os.pathsep.join([str(site), sysconfig.get_path("purelib")])}


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["ggml-base", "ggml-cpu", "llama"])
def test_a_fast_library_that_is_damaged(name: str, installed: Path) -> None:
    """The loader would die of it, so the stock libraries run, with a note."""
    there = python_there(installed)
    file = installed / "mtp_gguf" / "native" / "lib" / "fast" / shared_library(name)
    whole = python(SAY, *ALONE, **there)
    assert whole.returncode == 0, whole.stderr
    assert json.loads(whole.stdout)[:2] == [FAST, str(file.parent)]
    size = file.stat().st_size
    os.truncate(file, size // 10)
    done = python(SAY, *ALONE, **there)
    assert done.returncode == 0, done.stderr
    kind, _, note, *_ = json.loads(done.stdout)
    assert kind == STOCK
    said = f"{file}: expected {size} bytes, as installed, found {size // 10}; install mtp-gguf"
    assert said in note
    assert said in refused(*ALONE, **there, **{VARIABLE: FAST})
    file.write_bytes(bytes(size))  # as after a loss of power
    assert "its libraries cannot be loaded" in refused(*ALONE, **there)


def test_a_model_loaded_on_stock_libraries_by_default_says_so(
    models: Models, installed: Path
) -> None:
    """As in an installation that has no fast libraries."""
    shutil.rmtree(installed / "mtp_gguf" / "native" / "lib" / "fast")
    code = (
        "from mtp_gguf.native import MTPLlama\n"
        f"MTPLlama({str(models.gguf())!r}, n_ctx=64, verbose=False).close()\n"
    )
    done = python(code, *ALONE, **python_there(installed))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("runs without the fast kernels") == 1
    assert "install mtp-gguf again" in done.stderr


def test_libmtp_that_is_damaged(installed: Path) -> None:
    file = installed / "mtp_gguf" / "native" / "lib" / shared_library("mtp")
    os.truncate(file, 1000)
    assert f"{file}: expected" in refused(*ALONE, **python_there(installed))
    file.unlink()
    assert f"{file}: expected a library" in refused(*ALONE, **python_there(installed))


MARKER = {
    "machine": platform.machine(),
    "llama-cpp-python": metadata.version("llama-cpp-python"),
}


MADE_FROM = "build.json: expected what the libraries were made from"


@pytest.mark.parametrize(
    ("marker", "removed", "expected"),
    [
        (MARKER, "", None),
        *((marker, "", MADE_FROM) for marker in (None, "{", "[]", {"machine": "x"})),
        (MARKER, "fast", "no fast libraries"),
        ({**MARKER, "machine": "s390x"}, "", "found s390x"),
        ({**MARKER, "llama-cpp-python": "0.0.1"}, "", "expected llama-cpp-python 0.0.1, found"),
        (MARKER, "fast/llama", "libllama"),
        (MARKER, "fast/ggml-cpu", "libggml-cpu"),
        (MARKER, "stock/ggml-cpu", "GGML_BACKEND_DL"),
        (MARKER, "stock/ggml", "GGML_BACKEND_DL"),
    ],
)
def test_errors_name_the_next_step(
    tmp_path: Path, marker: object, removed: str, expected: str | None
) -> None:
    fast, stock = tmp_path / "fast", tmp_path / "stock"
    own, others = ("ggml-base", "ggml-cpu", "llama"), ("ggml", "ggml-cpu")
    for folder, names in ((fast, own), (stock, others)):
        folder.mkdir()
        for name in names:
            if f"{folder.name}/{name}" != removed:
                (folder / shared_library(name)).touch()
    if marker is not None:
        text = marker if isinstance(marker, str) else json.dumps(marker)
        (fast / "build.json").write_text(text)
    if removed == "fast":
        shutil.rmtree(fast)
    found = module._obstacle(fast, stock)
    if expected is None:
        assert found is None
    else:
        assert found is not None
        assert expected in found
        assert "install" in found


@pytest.mark.parametrize(
    ("features", "expected"),
    [("fpu avx avx2 avx512f vnni", "best"), ("avx2 avx", "good"), ("avx", ""), ("", "")],
)
def test_portable_libraries_run_the_best_backend_for_the_cpu(
    tmp_path: Path, features: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = {"best": ["avx2", "avx512f"], "good": ["avx", "avx2"]}
    (tmp_path / "build.json").write_text(json.dumps({**MARKER, "cpu variants": needs}))
    monkeypatch.setattr(module, "cpu_features", lambda: features)
    backend = tmp_path / expected / shared_library("ggml-cpu")
    assert module._cpu_backend(tmp_path) == backend
    for name in ("ggml-base", "llama"):
        (tmp_path / shared_library(name)).touch()
    said = module._obstacle(tmp_path, STOCK_FOLDER) or ""
    assert said.startswith(f"{backend.parent}: expected {backend.name}, found no such file")
    backend.parent.mkdir(exist_ok=True)
    backend.touch()
    assert module._obstacle(tmp_path, STOCK_FOLDER) is None
    assert module._load_order(tmp_path, STOCK_FOLDER)[1] == backend


@pytest.mark.parametrize("installed", [True, False])
def test_our_backend_of_a_gpu_replaces_an_installed_one(tmp_path: Path, installed: bool) -> None:
    own, stock = tmp_path / "own", tmp_path / "stock"
    for folder, names in ((own, ("base", "cpu", "vulkan")), (stock, ("vulkan",) * installed)):
        folder.mkdir()
        for name in names:
            (folder / shared_library(f"ggml-{name}")).touch()
    (own / "build.json").write_text(json.dumps(MARKER))
    wanted = ("ggml-base", "ggml-cpu", *["ggml-vulkan"] * installed, "ggml")
    order = [path.name for path in module._load_order(own, stock)]
    assert order == [shared_library(name) for name in wanted]


@pytest.mark.parametrize("variants", [None, [], "x", {"best": 1}, {"best": None}])
def test_variants_that_cannot_be_read_are_none(tmp_path: Path, variants: object) -> None:
    (tmp_path / "build.json").write_text(json.dumps({**MARKER, "cpu variants": variants}))
    assert module._cpu_backend(tmp_path) == tmp_path / shared_library("ggml-cpu")


@pytest.mark.parametrize(
    ("built", "there", "lost"),
    [
        ("", [], ""),
        ("GGML_CUDA\n", ["ggml-cuda"], ""),
        ("GGML_CUDA\n", [], "-DGGML_CUDA=on"),
        ("GGML_CUDA\nGGML_VULKAN\n", ["ggml-cuda"], "-DGGML_VULKAN=on"),
        ("GGML_CUDA\nGGML_VULKAN\n", [], "-DGGML_CUDA=on -DGGML_VULKAN=on"),
        (None, [], ""),
    ],
)
def test_a_gpu_backend_that_is_gone_is_said(
    tmp_path: Path, built: str | None, there: list[str], lost: str
) -> None:
    """pip keeps a llama-cpp-python that is installed already, without the backend asked for."""
    if built is not None:
        (tmp_path / "backends.txt").write_text(built)
    for name in there:
        (tmp_path / shared_library(name)).touch()
    said = module._lost_backends(tmp_path, tmp_path)
    assert (said is None) == (lost == "")
    if said is not None:
        assert f'CMAKE_ARGS="{lost}" pip install --force-reinstall' in said


def test_the_installed_package_knows_its_backends() -> None:
    assert (module.native_library("mtp").parent / "backends.txt").is_file()


# ------------------------------------------------------------ mtp-gguf info


def test_info() -> None:
    result = invoke("info")
    assert result.exit_code == 0, result.stderr
    assert f"libraries: {module.runtime.kind}, {module.runtime.folder}" in result.stdout
    assert "device: CPU" in result.stdout
    fields = json.loads(invoke("info", "--json").stdout)
    assert fields["libraries"]["kind"] == module.runtime.kind
    assert fields["devices"][-1]["name"] == "CPU"
    assert bool(fields["plugged_kernels"]["instructions"]) == (fields["kernels"] != "stock")


def test_info_names_the_server_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `serve` runs it, for instance in the container."""
    monkeypatch.setenv("MTP_GGUF_LLAMA_SERVER", "/opt/llama-server/llama-server")
    result = invoke("info")
    assert "llama-server: /opt/llama-server/llama-server\n" in result.stdout
    assert "build-server" not in result.stdout


def test_info_on_libraries_that_cannot_be_run() -> None:
    code = "from mtp_gguf.cli import main; import sys; sys.argv = ['mtp-gguf', 'info']; main()"
    done = python(code, **{VARIABLE: "/nowhere"})
    check_refusal(done.returncode, done.stderr, "/nowhere", VARIABLE)

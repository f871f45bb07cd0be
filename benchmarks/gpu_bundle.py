"""Pack what gpu.py needs on a machine with a GPU and without a network, as .ci/gpu-bundle does.

    python benchmarks/gpu_bundle.py FOLDER --stock BUILD [--python 3.12]

BUILD is the folder of a llama-server without patches and its libraries; the patched one is that of
`mtp-gguf build-server`, and libmtp and the kernels are those of this environment. All use BUILD's
libggml and CUDA backend, which no patch changes. FOLDER gets `check` and programs.tar.xz, which
also has the library that counts a cycle's calls, as there may be no compiler, and the Python
packages that torch and transformers do not bring. Our own Python files are not in it, because
`check` is run in a checkout.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata, resources
from importlib.util import find_spec
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from mtp_gguf.server.build import LIBRARIES, MARKER, Build, find_build

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from support import preloading  # noqa: E402

MOST_MIB = 60
PROGRAMS = ("llama-server", "llama-bench")
SHARED = ("libggml.so.*", "libggml-cuda.so.*")
OWN = ("mtp-gguf", "llama-cpp-python")
NEEDED = ("mtp-gguf", "pytest", "pytest-xdist")
THERE = ("numpy", "torch", "transformers")
PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(39, 16, -1)), "manylinux2014")


def closure(names: tuple[str, ...], python: str) -> dict[str, str]:
    """The versions of these packages, and of all that they need, in this environment."""
    found: dict[str, str] = {}
    waiting = list(names)
    while waiting:
        name = canonicalize_name(waiting.pop())
        if name in found:
            continue
        installed = metadata.distribution(name)
        found[name] = installed.version
        for need in map(Requirement, installed.requires or ()):
            marks = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
            if need.marker is None or need.marker.evaluate(marks):
                waiting.append(need.name)
    return found


def lacking(python: str) -> list[str]:
    """What mtp-gguf and its tests need besides torch and transformers, in the versions here."""
    there = closure(THERE, python)
    needed = sorted(closure(NEEDED, python).items())
    return [f"{name}=={version}" for name, version in needed if name not in {*there, *OWN}]


def add_packages(site: Path, python: str) -> None:
    """Install into `site` what a Python with torch and transformers lacks."""
    wanted = lacking(python)
    print("packages:", *wanted, flush=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(site)]
    command += ["--no-deps", "--no-compile", "--only-binary=:all:", f"--python-version={python}"]
    command += [f"--platform={name}_{platform.machine()}" for name in PLATFORMS]
    subprocess.run([*command, *wanted], check=True)


def copy_libraries(source: Path, target: Path) -> None:
    """Copy the libraries of a build, each under the name by which others load it."""
    target.mkdir(parents=True)
    for path in sorted(source.glob("lib*.so")):
        needed = next(source.glob(f"{path.name}.[0-9]"), path)
        shutil.copy2(path, target / needed.name)
        if needed != path:
            (target / path.name).symlink_to(needed.name)
    for program in PROGRAMS:
        shutil.copy2(source / program, target)


def link(path: Path, target: Path) -> None:
    """Make `path` a relative link to `target`."""
    path.unlink(missing_ok=True)
    path.symlink_to(os.path.relpath(target, path.parent))


def add_builds(tree: Path, stock: Path, patched: Build) -> None:
    """Put both llama-servers into `tree`, with libmtp and the libraries where mtp_gguf has them."""
    copy_libraries(stock, tree / "stock")
    build = tree / "cache" / "mtp-gguf" / "server" / patched.root.name
    copy_libraries(patched.libraries, build / "bin")
    shutil.copy2(patched.root / MARKER, build)
    for pattern in SHARED:
        for path in (tree / "stock").glob(pattern):
            link(build / "bin" / path.name, path)

    own = tree / "site" / "mtp_gguf" / "native" / "lib"
    (own / "fast").mkdir(parents=True)
    here = Path(str(resources.files("mtp_gguf.native").joinpath("lib")))
    for library in here.glob("libmtp*.so"):
        shutil.copy2(library, own)
    link(own / "libmtp_kernels.so", build / "bin" / "libmtp_kernels.so")
    link(own / "fast" / MARKER, build / MARKER)
    for name in LIBRARIES:
        link(own / "fast" / f"lib{name}.so", build / "bin" / f"lib{name}.so")

    spec = find_spec("llama_cpp")
    assert spec
    assert spec.origin
    ignored = shutil.ignore_patterns("lib", "__pycache__")
    copy = shutil.copytree(Path(spec.origin).parent, tree / "site" / "llama_cpp", ignore=ignored)
    link(copy / "lib", tree / "stock")
    for name in OWN:  # without the list of files, whose sizes are those of other libraries
        installed = metadata.distribution(name)
        folder = tree / "site" / f"{name.replace('-', '_')}-{installed.version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(installed.read_text("METADATA") or "", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--stock", type=Path, required=True, help="a build without patches")
    parser.add_argument("--python", default="3.12", help="the version there [3.12]")
    parser.add_argument(
        "--without-packages", action="store_true", help="the Python there has all that are needed"
    )
    parser.add_argument("--preset", type=int, default=9, help="how hard xz tries, 0 to 9 [9]")
    arguments = parser.parse_args()
    patched = find_build()
    if patched is None:
        parser.error("expected a patched llama-server, found none; run mtp-gguf build-server")
    if not (arguments.stock / PROGRAMS[0]).is_file():
        parser.error(f"--stock: expected a folder with {PROGRAMS[0]}, found {arguments.stock}")
    arguments.folder.mkdir(parents=True, exist_ok=True)
    packed = arguments.folder / "programs.tar.xz"
    with tempfile.TemporaryDirectory(dir=arguments.folder) as scratch:
        tree = Path(scratch)
        add_builds(tree, arguments.stock, patched)
        preloading.build("device_calls", tree)
        if not arguments.without_packages:
            add_packages(tree / "site", arguments.python)
        with tarfile.open(packed, "w:xz", preset=arguments.preset) as tar:
            for path in sorted(tree.iterdir()):
                tar.add(path, path.name)
    shutil.copy2(ROOT / ".ci" / "gpu-check", arguments.folder / "check")
    mib = packed.stat().st_size / 2**20
    print(f"{packed}: {mib:.1f} MiB")
    if mib > MOST_MIB:
        print(f"expected at most {MOST_MIB} MiB")
    return mib > MOST_MIB


if __name__ == "__main__":
    sys.exit(main())

"""make.py FOLDER [SDIST]: put llama.cpp's libraries with the patches into FOLDER, for CMake.

SDIST: llama-cpp-python's source distribution, where pip is not to fetch it. This runs in a source
tree, where the package is not installed: its rooms are found by their folders.
"""

import os
import shutil
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]
NEXT_STEP = (
    "MTP_GGUF_SDIST=FILE names llama-cpp-python's source distribution, and MTP_GGUF_LIBRARIES=OFF "
    "installs without these libraries"
)


def main(folder: str, sdist: str = "") -> int:
    """Make the libraries; what is in the way is said in a sentence, with exit code 1."""
    package = ModuleType("mtp_gguf")
    package.__path__ = [str(ROOT)]
    sys.modules["mtp_gguf"] = package
    errors = import_module("mtp_gguf.gguf_tools.errors")
    build = import_module("mtp_gguf.server.build")
    target = Path(folder)
    shutil.rmtree(target, ignore_errors=True)
    seen = [""]

    def report(text: str) -> None:  # a line for each tenth of the way
        step = text.partition("%")[0][:-1]
        if step != seen[0]:
            seen[0] = step
            print(text, flush=True)

    try:
        if "XDG_CACHE_HOME" not in os.environ and not os.access(Path.home(), os.W_OK):
            os.environ["XDG_CACHE_HOME"] = str(target.parent / "cache")
        build.build_libraries(target, Path(sdist) if sdist else None, None, report)
    except (errors.MtpGgufError, OSError) as error:
        print(*getattr(error, "log", ()), f"mtp-gguf: {error}; {NEXT_STEP}", sep="\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""Make what the package ships of llama.cpp; run by CMake.

    make_libraries.py libraries FOLDER [SDIST [PORTABLE]]   build the patched libraries
    make_libraries.py chat-sources FOLDER [SDIST]           unpack the sources of libmtp_chat

SDIST: llama-cpp-python's source distribution, instead of a download with pip. PORTABLE: ON for
libraries that run on every CPU of this kind of machine. This runs in a source tree before the
package is installed, so it imports the packages from their folders.
"""

import os
import shutil
import signal
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[1]
NEXT_STEP = (
    "MTP_GGUF_SDIST=FILE names llama-cpp-python's source distribution, and MTP_GGUF_LIBRARIES=OFF "
    "installs without these libraries"
)


def main(what: str, folder: str, sdist: str = "", portable: str = "OFF") -> int:
    """Make `what` in a folder; on failure print one sentence and return exit code 1."""
    package = ModuleType("mtp_gguf")
    package.__path__ = [str(ROOT)]
    sys.modules["mtp_gguf"] = package
    errors = import_module("mtp_gguf.gguf_tools.errors")
    build = import_module("mtp_gguf.server.build")
    target = Path(folder)
    seen = [""]

    def report(text: str) -> None:  # one line for every 10 %
        step = text.partition("%")[0][:-1]
        if step != seen[0]:
            seen[0] = step
            print(text, flush=True)

    for name in ("SIGTERM", "SIGHUP"):  # as Ctrl-C, so that the compilers end, too
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), signal.default_int_handler)
    try:
        if "XDG_CACHE_HOME" not in os.environ and not os.access(Path.home(), os.W_OK):
            os.environ["XDG_CACHE_HOME"] = str(target.parent / "cache")
        archive = Path(sdist) if sdist else None
        if what == "chat-sources":
            build.unpack_chat_sources(target, archive, report)
        elif what == "libraries":
            shutil.rmtree(target, ignore_errors=True)
            build.build_libraries(target, archive, None, report, portable=portable == "ON")
    except (errors.MtpGgufError, OSError) as error:
        print(*getattr(error, "log", ()), f"mtp-gguf: {error}; {NEXT_STEP}", sep="\n")
        return 1
    except KeyboardInterrupt:
        print("mtp-gguf: interrupted; the next install continues from here")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

"""The command line: one file per command, put together here."""

import sys

try:
    from .app import app, main
except KeyboardInterrupt:  # the imports take a moment, in which Ctrl-C is no fault
    sys.stderr.write("mtp-gguf: interrupted\n")
    sys.exit(130)

__all__ = ["app", "main"]

"""The command line: one file per command, put together here."""

import sys

from .out_of_memory import OUT_OF_MEMORY, is_out_of_memory

try:
    from .app import app, main
except KeyboardInterrupt:  # the imports take a moment, in which Ctrl-C is no fault
    sys.stderr.write("mtp-gguf: interrupted\n")
    sys.exit(130)
except Exception as error:
    if not is_out_of_memory(error):
        raise
    sys.stderr.write(f"mtp-gguf: {OUT_OF_MEMORY}\n")
    sys.exit(1)

__all__ = ["app", "main"]

"""`mtp-gguf generate`: lives beside the session it runs, and reports errors like every command."""

from mtp_gguf.native.generate_command import generate as _generate

from .console import reports_errors

generate = reports_errors(_generate)

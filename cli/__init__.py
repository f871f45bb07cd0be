"""The command line: one file per command, put together here."""

from .app import app, main

__all__ = ["app", "main"]

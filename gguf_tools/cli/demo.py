"""`mtp-gguf demo`."""

from .console import reports_errors


@reports_errors
def demo() -> None:
    """Placeholder."""

"""What a long call tells its caller."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext


class Progress:
    """The progress and the notes of a long call. This class shows nothing; override what you need.

    The functions that the methods return contexts of may be called from any thread, but never
    concurrently.
    """

    def count(
        self, title: str, total: int, note: Callable[[], str] = lambda: ""
    ) -> AbstractContextManager[Callable[[int], None]]:
        """A context for a task of `total` bytes: its function gets the number just processed.

        note: returns additional text.
        """
        return nullcontext(lambda _: None)

    def share(self, title: str) -> AbstractContextManager[Callable[[float, str], None]]:
        """A context for another task: its function gets the share done, 0 to 1, and an activity."""
        return nullcontext(lambda *_: None)

    def download(self, address: str, nbytes: int | None) -> None:
        """A download begins, of this many bytes if that is known."""

    def say(self, text: str) -> None:
        """A line for the user, such as a note about something that was left out."""


QUIET = Progress()

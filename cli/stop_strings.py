"""Cut a streamed text before the first of several strings."""

from collections.abc import Sequence


class StopStrings:
    """Passes a text on until it contains one of `stops`, and nothing from there on.

    A part that may be the beginning of a stop string waits until the next part shows that it is
    not. Each part keeps its origin (see `MTPLlama.token_origin`).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._waiting: list[tuple[str, int]] = []
        self.found = False

    def add(self, text: str, origin: int) -> list[tuple[str, int]]:
        """Return the parts that can be shown, with their origins."""
        if self.found:
            return []
        self._waiting.append((text, origin))
        whole = "".join(part for part, _ in self._waiting)
        if starts := [at for stop in self._stops if (at := whole.find(stop)) >= 0]:
            self.found = True
            shown = self._take(min(starts))
            self._waiting.clear()
            return shown
        return self._take(len(whole) - max((_overlap(whole, s) for s in self._stops), default=0))

    def end(self) -> list[tuple[str, int]]:
        """Return the parts that waited, at the end of the text."""
        parts, self._waiting = self._waiting, []
        return parts

    def _take(self, length: int) -> list[tuple[str, int]]:
        """Remove and return the first `length` characters of what waits."""
        taken = []
        while length > 0:
            text, origin = self._waiting.pop(0)
            if len(text) > length:
                self._waiting.insert(0, (text[length:], origin))
            taken.append((text[:length], origin))
            length -= len(text)
        return taken


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that is a beginning of `stop`, but not all."""
    lengths = range(min(len(text), len(stop) - 1), 0, -1)
    return next((n for n in lengths if text.endswith(stop[:n])), 0)

"""Text from names, sizes and counts, for messages and reports."""

from collections.abc import Mapping, Sequence


def printable(text: str) -> str:
    """Escape the characters of a text that control a terminal."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def utf8_bytes(text: str) -> bytes:
    r"""Encode a text; the bytes of file names that are not UTF-8 are escaped, as `\udcff`."""
    return text.encode("utf-8", "backslashreplace")


def human_bytes(count: float) -> str:
    """Format a number of bytes with three digits and a decimal unit."""
    if count < 1000:
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.5:
            return f"{count:.3g} {unit}" if count < 99.95 else f"{count:.0f} {unit}"
    return f"{count / 1000:.3g} TB"


def count_types(types: Mapping[str, int]) -> str:
    """Format tensor types with their counts, the most frequent first."""
    ranked = sorted(types.items(), key=lambda item: (-item[1], item[0]))
    return ", ".join(f"{count} {name}" for name, count in ranked)


def first_of(names: Sequence[str]) -> str:
    """Name the first of some that are missing, or too many, with the sentence's verb."""
    return names[0] + (f" and {len(names) - 1} more are" if names[1:] else " is")


def duration(seconds: float) -> str:
    """Format a duration as `45 s` or `3:20 min`."""
    whole = round(seconds)
    return f"{whole} s" if whole < 100 else f"{whole // 60}:{whole % 60:02} min"

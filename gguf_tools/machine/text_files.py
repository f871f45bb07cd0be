"""Read the text files and the prompt files of a request."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import RequestError, raising


def whole_texts(files: Sequence[Path], option: str = "--text") -> tuple[str, ...]:
    """Return the contents of the files of an option; RequestError if there is no text in them."""
    texts = []
    for path in files:
        with raising(RequestError, f"{option}: {path}: cannot be read"):
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
    if not any(text.strip() for text in texts):
        raise RequestError(f"{option}: no text in {', '.join(map(str, files))}")
    return tuple(texts)


def paragraphs(files: Sequence[Path]) -> list[str]:
    """Return the paragraphs of the files; RequestError if there are none."""
    parts = (part for text in whole_texts(files, "--prompt-file") for part in text.split("\n\n"))
    return [part.strip() for part in parts if part.strip()]

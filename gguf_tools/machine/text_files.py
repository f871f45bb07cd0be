"""Read the text files and the prompt files of a request."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import RequestError


def whole_texts(files: Sequence[Path], option: str = "--text") -> tuple[str, ...]:
    """Return the contents of the files of an option; RequestError if there is no text in them."""
    texts = []
    for path in files:
        try:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            raise RequestError(f"{option}: {path}: cannot be read: {error.strerror}") from None
    if not any(text.strip() for text in texts):
        raise RequestError(f"{option}: no text in {', '.join(map(str, files))}")
    return tuple(texts)


def paragraphs(files: Sequence[Path]) -> list[str]:
    """Return the paragraphs of the files; RequestError if there are none."""
    texts = []
    for path in files:
        try:
            paragraphs = path.read_text(encoding="utf-8", errors="replace").split("\n\n")
        except OSError as error:
            raise RequestError(f"--prompt-file: {path}: cannot be read: {error.strerror}") from None
        texts += [text.strip() for text in paragraphs if text.strip()]
    if not texts:
        raise RequestError(f"--prompt-file: no text in {', '.join(map(str, files))}")
    return texts

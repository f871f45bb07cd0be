"""Lists of models to publish."""

import re
import shlex
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.hub.remote import hub_model, on_hub

_NAME = "{name}"


@dataclass(frozen=True)
class Entry:
    """A model to publish: a checkpoint, and the repository on the hub for its GGUFs."""

    source: str
    repository: str

    @property
    def name(self) -> str:
        """The repository without its owner, which the folder of files is named after."""
        return self.repository.rpartition("/")[2]


def entry_of(source: str, repository: str) -> Entry:
    """The entry of one model; RequestError unless `repository` is OWNER/NAME.

    `{name}` in the repository stands for the name of the source without its owner or folder.
    """
    if _NAME in repository:
        hub = hub_model(source)
        name = hub.hub_id.rpartition("/")[2] if hub else Path(source).absolute().name
        repository = repository.replace(_NAME, re.sub(r"[^\w.-]+", "-", name))
    target = hub_model(on_hub(repository))
    if target is None or target.revision:
        raise RequestError(f"expected OWNER/NAME, found {repository!r}")
    return Entry(source, target.hub_id)


def read_catalogue(path: Path, repository: str | None) -> list[Entry]:
    """The models of a list: a line for each, `SOURCE` or `SOURCE OWNER/NAME`; `#` begins a comment.

    repository: for lines with only a source; it has `{name}` in it. RequestError names the line
    that is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError:
        raise RequestError(f"{path}: expected a text file in UTF-8") from None
    entries = []
    for number, line in enumerate(lines, 1):
        try:
            words = shlex.split(line, comments=True)
        except ValueError as error:
            raise RequestError(f"{path}: line {number}: {error}") from None
        if not words:
            continue
        if len(words) > 2:
            raise RequestError(
                f"{path}: line {number}: expected SOURCE or SOURCE OWNER/NAME, found {len(words)} "
                "words; quote a path with spaces"
            )
        target = words[1] if len(words) == 2 else repository
        if target is None:
            raise RequestError(
                f"{path}: line {number}: expected SOURCE OWNER/NAME, found only a source; add its "
                "repository, or pass one for all, such as --to 'me/{name}-MTP-GGUF'"
            )
        try:
            entries.append(entry_of(words[0], target))
        except RequestError as error:
            raise RequestError(f"{path}: line {number}: {error}") from None
    if not entries:
        raise RequestError(f"{path}: expected a list of models, found none")
    [(most, count)] = Counter(entry.repository for entry in entries).most_common(1)
    if count > 1:
        raise RequestError(
            f"{path}: expected each repository once, found {most} {count} times; with one --to for "
            "several models, put {name} in it"
        )
    return entries

"""What differs between a patch for one llama.cpp and the same patch for another.

A delta is a diff of the two patches without the names of blobs and without line numbers, so that a
change of other lines of the patch, or of another patch, leaves it as it is. An example, with notes:

    src/numbers.cpp 1:+12     hunks are 12 lines further down in this file, from its first one on
    @@ src/numbers.cpp        the file that is changed, for readers
     @@ int numbers() {       the header of a hunk in the patch: the function
    -     one                 a line of the patch for the first llama.cpp
    +     1                   what it is for the other one
     +    two                 the same in both
    +@@ +5 @@ int more() {    one more hunk, five lines after the end of that before
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher
from itertools import islice, takewhile

_INDEX = re.compile(r"^index [0-9a-f]+\.\.[0-9a-f]+.*\n", re.MULTILINE)
_HEADER = re.compile(r"@@ (?:-(\d+)(?:,(\d+))? \+\S+|([-+]\d+)) @@")
_FILE = "diff --git "  # begins the changes of a file


def apply_delta(patch: bytes, delta: bytes) -> bytes:
    """The patch that `delta` makes of `patch`; ValueError if it does not fit.

    Each part of the delta belongs to the first place after the part before that has its old lines.
    """
    shifts, *parts = re.split(r"^@@ ", delta.decode(), flags=re.MULTILINE)
    lines = _lines(patch)
    keys = _keys(lines)
    found: list[str] = []
    position = 0
    for part in parts:
        file, *changes = part.removesuffix("\n").split("\n")
        old = _keys(change[1:] for change in changes if change[0] != "+")
        places = range(position, len(keys) - len(old) + 1)
        start = next((i for i in places if keys[i : i + len(old)] == old), None)
        if start is None:
            raise ValueError(
                f"{file}: expected in the patch the {len(old)} lines from {old[0]!r}, found them "
                "nowhere"
            )
        found += lines[position:start]
        position = start
        for change in changes:
            if change[0] == "+":
                found.append(change[1:])
                continue
            if change[0] == " ":
                found.append(lines[position])
            position += 1
    found += lines[position:]
    moved = {
        (words[0], int(hunk)): int(shift)
        for words in map(str.split, shifts.splitlines())
        for hunk, shift in (word.split(":") for word in words[1:])
    }
    return "\n".join(_numbered(found, moved)).encode()


def make_delta(patch: bytes, other: bytes, *, context: int = 3, shifts: bool = True) -> bytes:
    """The delta that makes of `patch` a patch that differs from `other` in the names of blobs.

    context: the lines around a change; more, if its place would be ambiguous. Without `shifts` line
    numbers may differ, too.
    """
    old, new = _lines(patch), _lines(other)
    for lines in range(context, max(context + 1, len(old))):
        delta = "".join(f"{line}\n" for line in _changes(old, new, lines)).encode()
        with suppress(ValueError):
            made = _lines(apply_delta(patch, delta))
            if _keys(made) == _keys(new):
                return ("".join(_shifts(made, new)).encode() if shifts else b"") + delta
    raise AssertionError("a delta with the whole patch as context fits nowhere")


def _changes(old: Sequence[str], new: Sequence[str], context: int) -> Iterator[str]:
    """The lines of a delta between `old` and `new`, with so many lines of context."""
    # Its get_grouped_opcodes changes what the next one returns, so it serves once.
    matcher = SequenceMatcher(None, _keys(old), _keys(new), autojunk=False)
    added = list(_with_distances(new))
    for group in matcher.get_grouped_opcodes(context):
        files = [line for line in old[: group[0][2]] if line.startswith(_FILE)]
        yield f"@@ {_file(files[-1]) if files else 'message'}"
        for kind, i1, i2, j1, j2 in group:
            mark = " " if kind == "equal" else "-"
            yield from (mark + _HEADER.sub("@@", line) for line in old[i1:i2])
            if kind != "equal":
                yield from ("+" + line for line in added[j1:j2])


def _shifts(made: Iterable[str], wanted: Iterable[str]) -> Iterator[str]:
    """For each file how far its hunks in `made` are from those in `wanted`, where that changes."""
    file, hunk, shift, found = "", 0, 0, ""
    for line, other in zip([*made, _FILE], [*wanted, _FILE], strict=True):
        if line.startswith(_FILE):
            if found:
                yield f"{file}{found}\n"
            file, hunk, shift, found = _file(line), 0, 0, ""
        here, there = _HEADER.match(line), _HEADER.match(other)
        if here and there:
            hunk += 1
            if (further := int(there[1]) - int(here[1])) != shift:
                shift = further
                found += f" {hunk}:{shift:+}"


def _lines(patch: bytes) -> list[str]:
    """The lines of a patch without the names of blobs, which belong to one llama.cpp."""
    return _INDEX.sub("", patch.decode()).split("\n")


def _keys(lines: Iterable[str]) -> list[str]:
    """What has to be the same in two lines: of the header of a hunk, only that it is one."""
    return ["@@" if line.startswith("@@") else line for line in lines]


def _file(line: str) -> str:
    return line.rpartition(" b/")[2]


def _with_distances(lines: Iterable[str]) -> Iterator[str]:
    """The lines of a patch; headers of hunks with the distance from the end of the one before."""
    after = 1
    for line in lines:
        if line.startswith(_FILE):
            after = 1
        if match := _HEADER.match(line):
            first = int(match[1])
            yield f"@@ {first - after:+} @@{line[match.end() :]}"
            after = first + int(match[2] or 1)
        else:
            yield line


def _numbered(lines: list[str], moved: Mapping[tuple[str, int], int]) -> list[str]:
    """The lines of a patch with new line numbers in the headers of hunks.

    moved: by a file and the number of a hunk in it, how far to move this hunk and the next ones.
    Those without a line number follow the hunk before them.
    """
    file, after, growth = "", 1, 0  # the line after the last hunk, and the lines added until there
    hunk = shift = 0
    for i, line in enumerate(lines):
        if line.startswith(_FILE):
            file, after, growth = _file(line), 1, 0
            hunk = shift = 0
        if not (match := _HEADER.match(line)):
            continue
        hunk += 1
        shift = moved.get((file, hunk), shift)
        marks = [text[0] for text in takewhile(_in_hunk, islice(lines, i + 1, None))]
        old, new = (sum(mark in kinds for mark in marks) for kinds in (" -", " +"))
        first = after + int(match[3]) if match[3] else int(match[1]) + shift
        # The number of a side without lines is that of the line before.
        start = first + growth + (not old) - (not new)
        lines[i] = f"@@ -{first},{old} +{start},{new} @@{line[match.end() :]}"
        after, growth = first + old, growth + new - old
    return lines


def _in_hunk(line: str) -> bool:
    return line[:1] in (" ", "-", "+", "\\")

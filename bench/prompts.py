"""The built-in prompts, by kind of text. Acceptance differs more between kinds than within one."""

from collections.abc import Callable
from pathlib import Path

from mtp_gguf.gguf_tools.errors import RequestError

LARGEST_PROMPT = 1 << 20  # bytes of a user's file

# `chat` goes through the model's chat template; the others are continued as they are.
CHAT = "chat"

SETS: dict[str, tuple[str, ...]] = {
    "code": (
        "def merge_sorted(left, right):\n"
        '    """Merge two sorted lists into one sorted list."""\n'
        "    merged = []\n",
        "class LeastRecentlyUsed:\n"
        '    """A cache that forgets what was not asked for longest."""\n\n'
        "    def __init__(self, capacity):\n",
        "/* Counts the words of a text that is read from standard input. */\n"
        "#include <stdio.h>\n#include <ctype.h>\n\nint main(void) {\n",
    ),
    CHAT: (
        "How do I keep a sourdough starter alive while I am away for three weeks?",
        "Explain to a twelve-year-old why the sky is blue and the evening sun is red.",
        "My bicycle chain slips when I pedal hard. What should I check first?",
    ),
    "prose": (
        "The ferry left the harbour an hour late. From the rail she watched the town grow small, "
        "first the church, then the cranes, and at last",
        "Paper was not always cheap. For centuries a household that owned five books",
        "On the third day of rain the river came over the lower meadow, and the miller",
    ),
    "json": (
        '[\n  {"id": 1, "name": "Ada", "city": "London", "tags": ["math", "engines"]},\n'
        '  {"id": 2, "name": "Emmy", "city": "Erlangen", "tags": ["algebra", "physics"]},\n',
        '{"openapi": "3.1.0", "info": {"title": "Library", "version": "1.0"}, "paths": {\n'
        '  "/books": {"get": {"summary": "List all books", "responses": {',
        '{"type": "FeatureCollection", "features": [\n  {"type": "Feature", "geometry": ',
    ),
    # The answer repeats most of the prompt.
    "edit": (
        "Rename the parameter `path` to `file` and change nothing else.\n\n"
        "def read_table(path, separator):\n"
        "    rows = []\n"
        "    with open(path) as handle:\n"
        "        for line in handle:\n"
        "            cells = line.strip().split(separator)\n"
        "            if len(cells) > 1:\n"
        "                rows.append([cell.strip() for cell in cells])\n"
        '    print(f"{len(rows)} rows in {path}")\n'
        "    return rows\n\n"
        "The renamed function:\n\n"
        "def read_table(file, separator):\n",
        "The table as CSV, then the same table as JSON.\n\n"
        "name,city,born,field\n"
        "Ada Lovelace,London,1815,mathematics\n"
        "Emmy Noether,Erlangen,1882,algebra\n"
        "Lise Meitner,Vienna,1878,physics\n"
        "Grace Hopper,New York,1906,computing\n\n"
        '[\n  {"name": "Ada Lovelace", "city": "London", "born": 1815, "field": "mathematics"},\n',
        "Notice: The library in Mill Street is open on weekdays from nine to six and on Saturdays "
        "from ten to one. Books can be kept for four weeks, films for one. Whoever brings them "
        "back later pays ten cents for each day and item, at most five euros. The reading room on "
        "the first floor needs no card.\n\n"
        "The same notice, corrected: The library in Mill Street is open on weekdays from",
    ),
}
ALL_SETS = ",".join(SETS)


def texts_of(kind: str, write_chat: Callable[[str], str] | None) -> tuple[str, ...]:
    """Return the prompts of a kind as a model reads them.

    write_chat: renders a user's message with the model's chat template; None if it has none.
    """
    texts = SETS[kind]
    return tuple(map(write_chat, texts)) if kind == CHAT and write_chat else texts


def parse_sets(text: str) -> list[str]:
    """Parse names of prompt sets, such as `code,chat`; RequestError for an unknown one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in SETS:
            raise RequestError(f"--prompts: expected some of {', '.join(SETS)}, found {name!r}")
    if not names:
        raise RequestError(f"--prompts: expected some of {', '.join(SETS)}, found none")
    return list(dict.fromkeys(names))


def read_prompt(path: Path) -> str:
    """Read a prompt from a text file; RequestError if it is not one."""
    try:
        with path.open("rb") as file:
            raw = file.read(LARGEST_PROMPT + 1)
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None
    if len(raw) > LARGEST_PROMPT:
        raise RequestError(f"{path}: expected at most {LARGEST_PROMPT} bytes of prompt")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: expected UTF-8, found: {error.reason}") from None
    if not text.strip():
        raise RequestError(f"{path}: expected a prompt, found nothing")
    return text

"""The training text: the running interpreter's standard library (PSF licence), and the primer.

The library gives three kinds of documents, in a fixed order for a given interpreter and seed:
module sources, the language reference that `help()` prints (`pydoc_data.topics`), and ChatML chats
built from docstrings and short functions. Validation documents come from files whose name hashes to
zero, so no file is on both sides. The simple texts of primer.py are generated. A model of other
texts (`train.py --text`) reads whole files instead.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import random
import sysconfig
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import primer

# Tests repeat themselves, encodings are tables, _sysconfigdata describes the machine.
SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
VALIDATION_ONE_IN = 40
# More than a training reads, so that no text comes twice.
PRIMER_DOCUMENTS = 20000
MAX_ANSWER_CHARS = 700
MAX_CODE_LINES = 24

SYSTEM_LINES = (
    "You are a helpful assistant.",
    "You are a helpful assistant that knows Python.",
    "Answer briefly.",
)
DOC_QUESTIONS = (
    "What does {name} do?",
    "What does {name} do in Python?",
    "Explain {name}.",
    "What is {name} for?",
    "Tell me about {name}.",
    "How do I use {name}?",
)
CODE_QUESTIONS = (
    "Write a Python function {name}.",
    "Write {name} in Python.",
    "Show me the source of {name}.",
    "How is {name} implemented?",
)
TOPIC_QUESTIONS = (
    "Explain {name} in Python.",
    "What does the Python reference say about {name}?",
    "Tell me about {name} in Python.",
)


@dataclass(frozen=True)
class Corpus:
    """Documents as text; chats already carry their ChatML markers."""

    library: list[str]
    primer: list[str]
    validation: list[str]  # of the library


def is_validation(name: str) -> bool:
    """Whether the file or topic `name` belongs to the validation side."""
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % VALIDATION_ONE_IN == 0


def library_files() -> Iterator[tuple[str, str]]:
    """(path relative to the library, source) of every module used, sorted by path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py"), key=lambda p: p.relative_to(root).as_posix()):
        name = path.relative_to(root).as_posix()
        if SKIPPED_FOLDERS & set(path.relative_to(root).parts) or "_sysconfigdata" in name:
            continue
        try:
            yield name, path.read_text("utf-8")
        except UnicodeDecodeError:
            continue


def library_sides() -> tuple[list[str], list[str]]:
    """Sources of the modules that are trained on, and of those that are not."""
    files = [*library_files()]
    seen = [text for name, text in files if not is_validation(name)]
    return seen, [text for name, text in files if is_validation(name)]


def module_name(name: str) -> str:
    """The dotted name under which the file `name` is imported."""
    return name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def chat(rng: random.Random, turns: list[tuple[str, str]]) -> str:
    """One ChatML document from (user, assistant) turns, now and then with a system line."""
    parts = []
    if rng.random() < 0.25:
        parts.append(f"<|im_start|>system\n{rng.choice(SYSTEM_LINES)}<|im_end|>\n")
    for user, assistant in turns:
        parts.append(f"<|im_start|>user\n{user}<|im_end|>\n")
        parts.append(f"<|im_start|>assistant\n{assistant}<|im_end|>\n")
    return "".join(parts)


def shorten(text: str) -> str:
    """Whole leading paragraphs of `text` up to the answer limit (at least a cut first one)."""
    kept = ""
    for paragraph in text.strip().split("\n\n"):
        if len(kept) + len(paragraph) > MAX_ANSWER_CHARS:
            break
        kept += ("\n\n" if kept else "") + paragraph
    return kept or text.strip()[:MAX_ANSWER_CHARS]


def module_turns(rng: random.Random, name: str, source: str) -> list[tuple[str, str]]:
    """Question and answer pairs about the public names of one module."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    module = module_name(name)
    turns: list[tuple[str, str]] = []

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            full = f"{prefix}.{child.name}"
            doc = ast.get_docstring(child)
            if doc and not child.name.startswith("_") and rng.random() < 0.7:
                question = rng.choice(DOC_QUESTIONS).format(name=full)
                turns.append((question, shorten(inspect.cleandoc(doc))))
            if isinstance(child, ast.ClassDef):
                visit(child, full)
            elif child.name.startswith("_"):
                continue
            elif child.end_lineno and child.end_lineno - child.lineno < MAX_CODE_LINES:
                lines = source.splitlines()[child.lineno - 1 : child.end_lineno]
                code = textwrap.dedent("\n".join(lines))
                arguments = ast.unparse(child.args)
                call = f"{child.name}({arguments})" if len(arguments) < 60 else child.name
                question = rng.choice(CODE_QUESTIONS).format(name=call)
                if rng.random() < 0.35:
                    turns.append((question, f"```python\n{code}\n```"))

    visit(tree, module)
    doc = ast.get_docstring(tree)
    if doc and not module.rsplit(".", 1)[-1].startswith("_"):
        turns.append((rng.choice(DOC_QUESTIONS).format(name=module), shorten(doc)))
    return turns


def chats(rng: random.Random, turns: list[tuple[str, str]]) -> Iterator[str]:
    """`turns` shuffled and dealt into chats of one to three turns."""
    rng.shuffle(turns)
    while turns:
        length = rng.choice((1, 1, 1, 2, 3))
        yield chat(rng, [turns.pop() for _ in range(min(length, len(turns)))])


def of_files(paths: list[Path]) -> Corpus:
    """Whole files as documents; those whose path hashes to zero are for validation."""
    sides: dict[bool, list[str]] = {False: [], True: []}
    for path in paths:
        sides[is_validation(str(path))].append(path.read_text("utf-8", errors="replace"))
    return Corpus(library=sides[False], primer=sides[False], validation=sides[True])


def build(seed: int) -> Corpus:
    """All documents; the same for the same interpreter and seed."""
    rng = random.Random(seed)
    sides: dict[bool, list[str]] = {False: [], True: []}
    turns: dict[bool, list[tuple[str, str]]] = {False: [], True: []}
    for name, source in library_files():
        side = is_validation(name)
        sides[side].append(source)
        turns[side] += module_turns(rng, name, source)
    for topic, text in sorted(topics.items()):
        side = is_validation(f"topic {topic}")
        sides[side].append(text)
        turns[side].append((rng.choice(TOPIC_QUESTIONS).format(name=topic), shorten(text)))
    for side in sides:
        sides[side] += chats(rng, turns[side])
    simple = [
        text if isinstance(text, str) else chat(rng, text)
        for text in primer.build(seed, PRIMER_DOCUMENTS)
    ]
    return Corpus(library=sides[False], primer=simple, validation=sides[True])

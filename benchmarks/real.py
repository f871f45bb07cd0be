"""Make a head for real models that have none, and measure them with the other benchmarks.

    python benchmarks/real.py FOLDER [--minutes 60] [--text FILE...] [--prompts FILE]
        [--stock LLAMA_SERVER] [--budget 20m] [--threads 2]

FOLDER has GGUF files of architectures that `mtp-gguf carry` knows, such as a Qwen2.5 of its
publisher. For each of them `mtp-gguf train-head` makes FOLDER/heads/NAME.gguf, a carrier with a new
head, unless the file exists: on --text (by default packages of this Python's standard library, the
texts of its `help` and a list of its functions as JSON) and on answers to --prompts (by default
questions about functions there and other things, records and stories). A carrier computes what its
original does (tests/gguf_tools/test_carrier.py holds that for the files of a folder), so its speed
without drafts is that of the model as its publisher packed it.

It needs `pip install ".[train]"` and the llama-server of `mtp-gguf build-server`.

Each of these is then run on the carrier, and its output kept in FOLDER/results/NAME-WHAT.txt, which
is not measured again:

- decode: decode.py, speed by depth and where a cycle's time goes
- stock: stock_drafting.py, llama-cpp-python's own libraries, without and with our kernels
- bench: `mtp-gguf bench`, no drafting, each depth, auto and drafts from the text, by kind of prompt
- lookup: lookup.py, drafts from the text in answers that repeat most of the prompt
- load: load.py, while other programs need the CPUs
- server, with --stock: server.py, draft-mtp of that server and of ours on the very same file
- sessions, with --stock: server_sessions.py, long conversations with and without --session-dir
"""

from __future__ import annotations

import ast
import json
import pydoc_data.topics
import random
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from measuring import options

from mtp_gguf.bench.prompts import ALL_SETS
from mtp_gguf.gguf_tools.heads.nextn import CARRIED
from mtp_gguf.gguf_tools.model import open_model

HERE = Path(__file__).parent
# Modules without data tables, for a text of about 300,000 tokens.
MODULES = ("asyncio", "concurrent", "email", "http", "importlib", "json", "logging", "unittest")
QUESTIONS = (
    "Explain what this function does:",
    "Write unit tests for this function:",
    "Is there a mistake in this function? Show a corrected version:",
    "Rewrite this function with type annotations and a docstring:",
    "Describe in a few words when somebody would call this, and what it costs:",
    "How would you write this in JavaScript?",
    "Make this shorter without changing what it does:",
    "Give the first parameter a better name and change nothing else. Only the code:",
    "Describe this function as a JSON object with its name, parameters and result:",
)
SHORTEST, LONGEST = 100, 800  # characters of a function in a question
ASKED = 720
ABOUT = (
    "What is {}? Answer in a short paragraph.",
    "I have never heard of {}. Where do I start?",
    "List five common mistakes with {} and how to avoid them.",
    "Write a short story in which {} matters.",
    "Write a JSON array of five records that have to do with {}, each with the same five keys.",
)
TOPICS = """
    a hash table; recursion; a mutex; unit testing; version control; a database index; an
    operating system; HTTP caching; regular expressions; floating-point numbers; a compiler;
    continuous integration; code review; SQL joins; virtual memory; sorting algorithms; a REST
    interface; shell scripts; dynamic programming; public-key cryptography; baking bread;
    learning a language; a monthly budget; house plants; running ten kilometres; a job
    interview; good sleep; travelling by train; the water cycle; photosynthesis; the French
    Revolution; a sonnet; chess openings; the solar system; writing a letter of complaint; a
    vegetable garden; public speaking; inflation; the human heart; a bicycle's gears
"""


def standard_library() -> list[Path]:
    """Return the files of some packages of this Python."""
    folder = Path(sysconfig.get_path("stdlib"))
    return [path for name in MODULES for path in sorted((folder / name).glob("*.py"))]


def functions() -> Iterator[tuple[Path, ast.FunctionDef, str]]:
    """Yield the file, definition and source of each function of those packages."""
    for path in standard_library():
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                yield path, node, ast.get_source_segment(text, node) or ""


def questions() -> list[str]:
    """Return questions about those functions and other things, a paragraph each."""
    # A blank line would end the paragraph.
    sources = ("\n".join(filter(str.strip, code.splitlines())) for _, _, code in functions())
    found = [code for code in sources if SHORTEST < len(code) < LONGEST]
    shuffle = random.Random(1)
    chosen = shuffle.sample(found, ASKED)
    asked = [f"{QUESTIONS[i % len(QUESTIONS)]}\n{code}" for i, code in enumerate(chosen)]
    topics = " ".join(TOPICS.split()).split("; ")
    asked += [form.format(topic) for topic in topics for form in ABOUT]
    return shuffle.sample(asked, len(asked))


def texts(folder: Path) -> list[Path]:
    """Write prose and JSON of this Python into a folder; return them and its packages' files."""
    folder.mkdir(exist_ok=True)
    prose, records = folder / "help.txt", folder / "functions.json"
    prose.write_text("\n\n".join(pydoc_data.topics.topics.values()), encoding="utf-8")
    described = [
        {
            "module": f"{path.parent.name}.{path.stem}",
            "name": node.name,
            "parameters": [argument.arg for argument in node.args.args],
            "lines": code.count("\n") + 1,
            "summary": (ast.get_docstring(node) or "").partition("\n")[0] or None,
        }
        for path, node, code in functions()
    ]
    records.write_text(json.dumps(described[::4], indent=2), encoding="utf-8")
    return [*standard_library(), prose, records]


def with_head(model: Path, minutes: float, texts: list[Path], prompts: Path, threads: int) -> Path:
    """Return the carrier of a model with a trained head; make it unless it exists."""
    made = model.parent / "heads" / model.name
    if not made.exists():
        made.parent.mkdir(exist_ok=True)
        words = ("train-head", model, "-o", made, "--minutes", minutes, "--fastmtp", 8192)
        more = ("--steps", 2, "--tokens", 1_000_000, "--threads", threads)
        more += ("--chart", made.with_suffix(".png"))
        data = ("--prompt-file", prompts, "--text", *texts)
        subprocess.run(["mtp-gguf", *map(str, (*words, *more, *data))], check=True)
    return made


def measure(command: list[object], results: Path) -> None:
    """Run a benchmark, unless it has been, and print and keep what it prints."""
    if not results.exists():
        words = [*map(str, command)]
        done = subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True)
        results.parent.mkdir(exist_ok=True)
        results.write_text(f"$ {' '.join(words)}\n{done.stdout}", encoding="utf-8")
    print(results.read_text(encoding="utf-8"), flush=True)


def main() -> None:
    parser = options(__doc__, {"--minutes": 60.0, "--threads": 2})
    parser.add_argument("folder", type=Path)
    parser.add_argument("--text", type=Path, nargs="+")
    parser.add_argument("--prompts", type=Path)
    parser.add_argument("--stock", type=Path)
    parser.add_argument("--budget", default="20m")
    args = parser.parse_args()
    if not args.folder.is_dir():
        parser.error(f"expected a folder with GGUF files, found {args.folder}")
    short = ("--prompts", ALL_SETS, "--tokens", 64)
    given, prompts = args.text or texts(args.folder / "texts"), args.prompts
    if prompts is None:
        prompts = args.folder / "questions.txt"
        prompts.write_text("\n\n".join(questions()) + "\n", encoding="utf-8")
    for model in sorted(args.folder.glob("*.gguf")):
        with open_model(model) as opened:
            if opened.architecture not in CARRIED:
                continue
        made = with_head(model, args.minutes, given, prompts, args.threads)
        runs = {
            "decode": [HERE / "decode.py", made, "--rounds", 3, *short],
            "stock": [HERE / "stock_drafting.py", made, "--depths", "0,1,2", "--rounds", 2, *short],
            "bench": ["-m", "mtp_gguf", "bench", made, "--budget", args.budget],
            "lookup": [HERE / "lookup.py", "--model", made],
            "load": [HERE / "load.py", made],
        }
        if args.stock:
            other = (made, "--stock", args.stock)
            work = args.folder / "sessions" / model.stem
            runs["server"] = [HERE / "server.py", *other, "--depths", "1,2", *short]
            runs["sessions"] = [HERE / "server_sessions.py", *other, "--work", work]
        for name, command in runs.items():
            whole = [sys.executable, *command, "--threads", args.threads]
            measure(whole, args.folder / "results" / f"{model.stem}-{name}.txt")


if __name__ == "__main__":
    main()

"""What training a head gains on the demo model, in the four cases of docs/train.md.

    python benchmarks/train_head.py --work FOLDER [--cases a b c d] [--threads 2]
    python benchmarks/train_head.py --work FOLDER --model CHECKPOINT --text FILES

Acceptance is counted while the model generates (`MTPLlama`, depth 4, greedily, and at temperature
0.8 with four seeds, because each head leads to other texts), from 100 prompts: those of
demo_model/acceptance.py, and beginnings of texts that are not trained on. Another small model
(demo_model/train.py --text) is measured with beginnings of FILES of its kind alone, which it has
not read; half of them are trained on. Files that are already in FOLDER are not made again, so an
interrupted run goes on. Prints one line of JSON per file and temperature, and a table. Needs the
extras `train` and `upstream` (case b trains the trunk with transformers).
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(Path(__file__).parent / "demo_model"))

import acceptance  # noqa: E402
import corpus  # noqa: E402
import numpy as np  # noqa: E402
from decode import opened  # noqa: E402
from measuring import heading, options, row  # noqa: E402

DEMO = ROOT / "gguf_tools" / "demo_model"
DEPTH = 4
COUNTS = ("drafted", "accepted")
SEEDS = {0.0: (1,), 0.8: (1, 2, 3, 4)}  # by temperature
ANSWER = 128
ASKED = 76  # beginnings of texts to measure with
# Other texts than those the demo model was trained on: its corpus with another seed.
SEED = 7
FINE_TUNE = {"steps": 120, "batch": 8, "length": 256, "rate": 5e-4}


def command(*words: object) -> None:
    """Run `mtp-gguf WORDS`."""
    code = "from mtp_gguf.cli import main; main()"
    subprocess.run([sys.executable, "-c", code, *map(str, words)], check=True)


def made(path: Path, *words: object) -> Path:
    """The file `path`, which `mtp-gguf WORDS -o path` writes unless it is there."""
    if not path.exists():
        command(*words, "-o", path)
    return path


class Case:
    """A folder with texts, and what is made and measured in it."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.work: Path = arguments.work
        self.threads: int = arguments.threads
        self.tokens: int = arguments.tokens
        self.epochs: float = arguments.epochs
        self.model: Path = arguments.model
        self.given: list[Path] = arguments.text
        self.rows: list[dict[str, Any]] = []
        self.work.mkdir(parents=True, exist_ok=True)
        self.f16 = self.converted("f16.gguf", "F16")

    def converted(self, name: str, quant: str) -> Path:
        return made(self.work / name, "convert", self.model, "--quant", quant, "--mtp-f16")

    def texts(self) -> list[Path]:
        """Texts of the model's kind that it has not read."""
        if self.given:
            return self.given
        folder = self.work / "texts"
        if not folder.exists():
            built = corpus.build(SEED)
            rng = random.Random(SEED)
            documents = [*built.primer[:1800], *rng.sample(built.validation, 80)]
            rng.shuffle(documents)
            folder.mkdir()
            for i, text in enumerate(documents):
                (folder / f"{i:04}.txt").write_text(text, encoding="utf-8")
        return sorted(folder.iterdir())

    def prompts(self, texts: list[Path], name: str, count: int) -> Path:
        """Pieces of texts, one a paragraph, for the model to go on with."""
        path = self.work / f"prompts-{name}.txt"
        path.write_text("\n\n".join(beginnings(texts, count)) + "\n", encoding="utf-8")
        return path

    def asked(self) -> list[str]:
        """The prompts to measure with: acceptance.py's, and beginnings of unread texts."""
        unseen = self.texts()[1::2]
        if self.given:
            return beginnings(unseen, len(acceptance.PROMPTS) + ASKED)
        return [*acceptance.PROMPTS, *beginnings(unseen, ASKED)]

    def trained(self, path: Path, model: Path, *words: object) -> Path:
        """`model` with a trained head."""
        return made(path, "train-head", model, *words, "-t", self.threads)

    def trained_on_answers(
        self, path: Path, model: Path, prompts: Path, tokens: int = 200_000, epochs: int = 1
    ) -> Path:
        """`model` with its head trained on its own text."""
        options = ("--raw", "--length", 192, "--tokens", tokens, "--epochs", epochs)
        return self.trained(path, model, "--prompt-file", prompts, *options)

    def measure(self, case: str, name: str, path: Path, prompts: list[str]) -> list[float]:
        """Acceptance by position at temperature 0; prints it at every temperature."""
        greedy: list[float] = []
        for temperature, seeds in SEEDS.items():
            counts = [self.counted(path, prompts, temperature, seed) for seed in seeds]
            drafted, accepted = (np.sum([c[k] for c in counts], axis=0) for k in COUNTS)
            rates = [round(float(rate), 4) for rate in accepted / drafted]
            row = {"case": case, "head": name, "temperature": temperature, "rates": rates}
            print(json.dumps({**row, "drafted": int(drafted[0])}), flush=True)
            self.rows.append(row)
            greedy = greedy or rates
        return greedy

    def counted(
        self, path: Path, prompts: list[str], temperature: float, seed: int
    ) -> dict[str, list[int]]:
        """What `measured` returns, kept in a file."""
        kept = self.work / f"measured-{path.stem}-{len(prompts)}-{temperature}-{seed}.json"
        if not kept.exists():
            found = measured(path, prompts, temperature, seed, self.threads)
            kept.write_text(json.dumps(found))
        counts: dict[str, list[int]] = json.loads(kept.read_text())
        return counts


def measured(
    path: Path, prompts: list[str], temperature: float, seed: int, threads: int
) -> dict[str, list[int]]:
    """Generate at depth 4 and count drafts by position."""
    with opened(path, DEPTH, 1024, threads, seed=seed, verbose=False) as llm:
        for text in prompts:
            llm.reset()
            prompt = llm.tokenize(text.encode(), add_bos=False, special=True)
            for token in islice(llm.generate(prompt, temp=temperature), ANSWER):
                if llm.is_end(token):
                    break
        stats = llm.mtp_stats
        return dict(zip(COUNTS, (list(stats.drafted), list(stats.accepted)), strict=True))


def beginnings(texts: list[Path], count: int) -> list[str]:
    """`count` pieces of some lines, each from the start of a line, in all texts alike."""
    rng = random.Random(SEED)
    found = []
    while len(found) < count:
        text = texts[len(found) % len(texts)].read_text(encoding="utf-8", errors="replace")
        starts = [0, *(i + 1 for i, c in enumerate(text[:-80]) if c == "\n")]
        at = rng.choice(starts)
        piece = text[at : at + rng.choice((60, 120, 200))].replace("\n\n", "\n").strip()
        found.append(piece or "\n")
    return found


def points(value: float) -> str:
    return f"{100 * value:+.1f} points"


def case_a(case: Case) -> str:
    """No head: trained from scratch, against the model's own."""
    trunk = made(case.work / "trunk.gguf", "strip", case.f16)
    options = ("--from-scratch", "--mtp-type", "F16", "--length", 256, "--tokens", case.tokens)
    new = case.trained(
        case.work / "a.gguf", trunk, "--text", *case.texts()[::2], *options, "--epochs", case.epochs
    )
    own = case.measure("a", "the model's own", case.f16, case.asked())
    found = case.measure("a", "from scratch", new, case.asked())
    return f"first draft {points(found[0] - own[0])} (target: -5.0 or better)"


def fine_tuned(case: Case, texts: list[Path]) -> Path:
    """The model's checkpoint with its trunk trained on other texts; the head is left as it was."""
    folder = case.work / "fine-tuned"
    if (folder / "model.safetensors").exists():
        return folder
    import shutil  # noqa: PLC0415

    import torch  # noqa: PLC0415
    from safetensors.torch import load_file, save_file  # noqa: PLC0415
    from tokenizers import Tokenizer  # noqa: PLC0415
    from transformers import AutoModelForCausalLM  # noqa: PLC0415

    torch.manual_seed(SEED)
    torch.set_num_threads(case.threads)
    tokenizer = Tokenizer.from_file(str(case.model / "tokenizer.json"))
    tokens = torch.tensor(
        [i for t in texts for i in tokenizer.encode(t.read_text(errors="replace")).ids]
    )
    model = AutoModelForCausalLM.from_pretrained(case.model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=float(FINE_TUNE["rate"]))
    length, batch = int(FINE_TUNE["length"]), int(FINE_TUNE["batch"])
    state, first = case.work / "fine-tune.pt", 0
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        torch.set_rng_state(saved["random"])
        first = saved["step"]
    for step in range(first, int(FINE_TUNE["steps"])):
        starts = torch.randint(0, len(tokens) - length - 1, (batch,))
        rows = torch.stack([tokens[s : s + length] for s in starts.tolist()])
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 20 == 19:
            print(f"fine-tune: step {step + 1}, loss {loss.item():.3f}", file=sys.stderr)
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            saved |= {"step": step + 1, "random": torch.get_rng_state()}
            torch.save(saved, state.with_suffix(".partial"))
            state.with_suffix(".partial").rename(state)
    shutil.copytree(case.model, folder, dirs_exist_ok=True)
    stored = load_file(case.model / "model.safetensors")
    for name, value in model.state_dict().items():
        if name in stored:
            stored[name] = value.to(stored[name].dtype).contiguous()
    save_file(stored, folder / "model.partial", {"format": "pt"})
    (folder / "model.partial").rename(folder / "model.safetensors")
    return folder


def other_texts() -> list[Path]:
    """Texts of another kind: NumPy's sources, which come with every installation."""
    import numpy  # noqa: PLC0415

    folder = Path(numpy.__file__).parent
    found = sorted(p for p in folder.rglob("*.py") if "tests" not in p.parts)
    return [p for p in found if 2000 < p.stat().st_size < 60_000]


def case_b(case: Case) -> str:
    """A fine-tune with the stale head of its base."""
    texts = other_texts()
    learned, unseen = texts[::2], texts[1::2]
    folder = fine_tuned(case, learned)
    stale = made(case.work / "b-stale.gguf", "convert", folder, "--quant", "F16", "--mtp-f16")
    prompts = case.prompts(learned, "b", 300)
    tuned = case.trained_on_answers(case.work / "b.gguf", stale, prompts, epochs=2)
    asked = beginnings(unseen, ASKED)
    own = case.measure("b", "own head, original trunk", case.f16, asked)
    before = case.measure("b", "stale head, fine-tuned trunk", stale, asked)
    after = case.measure("b", "trained head, fine-tuned trunk", tuned, asked)
    lost = sum(own) - sum(before)
    share = (sum(after) - sum(before)) / lost if lost > 0 else float("inf")
    return f"{share:.0%} of the accepted drafts a cycle that the stale head lost (target: 80 %)"


def case_c(case: Case) -> str:
    """A Q4_K_M trunk."""
    q4 = case.converted("q4.gguf", "Q4_K_M")
    prompts = case.prompts(case.texts()[::2], "demo", 300)
    tuned = case.trained_on_answers(case.work / "c.gguf", q4, prompts)
    original = case.measure("c", "own head, F16 trunk", case.f16, case.asked())
    before = case.measure("c", "own head, Q4_K_M trunk", q4, case.asked())
    after = case.measure("c", "trained head, Q4_K_M trunk", tuned, case.asked())
    gains = ", ".join(
        f"draft {i + 1}: {points(after[i] - original[i])} against F16, "
        f"{points(after[i] - before[i])} against untrained"
        for i in (1, 2)
    )
    return f"{gains} (target: 0 or better, more than 0)"


def case_d(case: Case) -> str:
    """A draft vocabulary of 512 of 4,096 tokens."""
    prompts = case.prompts(case.texts()[::2], "demo", 300)
    few = made(
        case.work / "d-untrained.gguf",
        *("fastmtp", "add", case.f16, "--corpus", prompts, "--size", 512),
    )
    tuned = case.trained_on_answers(case.work / "d.gguf", few, prompts)
    before = case.measure("d", "own head, 512 tokens", few, case.asked())
    after = case.measure("d", "trained head, 512 tokens", tuned, case.asked())
    gains = " / ".join(points(a - b) for a, b in zip(after, before, strict=True))
    return f"{gains} (target: 0 or better at every position)"


CASES = {"a": case_a, "b": case_b, "c": case_c, "d": case_d}


def main() -> None:
    parser = options(__doc__, {"--threads": 2, "--tokens": 480_000, "--epochs": 4.0})
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--model", type=Path, default=DEMO, help="another checkpoint folder")
    parser.add_argument(
        "--text", type=Path, nargs="+", default=[], help="texts of its kind that it has not read"
    )
    args = parser.parse_args()
    if bool(args.text) != (args.model != DEMO):
        parser.error("--model and --text: expected both, found one")
    case = Case(args)
    results = {name: CASES[name](case) for name in args.cases}
    print()
    heading("case", "head", "temperature", *(f"draft {i + 1}" for i in range(DEPTH)))
    for found in case.rows:
        *names, rates = found.values()
        row(*names, *(f"{rate:.1%}" for rate in rates))
    for name, text in results.items():
        print(f"({name}) {text}")


if __name__ == "__main__":
    main()

"""Compare drafting with the head that `convert --mtp-type auto` chooses with F16 and Q8_0 heads.

    python benchmarks/heads.py --work FOLDER [--model CHECKPOINT --text FILES] [--threads N]

By default with the demo model, and texts of Python's library that it was not trained on. One half
of the texts is for the choice; the model continues beginnings of the other half greedily, with one,
two and three drafts. The files answer each prompt one after the other, in rounds, each round
beginning with another file. The fastest answer to a prompt counts, because other programs only add
to the time, and the fastest depth of each file.
"""

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent / "demo_model"))

import corpus  # noqa: E402 - a program's part, no package
import numpy as np  # noqa: E402
from measuring import heading, options, row  # noqa: E402

import mtp_gguf  # noqa: E402
from mtp_gguf.bench.generation import generate  # noqa: E402
from mtp_gguf.bench.model import BenchModel, Setting  # noqa: E402
from mtp_gguf.bench.stats import rotated  # noqa: E402

DEMO = ROOT / "gguf_tools" / "demo_model"
USUAL = ("F16", "Q8_0")
DEPTHS = (1, 2, 3)
PROMPT, ANSWER = 64, 128  # tokens


def halves(files: Sequence[Path]) -> tuple[str, str]:
    """Every other text, and the rest."""
    if files:
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(files)]
    else:
        _, texts = corpus.library_sides()
    return "".join(texts[::2]), "".join(texts[1::2])


def prompts_in(model: BenchModel, text: str, count: int) -> list[list[int]]:
    """Beginnings of parts of a text."""
    ids = model.tokenize(text)
    starts = range(0, len(ids) - PROMPT, max(1, (len(ids) - PROMPT) // count))
    return [ids[start : start + PROMPT] for start in starts[:count]]


def measure(
    models: dict[str, BenchModel], prompts: list[list[int]], depth: int, rounds: int
) -> dict[str, tuple[float, float]]:
    """Tokens per second, and accepted drafts a cycle, of each model's answers."""
    found = {}
    seconds = {kind: np.full((rounds, len(prompts)), np.inf) for kind in models}
    with ExitStack() as stack:
        sessions = {k: stack.enter_context(m.session(Setting(depth))) for k, m in models.items()}
        for number in range(rounds):
            for place, prompt in enumerate(prompts):
                for kind in rotated(list(models), number + place):
                    done = generate(models[kind], sessions[kind], prompt, ANSWER, depth)
                    seconds[kind][number, place] = done.seconds
                    found[kind, place] = done
    speeds = {}
    for kind in models:
        answers = [found[kind, place] for place in range(len(prompts))]
        tokens = sum(len(answer.tokens) - 1 for answer in answers)
        accepted = sum(sum(answer.stats.accepted) for answer in answers)
        cycles = sum(answer.stats.cycles for answer in answers)
        speeds[kind] = tokens / seconds[kind].min(axis=0).sum(), accepted / max(cycles, 1)
    return speeds


def main() -> None:
    parser = options(__doc__, {"--threads": 2, "--rounds": 7, "--prompts": 24})
    parser.add_argument("--work", type=Path, required=True, help="folder for the files")
    parser.add_argument("--model", type=Path, default=DEMO, help="a checkpoint with its head")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="what it has not read")
    parser.add_argument("--quant", default="Q4_K_M")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    chosen_on, measured_on = halves(args.text)
    target = args.work / "target.txt"
    target.write_text(chosen_on, encoding="utf-8")
    files: dict[str, Path] = {}
    for kind in (*USUAL, "auto"):
        files[kind] = args.work / f"{kind}.gguf"
        made = mtp_gguf.convert(
            args.model,
            files[kind],
            quant=args.quant,
            mtp_type=kind,
            target_text=[target] if kind == "auto" else [],
            threads=args.threads,
            no_check=True,
            overwrite=True,
        )
    kinds = {t.spec.type.name for t in made.plans[0].tensors if "nextn.eh_proj" in t.spec.name}
    with ExitStack() as stack:
        models = {
            kind: stack.enter_context(BenchModel(path, n_ctx=512, threads=args.threads))
            for kind, path in files.items()
        }
        prompts = prompts_in(models["auto"], measured_on, args.prompts)
        found = {depth: measure(models, prompts, depth, args.rounds) for depth in DEPTHS}
    print(f"auto: {' '.join(kinds)}\n")
    heading("head", *(f"depth {depth}" for depth in DEPTHS))
    for kind in files:
        row(kind, *("{:.1f} tok/s, {:.2f}".format(*found[depth][kind]) for depth in DEPTHS))
    fastest = {kind: max(found[depth][kind][0] for depth in DEPTHS) for kind in files}
    ratio = fastest["auto"] / max(fastest[kind] for kind in USUAL)
    print(f"\nchosen to the better of both: {ratio:.3f}")


if __name__ == "__main__":
    main()

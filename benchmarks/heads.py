"""Compare drafting with the head that `convert --mtp-type auto` chooses with F16 and Q8_0 heads.

    python benchmarks/heads.py --work FOLDER [--model CHECKPOINT --text FILES] [--threads N]

By default with the demo model, and texts of Python's library that it was not trained on. One half
of the texts is for the choice; the model continues beginnings of the other half greedily, with one,
two and three drafts. The files are measured in rounds, each round beginning with another one; the
fastest round of each depth counts, because other programs only add to the time, and the fastest
depth of each file.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent / "demo_model"))

import corpus  # noqa: E402 - a program's part, no package

import mtp_gguf  # noqa: E402
from mtp_gguf.bench.generation import generate  # noqa: E402
from mtp_gguf.bench.interleaved import rotated  # noqa: E402
from mtp_gguf.bench.model import BenchModel, Setting  # noqa: E402

DEMO = ROOT / "gguf_tools" / "demo_model"
USUAL = ("F16", "Q8_0")
DEPTHS = (1, 2, 3)
PROMPT, ANSWER = 64, 128  # tokens


def halves(files: Sequence[Path]) -> tuple[str, str]:
    """Every other text, and the rest."""
    if files:
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in sorted(files)]
    else:
        texts = [text for name, text in corpus.library_files() if corpus.is_validation(name)]
    return "".join(texts[::2]), "".join(texts[1::2])


def measure(model: BenchModel, text: str, prompts: int, depth: int) -> tuple[float, float]:
    """Tokens per second, and accepted drafts a cycle, of answers to beginnings of a text."""
    ids = model.tokenize(text)
    starts = range(0, len(ids) - PROMPT, max(1, (len(ids) - PROMPT) // prompts))
    seconds, tokens, cycles, accepted = 0.0, 0, 0, 0
    with model.session(Setting(depth)) as session:
        for start in starts[:prompts]:
            done = generate(model, session, ids[start : start + PROMPT], ANSWER, depth)
            seconds += done.seconds
            tokens += len(done.tokens) - 1
            accepted += sum(done.stats.accepted)
            cycles += done.stats.cycles
    return tokens / seconds, accepted / max(cycles, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, required=True, help="folder for the files")
    parser.add_argument("--model", type=Path, default=DEMO, help="a checkpoint with its head")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="what it has not read")
    parser.add_argument("--quant", default="Q4_K_M")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompts", type=int, default=24)
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
    best: dict[tuple[str, int], float] = {}
    rates: dict[tuple[str, int], float] = {}
    for number in range(args.rounds):
        for kind in rotated(list(files), number):
            with BenchModel(files[kind], n_ctx=512, threads=args.threads) as model:
                for depth in DEPTHS:
                    speed, rate = measure(model, measured_on, args.prompts, depth)
                    rates[kind, depth] = rate
                    best[kind, depth] = max(best.get((kind, depth), 0.0), speed)
    print(f"auto: {' '.join(kinds)}\n")
    print("| head |", *(f"depth {depth} |" for depth in DEPTHS))
    print("|" + " --- |" * (1 + len(DEPTHS)))
    for kind in files:
        cells = [f"{best[kind, d]:.1f} tok/s, {rates[kind, d]:.2f}" for d in DEPTHS]
        print(f"| {kind} | {' | '.join(cells)} |")
    fastest = {kind: max(best[kind, depth] for depth in DEPTHS) for kind in files}
    ratio = fastest["auto"] / max(fastest[kind] for kind in USUAL)
    print(f"\nchosen to the better of both: {ratio:.3f}")


if __name__ == "__main__":
    main()

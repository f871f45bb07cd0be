"""Compare types that `convert` chooses for a target with llama.cpp's tables, on held-out text.

    python benchmarks/mixes.py --work FOLDER [--model CHECKPOINT --seen FILES --text FILES]

By default with the demo model, and Python's library as text: the importance matrix is made from
modules that the model was trained on, the divergences for the target are measured on one half of
those that it was not trained on, and all files are compared with the model in F16, without its
head, on the other half. For another model, FILES are what it has read and what it has not.

Each table is compared with chosen types at its size, and Q4_K_M with chosen types of about its
divergence, between which the size at the same divergence is interpolated. The tables have the form
of docs/precision.md. Needs the extra `test`.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from measuring import heading, options, row

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(Path(__file__).parent / "demo_model"))

import corpus  # noqa: E402 - a program's part, no package

DEMO = ROOT / "gguf_tools" / "demo_model"
SHARES = (0.7, 0.85, 1.0, 1.2)  # of the divergence of Q4_K_M, on the text for the target
TABLES = ("Q3_K_M", "Q4_K_M", "Q5_K_M")
_IMATRIX_BYTES, _TARGET_BYTES, _OTHER_BYTES = 200_000, 150_000, 40_000


def run(*words: object) -> str:
    """Run `mtp-gguf WORDS`; returns what it printed."""
    command = [sys.executable, "-m", "mtp_gguf", *map(str, words), "--threads", "1"]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")
    return done.stdout + done.stderr


def write_texts(folder: Path, seen: list[str], held_out: list[str]) -> tuple[Path, Path, Path]:
    """Texts for the importance matrix, for the target and for the comparison."""
    texts = {
        "seen.txt": "".join(seen)[:_IMATRIX_BYTES],
        "target.txt": "".join(held_out[::2])[:_TARGET_BYTES],
        "other.txt": "".join(held_out[1::2])[:_OTHER_BYTES],
    }
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    seen_path, target, other = (folder / name for name in texts)
    return seen_path, target, other


def contents(paths: Sequence[Path]) -> list[str]:
    """The files, sorted by path."""
    return [path.read_text(encoding="utf-8", errors="replace") for path in sorted(paths)]


def expected(told: str) -> float:
    """The divergence that `convert` expects."""
    found = re.search(r"expected mean KL divergence of these types: (\S+) nats", told)
    assert found, told
    return float(found[1])


def divergences(files: Sequence[Path], reference: Path, text: Path) -> dict[str, float]:
    """The mean KL divergence of each file, by name."""
    words = ("quality", *files, "--reference", reference, "--text", text, "--no-drafting", "--json")
    told = run(*words)
    found = json.loads(told[told.index("{") : told.rindex("}") + 1])
    return {
        Path(one["name"]).name: one["divergence"]["mean"]["value"] for one in found["candidates"]
    }


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for the files")
    parser.add_argument("--model", type=Path, default=DEMO, help="a checkpoint [the demo model]")
    parser.add_argument("--seen", type=Path, nargs="+", default=[], help="texts that it has read")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="texts that it has not")
    args = parser.parse_args()
    if len({args.model != DEMO, bool(args.seen), bool(args.text)}) > 1:
        parser.error("--model, --seen and --text: expected all or none")
    args.work.mkdir(parents=True, exist_ok=True)
    model = args.work / "model-F16.gguf"
    run("convert", args.model, "--no-mtp", "--quant", "F16", "-o", model, "--overwrite")
    texts = (contents(args.seen), contents(args.text)) if args.seen else corpus.library_sides()
    seen, target, other = write_texts(args.work, *texts)
    imatrix = args.work / "imatrix.gguf"
    run("imatrix", model, "--text", seen, "-o", imatrix, "--overwrite")
    base = ("convert", model, "--no-mtp", "--imatrix", imatrix, "--overwrite")
    choose = (*base, "--target-text", target)
    predicted: dict[str, float] = {}
    files = []
    for table in TABLES:
        usual, chosen = (args.work / f"{table}{end}.gguf" for end in ("", "-chosen"))
        run(*base, "--quant", table, "-o", usual)
        size = usual.stat().st_size // 1000
        told = run(*choose, "--target-size", f"{size}K", "-o", chosen)
        predicted[chosen.name] = expected(told)
        files += [usual, chosen]
    found = divergences(files, model, other)
    kld = divergences([args.work / "Q4_K_M.gguf"], model, target)["Q4_K_M.gguf"]
    smaller = []
    for share in SHARES:
        smaller.append(args.work / f"{share:g}-of-divergence.gguf")
        run(*choose, "--target-kld", f"{share * kld:.3g}", "-o", smaller[-1])
    found |= divergences(smaller, model, other)
    heading("at the size of", "of the table", "of the chosen types", "", "predicted")
    for usual, chosen in zip(files[::2], files[1::2], strict=True):
        a, b = found[usual.name], found[chosen.name]
        told = predicted[chosen.name]
        figures = (f"{a:.5f}", f"{b:.5f}", f"{b / a:.2f} ×", f"{told:.5f} ({told / b:.2f})")
        row(f"{usual.stem}, {usual.stat().st_size / 1e6:.2f} MB", *figures)
    usual = args.work / "Q4_K_M.gguf"
    sizes = np.log([path.stat().st_size / usual.stat().st_size for path in smaller])
    differences = np.log([found[path.name] / found[usual.name] for path in smaller])
    order = np.argsort(differences)
    ratio = np.exp(np.interp(0, differences[order], sizes[order]))
    print()
    heading("of the size of Q4_K_M", "of its divergence")
    for size, difference in zip(np.exp(sizes), np.exp(differences), strict=True):
        row(f"{size:.3f}", f"{difference:.2f}")
    print(f"\nso {ratio:.3f} of its size at its divergence")


if __name__ == "__main__":
    main()

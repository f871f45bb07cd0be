"""Train the demo model: trunk and MTP head together, on the standard library and the primer.

    python train.py --out runs/demo            # some twenty minutes on one core
    python train.py --out runs/demo --resume   # goes on from the last checkpoint
    python train.py --out runs/c --text FILES  # another small model, of these texts alone

The learning rate rises, stays, and falls to zero over the last part of `--steps`. A resumed run may
be given other numbers. See README.md for what follows (polish.py, ship.py).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import corpus
import torch
import vocabulary
from losses import compare, output_loss
from model import FAMILIES, DemoModel, make_config
from tokenizers import Tokenizer
from torch import Tensor

FILES = "files.txt"  # in a run's folder: the texts, one path a line, if they are not Python's
DRAFT_STEPS = 3
LIBRARY_SHARE = 0.25
# Share of each draft step's loss. The head sees half of a batch, its later steps a quarter: here
# it shapes the trunk, its own finish is polish.py's work.
DRAFT_WEIGHTS = (0.3, 0.2, 0.15)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", help="files to learn, instead of Python's")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3_5")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--batch", type=int, default=8, help="sequences per step")
    parser.add_argument("--length", type=int, default=512, help="tokens per sequence")
    parser.add_argument("--vocabulary", type=int, default=4096)
    parser.add_argument("--muon-lr", type=float, default=4e-3)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--fall", type=int, default=500, help="last steps, with a falling rate")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def windows(documents: list[list[int]], end: int, length: int, rng: random.Random) -> list[Tensor]:
    """One epoch: documents shuffled, joined by `end`, cut into shuffled rows of `length` tokens."""
    order = list(documents)
    rng.shuffle(order)
    stream: list[int] = []
    for document in order:
        stream += document
        stream.append(end)
    offset = rng.randrange(length)
    rows = torch.tensor(stream[offset:], dtype=torch.long)
    rows = rows[: len(rows) // length * length].view(-1, length)
    return [rows[i] for i in rng.sample(range(len(rows)), len(rows))]


def batches(
    documents: list[list[int]], end: int, length: int, size: int, seed: int
) -> Iterator[Tensor]:
    """Endless batches (size, length), the same for the same seed."""
    epoch, pending = 0, list[Tensor]()
    while True:
        if len(pending) < size:
            pending += windows(documents, end, length, random.Random(f"{seed}/{epoch}"))
            epoch += 1
        yield torch.stack(pending[:size])
        del pending[:size]


def rate(step: int, steps: int, fall: int) -> float:
    """Factor on the learning rates: 30 steps up, level, then linearly to zero in `fall` steps."""
    return min((step + 1) / 30, 1.0, max(0.0, (steps - step) / fall))


def optimizers(
    model: torch.nn.Module, muon_lr: float, adam_lr: float
) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the blocks, AdamW for embedding, norms, convolutions and gates."""
    matrices, table, rest = [], [], []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if "embed_tokens" in name:
            table.append(parameter)
        elif parameter.dim() == 2 and min(parameter.shape) >= 64:
            matrices.append(parameter)
        else:
            rest.append(parameter)
    groups = [{"params": rest, "weight_decay": 0.0}]
    if table:
        groups.append({"params": table, "weight_decay": 0.05})
    return [
        torch.optim.Muon(
            matrices, lr=muon_lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(groups, lr=adam_lr, betas=(0.9, 0.95), eps=1e-10),
    ]


def draft_losses(
    model: DemoModel, hidden: Tensor, tokens: Tensor, steps: int, sharpness: float
) -> list[Tensor]:
    """Loss of each draft step against the trunk's own distribution at the same position."""
    weight = model.output()
    losses = []
    for step, state in enumerate(model.draft_states(hidden, tokens, steps)):
        teacher = hidden.detach()[:, step + 1 :]
        losses.append(output_loss(state.flatten(0, 1), weight, teacher.flatten(0, 1), sharpness))
    return losses


def losses(model: DemoModel, rows: Tensor) -> tuple[Tensor, list[float]]:
    """Total loss of a batch (B, T + 1), and [trunk, draft 1, draft 2, ...] in nats."""
    tokens = rows[:, :-1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        hidden = model.hidden(tokens)
        few = len(tokens) // 4
        deep = draft_losses(model, hidden[:few], tokens[:few], DRAFT_STEPS, 0.0)
        middle = slice(few, 2 * few)
        shallow = draft_losses(model, hidden[middle], tokens[middle], 1, 0.0)
    trunk = output_loss(hidden.flatten(0, 1), model.output(), rows[:, 1:].flatten())
    drafts = [(deep[0] + shallow[0]) / 2, *deep[1:]]
    total = trunk + sum(w * loss for w, loss in zip(DRAFT_WEIGHTS, drafts, strict=True))
    return total, [trunk.item(), *(loss.item() for loss in drafts)]


@torch.no_grad()
def validate(model: DemoModel, rows: Tensor) -> dict[str, object]:
    """Loss of the trunk, and per draft step how often head and trunk pick the same token."""
    model.eval()
    loss, agreement, probability = 0.0, [0.0] * DRAFT_STEPS, [0.0] * DRAFT_STEPS
    parts = torch.split(rows, 8)
    for part in parts:
        tokens = part[:, :-1]
        hidden = model.hidden(tokens)
        loss += output_loss(
            hidden.flatten(0, 1), model.output(), part[:, 1:].flatten(), dtype=torch.float32
        ).item() / len(parts)
        for step, state in enumerate(model.draft_states(hidden, tokens, DRAFT_STEPS)):
            teacher = hidden[:, step + 1 :]
            same, chance = compare(state.flatten(0, 1), model.output(), teacher.flatten(0, 1))
            agreement[step] += same / len(parts)
            probability[step] += chance / len(parts)
    model.train()
    return {
        "validation_loss": round(loss, 4),
        "agreement": [round(x, 4) for x in agreement],
        "probability": [round(x, 4) for x in probability],
    }


class Log:
    """Lines of JSON, to the console and to a file that a resumed run appends to."""

    def __init__(self, path: Path, resume: bool) -> None:
        self.file = path.open("a" if resume else "w")

    def write(self, **fields: object) -> None:
        for file in (sys.stdout, self.file):
            print(json.dumps(fields), file=file, flush=True)


@dataclass(frozen=True)
class Texts:
    """The corpus as token ids."""

    tokenizer: Tokenizer
    library: list[list[int]]
    primer: list[list[int]]
    held_out: Tensor  # validation rows (n, length), of the library

    def batches(self, end: int, length: int, size: int, seed: int) -> Iterator[Tensor]:
        """Endless batches (size, length) in random order, `LIBRARY_SHARE` from the library."""
        few = round(size * LIBRARY_SHARE)
        generator = torch.Generator().manual_seed(seed)
        library = batches(self.library, end, length, few, seed)
        primer = batches(self.primer, end, length, size - few, seed)
        while True:
            order = torch.randperm(size, generator=generator)
            yield torch.cat((next(library), next(primer)))[order]


def prepare(run: Path, seed: int, size: int, length: int) -> Texts:
    """The corpus of a run under a tokenizer of `size` tokens trained on it; one for each seed."""
    listed = run / FILES
    paths = [Path(line) for line in listed.read_text().splitlines()] if listed.exists() else []
    texts = corpus.of_files(paths) if paths else corpus.build(seed)
    tokenizer = vocabulary.train(texts.library, size)
    end, _ = vocabulary.ends(tokenizer)
    library, simple, held_out = (
        [encoding.ids for encoding in tokenizer.encode_batch(part)]
        for part in (texts.library, texts.primer, texts.validation)
    )
    rows = windows(held_out, end, length, random.Random(seed))
    return Texts(tokenizer, library, simple, torch.stack(rows[:48]))


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "train.log", args.resume)
    if args.text:
        (args.out / FILES).write_text("".join(f"{path.resolve()}\n" for path in args.text))
    texts = prepare(args.out, args.seed, args.vocabulary, args.length + 1)
    end, turn = vocabulary.ends(texts.tokenizer)
    config = make_config(args.family, args.vocabulary, pad=end, eos=[turn, end])
    vocabulary.save(texts.tokenizer, args.out, config.max_position_embeddings)
    model = DemoModel(args.family, config)
    tools = optimizers(model, args.muon_lr, args.adam_lr)
    base = [[group["lr"] for group in tool.param_groups] for tool in tools]
    checkpoint, first = args.out / "checkpoint.pt", 0
    if args.resume:
        state = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(state["model"])
        for tool, saved in zip(tools, state["optimizers"], strict=True):
            tool.load_state_dict(saved)
        first = state["step"]
    log.write(
        event="start",
        python=sys.version.split()[0],
        torch=torch.__version__,
        parameters=sum(p.numel() for p in model.parameters()),
        documents=[len(texts.library), len(texts.primer)],
        tokens=[sum(map(len, texts.library)), sum(map(len, texts.primer))],
        first_step=first,
        **{key: value for key, value in vars(args).items() if key not in ("out", "text")},
    )
    reader = texts.batches(end, args.length + 1, args.batch, args.seed)
    for _ in range(first):
        next(reader)
    began, seen = time.monotonic(), 0
    for step in range(first, args.steps):
        factor = rate(step, args.steps, args.fall)
        for tool, rates in zip(tools, base, strict=True):
            for group, lr in zip(tool.param_groups, rates, strict=True):
                group["lr"] = lr * factor
        rows = next(reader)
        total, parts = losses(model, rows)
        torch.autograd.backward(total)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for tool in tools:
            tool.step()
            tool.zero_grad(set_to_none=True)
        seen += rows[:, 1:].numel()
        done = step + 1
        if done % 20 == 0 or done == first + 3:
            speed = round(seen / (time.monotonic() - began))
            log.write(
                step=done, loss=[round(x, 4) for x in parts], lr=round(factor, 4), tokens_s=speed
            )
        if done % 100 == 0 or done == args.steps:
            log.write(step=done, **validate(model, texts.held_out))
            state = {
                "family": args.family,
                "model": model.state_dict(),
                "optimizers": [tool.state_dict() for tool in tools],
                "step": done,
            }
            torch.save(state, checkpoint.with_suffix(".new"))
            checkpoint.with_suffix(".new").rename(checkpoint)


if __name__ == "__main__":
    main()

"""Finish the MTP head on text that the trunk itself writes; the trunk stays as it is.

    python polish.py --out runs/demo           # after train.py, some ten minutes

What a head drafts is the trunk's own continuation, so that is what it should practise on: text
begun with a piece of the corpus and continued by the trunk, half greedily, half sampled. Every
other batch is the corpus itself, of which there is more. The trunk is rounded to the shipped
precision first, and the result goes to `model.pt`, from where `--resume` goes on with new texts.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import vocabulary
from losses import compare
from model import DemoModel, make_config
from tokenizers import Tokenizer
from torch import Tensor

from train import (
    DRAFT_STEPS,
    LIBRARY_SHARE,
    Log,
    Texts,
    draft_losses,
    optimizers,
    prepare,
    rate,
)

# The later steps see a quarter of the rows; what the first one learns serves them too.
STEP_WEIGHTS = (1.0, 0.3, 0.2)
PROMPT_LENGTHS = (4, 12, 24, 40)
TEMPERATURE = 0.8
# Sampling leaves out tokens below this share of the best one's probability.
MIN_P = 0.05


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--texts", type=int, default=768, help="texts the trunk writes")
    parser.add_argument("--writers", type=int, default=96, help="texts written at once")
    parser.add_argument("--length", type=int, default=192, help="tokens per text, prompt included")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch", type=int, default=4096, help="tokens per step")
    parser.add_argument("--muon-lr", type=float, default=3e-3)
    parser.add_argument("--adam-lr", type=float, default=2e-3)
    parser.add_argument(
        "--sharpness", type=float, default=0.2, help="share of the best token alone"
    )
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


@torch.no_grad()
def round_trunk(model: DemoModel) -> None:
    """Give the trunk the values that a BF16 file holds (`A_log` and gated norms stay F32)."""
    for name, parameter in model.trunk.named_parameters():
        if not stays_f32(name):
            parameter.copy_(parameter.bfloat16().float())


def stays_f32(name: str) -> bool:
    """Whether the family stores this tensor in F32 within a BF16 checkpoint."""
    return name.endswith(("linear_attn.A_log", "linear_attn.norm.weight"))


@torch.no_grad()
def write(model: DemoModel, prompts: Tensor, length: int, generator: torch.Generator) -> Tensor:
    """Continue `prompts` (n, p) to (n, length): even rows greedily, odd rows sampled."""
    tokens, cache = prompts, None
    feed = prompts
    while tokens.shape[1] < length:
        result = model.trunk(
            input_ids=feed, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        cache, scores = result.past_key_values, result.logits[:, -1]
        chances = torch.softmax(scores / TEMPERATURE, dim=-1)
        chances[chances < MIN_P * chances.amax(dim=-1, keepdim=True)] = 0
        feed = torch.multinomial(chances, 1, generator=generator)
        feed[::2] = scores[::2].argmax(dim=-1, keepdim=True)
        tokens = torch.cat((tokens, feed), dim=1)
    return tokens


def beginnings(
    texts: Texts, chat_start: int, count: int, length: int, rng: random.Random
) -> Tensor:
    """`count` prompts of `length` tokens: chats from their start, other texts from anywhere."""
    rows = []
    while len(rows) < count:
        of_library = rng.random() < LIBRARY_SHARE
        document = rng.choice(texts.library if of_library else texts.primer)
        if len(document) < length:
            continue
        start = 0 if document[0] == chat_start else rng.randrange(len(document) - length + 1)
        rows.append(document[start : start + length])
    return torch.tensor(rows)


@torch.no_grad()
def agreement(model: DemoModel, rows: Tensor) -> dict[str, object]:
    """How often head and trunk agree on the trunk's own text, greedy and sampled rows apart."""
    found: dict[str, object] = {}
    for kind, part in (("greedy", rows[::2]), ("sampled", rows[1::2])):
        hidden = model.hidden(part)
        pairs = enumerate(model.draft_states(hidden, part, DRAFT_STEPS))
        found[kind] = [
            round(compare(s.flatten(0, 1), model.output(), hidden[:, i + 1 :].flatten(0, 1))[0], 4)
            for i, s in pairs
        ]
    return found


def sampler(texts: Tensor, count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless batches of `count` rows of `texts`."""
    while True:
        yield texts[torch.randint(len(texts), (count,), generator=generator)]


def losses(model: DemoModel, rows: Tensor, sharpness: float) -> tuple[Tensor, list[Tensor]]:
    """Total loss of a batch, and [draft 1, draft 2, ...] in nats."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        with torch.no_grad():
            hidden = model.hidden(rows)
        few = len(rows) // 4
        deep = draft_losses(model, hidden[:few], rows[:few], DRAFT_STEPS, sharpness)
        rest = draft_losses(model, hidden[few:], rows[few:], 1, sharpness)
    parts = [deep[0] / 4 + rest[0] * 3 / 4, *deep[1:]]
    total = torch.stack([w * part for w, part in zip(STEP_WEIGHTS, parts, strict=True)]).sum()
    return total, parts


def main() -> None:
    args = parse()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    log = Log(args.out / "polish.log", args.resume)
    saved = Tokenizer.from_file(str(args.out / "tokenizer.json"))
    texts = prepare(args.out, args.seed, saved.get_vocab_size(), args.length)
    tokenizer = texts.tokenizer
    end, turn = vocabulary.ends(tokenizer)
    state = torch.load(args.out / "checkpoint.pt", weights_only=True)
    family, size = state["family"], tokenizer.get_vocab_size()
    model = DemoModel(family, make_config(family, size, pad=end, eos=[turn, end]))
    model.load_state_dict(
        torch.load(args.out / "model.pt", weights_only=True) if args.resume else state["model"]
    )
    model.trunk.requires_grad_(False)
    round_trunk(model)
    log.write(
        event="start",
        trained_steps=state["step"],
        **{key: value for key, value in vars(args).items() if key != "out"},
    )

    rng = random.Random(f"{args.seed}/{args.resume}")
    generator = torch.Generator().manual_seed(args.seed + args.resume)
    chat_start = vocabulary.token_id(tokenizer, vocabulary.TURN_START)
    written, began = list[Tensor](), time.monotonic()
    while sum(map(len, written)) < args.texts:
        length = PROMPT_LENGTHS[len(written) % len(PROMPT_LENGTHS)]
        prompts = beginnings(texts, chat_start, args.writers, length, rng)
        written.append(write(model, prompts, args.length, generator))
        log.write(texts=sum(map(len, written)), seconds=round(time.monotonic() - began))
    held_out, own = written[-1][:48], torch.cat([*written[:-1], written[-1][48:]])
    torch.save(own, args.out / "texts.pt")
    log.write(step=0, sample=tokenizer.decode(held_out[0].tolist(), skip_special_tokens=False))
    log.write(step=0, **agreement(model, held_out))

    practice = sampler(own, args.batch // args.length, generator)
    window = 512
    read = texts.batches(end, window, args.batch // window, args.seed + 1)
    tools = optimizers(model, args.muon_lr, args.adam_lr)
    base = [[group["lr"] for group in tool.param_groups] for tool in tools]
    began, seen = time.monotonic(), 0
    for step in range(args.steps):
        factor = rate(step, args.steps, args.steps * 4 // 5)
        for tool, rates in zip(tools, base, strict=True):
            for group, lr in zip(tool.param_groups, rates, strict=True):
                group["lr"] = lr * factor
        rows = next(practice) if step % 2 else next(read)
        total, parts = losses(model, rows, args.sharpness)
        torch.autograd.backward(total)
        for tool in tools:
            tool.step()
            tool.zero_grad(set_to_none=True)
        seen += rows.numel()
        if (step + 1) % 20 == 0:
            log.write(
                step=step + 1,
                loss=[round(x.item(), 4) for x in parts],
                lr=round(factor, 4),
                tokens_s=round(seen / (time.monotonic() - began)),
            )
        if (step + 1) % 100 == 0 or step + 1 == args.steps:
            log.write(step=step + 1, **agreement(model, held_out))
            torch.save(model.state_dict(), args.out / "model.pt")


if __name__ == "__main__":
    main()

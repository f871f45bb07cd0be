"""How fast the trunk's states are collected, and what a head has learned after a fixed time.

    python benchmarks/train_speed.py MODEL --work FOLDER --text FILES [--tokens N] [--seconds N]

MODEL may be a carrier (`mtp-gguf carry`); its head is trained from random weights. Prints a line of
JSON for each of: collecting texts, collecting answers (to "Explain this:" and a line of a text),
and training on the texts. To compare two versions, run it with the Python of each one's
environment, in turns, and give each its own FOLDER.
"""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import options

from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.train.block import fresh_weights
from mtp_gguf.train.collect import CollectSettings, Texts, collect
from mtp_gguf.train.config import BlockConfig
from mtp_gguf.train.dataset import open_data, split_data
from mtp_gguf.train.trainer import Trainer, TrainSettings, precision_of, read_tables

PROMPTS = 200
VOCABULARY = 8192


def collected(model: Path, folder: Path, texts: Texts, tokens: int, threads: int) -> float:
    """Tokens per second, without the time to load the model."""
    shutil.rmtree(folder, ignore_errors=True)
    began: list[float] = []

    def progress(_: int) -> None:
        began.append(time.monotonic())

    settings = CollectSettings(tokens=tokens, length=256 if texts.prompts else 512)
    found = collect(model, folder, texts, settings, threads=threads, progress=progress)
    return found / (time.monotonic() - began[0])


def learned(path: Path, folder: Path, seconds: float) -> dict[str, Any]:
    """What a head learns from the states in a folder: held-out acceptance by position."""
    with open_model(path) as model:
        configs = BlockConfig.all_of(model.head)
        samples = open_data(folder, configs[0].width)
        train, held_out = split_data(samples)
        counts = np.bincount(np.concatenate([sample.tokens for sample in train]))
        ids = np.argsort(-counts, kind="stable")[:VOCABULARY].astype(np.int64)
        settings = TrainSettings(
            seconds=seconds, epochs=100, evaluations=6, precision=precision_of("cpu")
        )
        tables = read_tables(model, samples, ids)
        weights = fresh_weights(model, seed=1)
        made = Trainer(configs, weights, tables, train, held_out, settings, folder).run()
    return {
        "tokens_per_second": made.tokens / made.seconds,
        "acceptance": made.after.rates,
        "held_out": made.after.drafted[0],
        "stopped": made.stopped,
    }


def main() -> None:
    parser = options(__doc__, {"--tokens": 40_000, "--seconds": 100.0, "--threads": 2})
    parser.add_argument("model", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--text", type=Path, nargs="+", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    texts = tuple(path.read_text(encoding="utf-8") for path in arguments.text)
    lines = [line for text in texts for line in text.splitlines() if len(line) > 40]
    chosen = lines[:: max(1, len(lines) // PROMPTS)][:PROMPTS]
    prompts = tuple(f"Explain this:\n{line}" for line in chosen)
    whole = (arguments.model, arguments.work / "texts", Texts(texts))
    answers = (arguments.model, arguments.work / "answers", Texts(prompts=prompts))
    for job, tokens in ((whole, arguments.tokens), (answers, arguments.tokens // 4)):
        rate = collected(*job, tokens, arguments.threads)
        print(json.dumps({"collect": job[1].name, "tokens_per_second": rate}), flush=True)
    print(json.dumps(learned(arguments.model, whole[1], arguments.seconds)), flush=True)


if __name__ == "__main__":
    main()

"""Trains the demo model's head on a few hundred tokens of its own answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.train.block import Weights
from mtp_gguf.train.collect import CollectSettings, Texts, collect
from mtp_gguf.train.config import BlockConfig
from mtp_gguf.train.dataset import Sample, open_data, split_data
from mtp_gguf.train.trainer import Trainer, TrainSettings, read_tables

# The trunk's own answers to these are the training data, which no edit of a file changes.
PROMPTS = tuple(
    f'{start}\n    """'
    for start in (
        "def is_prime(n):",
        "def read_lines(path):",
        "def add(self, name, value):",
        "def main(args=None):",
        "def get_size(data):",
        "def join(first, second):",
        "def parse(text):",
        "def close(self):",
        "def sort(items, key=None):",
        "def write(self, data):",
        "def find(self, name):",
        "def copy(source, target):",
        "class Reader:",
        "class Node(object):",
        "class Queue:",
        "class Error(Exception):",
        "def test_list(self):",
        "def split(path):",
        "def __init__(self, size):",
        "def update(self, other):",
        "def encode(text):",
        "def count(words):",
        "def load(file):",
        "def run(command):",
    )
)
SETTINGS = TrainSettings(
    steps=3,
    epochs=2,
    batch=256,
    rate=4e-3,
    evaluations=4,
    evaluation_share=1.0,
    held_out_tokens=400,
)


def answers(demo: Path, folder: Path, tokens: int, each: int) -> list[Sample]:
    """The trunk's answers, `each` to every prompt, the first of them greedy."""
    settings = CollectSettings(length=64, tokens=tokens, answers=each, chat=False)
    collect(demo, folder, Texts(prompts=PROMPTS), settings, threads=1)
    return open_data(folder, 256)


def damaged(weights: Weights) -> Weights:
    """A head that has forgotten its projection, but little else."""
    projection = weights["nextn.eh_proj.weight"]
    noise = np.random.default_rng(5).standard_normal(projection.shape).astype(np.float32)
    changed = (0.3 * projection + 0.06 * noise).astype(np.float32)
    return weights | {"nextn.eh_proj.weight": changed}


def trainer(
    demo: Path,
    samples: list[Sample],
    weights: Weights,
    folder: Path,
    *,
    whole: bool = False,
    without: int | None = None,
    **changes: object,
) -> Trainer:
    """Its draft vocabulary is that of the samples, but one token, or its whole vocabulary."""
    ids = np.unique(np.concatenate([sample.tokens for sample in samples])).astype(np.int64)
    ids = ids[ids != without]
    with open_model(demo) as model:
        configs = BlockConfig.all_of(model.head)
        if whole:
            ids = np.arange(model.vocabulary_size or 0)
        tables = read_tables(model, samples, ids)
    train, held_out = split_data(samples)
    settings = replace(SETTINGS, **changes)  # type: ignore[arg-type]
    return Trainer(configs, weights, tables, train, held_out, settings, folder)

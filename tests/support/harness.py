"""Runs lm-evaluation-harness on a tiny task of multiple choice."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from support.commands import run_python
from support.models import DEMO

QUESTIONS = [
    {"q": "def add(a, b):\n    return", "choices": ["a + b", "a - b", "open(a)"]},
    {"q": "import os\nprint(os.path.", "choices": ["join('a', 'b'))", "sky, blue", "exists('a'))"]},
    {"q": "for i in range(10):\n    ", "choices": ["print(i)", "import, a", "€ and ß"]},
]
TASK = """
task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
RUN = """
import json, sys, lm_eval
from lm_eval.tasks import TaskManager
found = lm_eval.simple_evaluate(
    model=sys.argv[1], model_args=sys.argv[2], tasks=["tiny"], batch_size=int(sys.argv[4]),
    log_samples=True, bootstrap_iters=0,
    task_manager=TaskManager(include_path=sys.argv[3], include_defaults=False),
)
print(json.dumps([sample["filtered_resps"] for sample in found["samples"]["tiny"]]))
"""


def numbers(folder: Path, model: str, arguments: str, batch: int = 1) -> list[Any]:
    """For each question the log-likelihoods of its choices, and whether each is greedy."""
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (folder / "tiny.yaml").write_text(TASK.replace("DATA", str(data)))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    said = run_python(
        RUN, model, arguments, folder, batch, cwd=folder, timeout=300, env=environment
    )
    found: list[Any] = json.loads(said.splitlines()[-1])
    return found


def check_completions(folder: Path, port: int, batch: int, **options: object) -> None:
    """Compare the server at `port` with the harness's own `hf` backend, on the demo model."""
    given = {
        "model": "demo",
        "base_url": f"http://127.0.0.1:{port}/v1/completions",
        "tokenizer": DEMO,
        "tokenizer_backend": "huggingface",
        **options,
    }
    arguments = ",".join(f"{name}={value}" for name, value in given.items())
    ours = numbers(folder, "local-completions", arguments, batch)
    theirs = numbers(folder, "hf", f"pretrained={DEMO},dtype=float32,device=cpu")
    assert len(ours) == len(QUESTIONS)
    for got, want in zip(ours, theirs, strict=True):
        for (ours_one, greedy), (theirs_one, theirs_greedy) in zip(got, want, strict=True):
            assert ours_one == pytest.approx(theirs_one, abs=0.01)
            assert greedy == theirs_greedy

"""Runs lm-evaluation-harness on tiny tasks: one of multiple choice, and one of answers in chats."""

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
_DATA = """
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
doc_to_text: "{{q}}"
"""
TASKS = {
    "choices": """
task: choices
output_type: multiple_choice
doc_to_choice: "{{choices}}"
doc_to_target: 0
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
""",
    "answers": """
task: answers
output_type: generate_until
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 16, do_sample: false, temperature: 0}
metric_list: [{metric: exact_match, aggregation: mean, higher_is_better: true}]
""",
}
HF = f"pretrained={DEMO},dtype=float32,device=cpu"
RUN = """
import json, sys, lm_eval
from lm_eval.tasks import TaskManager
found = lm_eval.simple_evaluate(
    model=sys.argv[1], model_args=sys.argv[2], tasks=[task := sys.argv[5]],
    batch_size=int(sys.argv[4]), log_samples=True, bootstrap_iters=0,
    apply_chat_template=task == "answers",
    task_manager=TaskManager(include_path=sys.argv[3], include_defaults=False),
)
print(json.dumps([sample["filtered_resps"] for sample in found["samples"][task]]))
"""


def results(
    folder: Path, model: str, arguments: str, batch: int = 1, task: str = "choices"
) -> list[Any]:
    """For each question what the task is about.

    choices: the log-likelihood of each choice, and whether it is greedy; answers: the answer.
    """
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (folder / "task.yaml").write_text(TASKS[task] + _DATA.replace("DATA", str(data)))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")}
    said = run_python(
        RUN, model, arguments, folder, batch, task, cwd=folder, timeout=300, env=environment
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
    ours = results(folder, "local-completions", arguments, batch)
    theirs = results(folder, "hf", HF)
    assert len(ours) == len(QUESTIONS)
    for got, want in zip(ours, theirs, strict=True):
        for (ours_one, greedy), (theirs_one, theirs_greedy) in zip(got, want, strict=True):
            assert ours_one == pytest.approx(theirs_one, abs=0.01)
            assert greedy == theirs_greedy


def check_chats(folder: Path, port: int) -> None:
    """Compare answers of the server at `port` to chats with those of the `hf` backend."""
    arguments = f"model=demo,base_url=http://127.0.0.1:{port}/v1/chat/completions"
    ours = results(folder, "local-chat-completions", arguments, task="answers")
    assert all(answer for (answer,) in ours)
    assert ours == results(folder, "hf", HF, task="answers")

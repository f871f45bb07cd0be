"""lm-evaluation-harness over llama_cpp's server with MTPLlama: the numbers of its `hf` backend."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from support.commands import run_python
from support.models import DEMO, Models
from support.python_server import python_server

pytestmark = [
    pytest.mark.ecosystem,
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs the `ecosystem` extra"),
]

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
    model=sys.argv[1], model_args=sys.argv[2], tasks=["tiny"], batch_size=1, log_samples=True,
    task_manager=TaskManager(include_path=sys.argv[3], include_defaults=False), bootstrap_iters=0,
)
print(json.dumps([sample["filtered_resps"] for sample in found["samples"]["tiny"]]))
"""


@pytest.fixture(scope="module")
def port(models: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with python_server(models.gguf("demo", "F32", "F32"), tmp_path_factory.mktemp("served")) as at:
        yield at


def test_local_completions_are_the_numbers_of_transformers(port: int, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (tmp_path / "tiny.yaml").write_text(TASK.replace("DATA", str(data)))
    ways = {
        "hf": f"pretrained={DEMO},dtype=float32,device=cpu",
        "local-completions": (
            f"model=demo,base_url=http://127.0.0.1:{port}/v1/completions,tokenizer={DEMO},"
            "tokenizer_backend=huggingface,tokenized_requests=False"
        ),
    }
    offline = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf")}
    theirs, ours = (
        json.loads(
            run_python(
                RUN, name, arguments, tmp_path, cwd=tmp_path, timeout=300, env=offline
            ).splitlines()[-1]
        )
        for name, arguments in ways.items()
    )
    assert len(ours) == len(QUESTIONS)
    for got, want in zip(ours, theirs, strict=True):
        for (ours_one, greedy), (theirs_one, theirs_greedy) in zip(got, want, strict=True):
            assert ours_one == pytest.approx(theirs_one, abs=0.01)
            assert greedy == theirs_greedy

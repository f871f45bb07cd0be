"""inspect-ai over the patched llama-server: its scores and values are those of MTPLlama.

It wants openai 3.4 or newer, which LlamaIndex does not take, so it has an environment of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import venv
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native import MTPLlama
from mtp_gguf.native.runtime import llama_cpp
from support.models import Models
from support.real_server import Server

pytestmark = [pytest.mark.server, pytest.mark.ecosystem]

PACKAGES = ("inspect-ai>=0.3.285,<0.4", "openai>=3.4,<4")
LETTER = 'root ::= "ANSWER: " [AB]'
RUN = """
import json, sys
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import choice, match
from inspect_ai.solver import generate, multiple_choice

url, folder, grammar, right = sys.argv[1:]
config = GenerateConfig(temperature=0, max_tokens=12, logprobs=True, top_logprobs=2)
model = get_model("openai-api/mtp/default", base_url=url, config=config)
questions = [Sample("Is 7 a prime number?", choices=["yes", "no"], target=letter)
             for letter in "AB"]
tasks = [
    Task(questions, solver=multiple_choice(), scorer=choice(),
         config=GenerateConfig(extra_body={"grammar": grammar})),
    Task([Sample("Write a loop.", target=target) for target in (right, "nothing")],
         solver=generate(), scorer=match(location="begin")),
]
for log in eval(tasks, model=model, display="none", log_dir=folder):
    assert log.status == "success", log.error
    print(json.dumps({
        "accuracy": log.results.scores[0].metrics["accuracy"].value,
        "samples": [{
            "messages": [{"role": m.role, "content": m.text} for m in sample.messages[:-1]],
            "text": sample.output.completion,
            "logprobs": [[token.token, token.logprob, [top.token for top in token.top_logprobs]]
                         for token in sample.output.choices[0].logprobs.content],
            "target": sample.target,
            "score": [score.value for score in sample.scores.values()],
        } for sample in log.samples],
    }))
"""


def answer(llm: MTPLlama, messages: list[Any], grammar: str | None) -> tuple[str, list[Any]]:
    """What MTPLlama says, and its log-probabilities."""
    parsed = grammar and llama_cpp.llama_grammar.LlamaGrammar.from_string(grammar, verbose=False)
    choice: Any = llm.create_chat_completion(
        messages, temperature=0, max_tokens=12, logprobs=True, top_logprobs=2, grammar=parsed
    )["choices"][0]
    values = [
        [token["token"], token["logprob"], [top["token"] for top in token["top_logprobs"]]]
        for token in choice["logprobs"]["content"]
    ]
    return choice["message"]["content"], values


def test_scores_and_values(server: Server, models: Models, tmp_path: Path) -> None:
    model = models.gguf("demo", "F32", "F32")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", *PACKAGES], check=True, timeout=600)
    with closing(MTPLlama(str(model), n_ctx=2048, n_threads=1, n_threads_batch=1)) as llm:
        right, _ = answer(llm, [{"role": "user", "content": "Write a loop."}], None)
        with server.running(model, options=["--depth", 3]) as client:
            url = f"http://127.0.0.1:{client.port}/v1"
            done = subprocess.run(
                [python, "-c", RUN, url, tmp_path / "logs", LETTER, right],
                cwd=tmp_path,
                capture_output=True,
                text=True,
                check=False,
                env={**os.environ, "MTP_API_KEY": "none"},
                timeout=300,
            )
        assert done.returncode == 0, done.stdout + done.stderr
        logs = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert [log["accuracy"] for log in logs] == [0.5, 0.5]
        for log, grammar in zip(logs, (LETTER, None), strict=True):
            for sample in log["samples"]:
                text, values = answer(llm, sample["messages"], grammar)
                assert sample["text"] == text
                is_right = text.removeprefix("ANSWER: ").startswith(sample["target"])
                assert sample["score"] == ["C" if is_right else "I"]
                for got, want in zip(sample["logprobs"], values, strict=True):
                    assert got[::2] == want[::2]
                    assert got[1] == pytest.approx(want[1], abs=1e-3)

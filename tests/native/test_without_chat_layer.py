"""Chats in an installation without libmtp_chat, as on Windows: text, and refusals of the rest."""

from __future__ import annotations

import json
from pathlib import Path

from support.commands import run_python
from support.models import Models

# The library is not installed: its file is not there.
PROGRAM = """
import json, sys
from pathlib import Path
from mtp_gguf.native.chat import chat_layer
found = chat_layer.library_file
chat_layer.library_file = lambda name: Path(f"{found(name)}.missing")
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.native import MTPLlama

user = {"role": "user", "content": "hi"}
tool = {"type": "function", "function": {"name": "f"}}
options = {"max_tokens": 6, "temperature": 0}
refused = {}
with MTPLlama(sys.argv[1], n_ctx=512, n_threads=1, n_threads_batch=1, depth=3) as llm:
    answer = llm.create_chat_completion([user], **options)["choices"][0]["message"]["content"]
    parts = [{**user, "content": [{"type": "text", "text": "hi"}]}]
    same = llm.create_chat_completion(parts, **options)["choices"][0]["message"]["content"]
    chunks = llm.create_chat_completion([user], stream=True, **options)
    deltas = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert answer == same == deltas
    for name, value in {
        "tools": [tool], "response_format": {"type": "json_object"}, "truncation": "auto",
        "reasoning_effort": "low", "reasoning_format": "none", "reasoning_budget_tokens": 0,
        "continue_final_message": True,
    }.items():
        try:
            llm.create_chat_completion([user], **{name: value}, **options)
        except RequestError as error:
            refused[name] = str(error)
    for messages in ([], "hi", [{"role": "user", "content": 5}]):
        try:
            llm.create_chat_completion(messages, **options)
        except RequestError as error:
            refused[f"messages={messages}"] = str(error)
print(json.dumps([answer, refused]))
"""


def test_text_is_answered_and_the_rest_refused(models: Models, tmp_path: Path) -> None:
    model = models.gguf("demo", "F32", "F32")
    answer, refused = json.loads(run_python(PROGRAM, model, cwd=tmp_path))
    assert answer
    assert len(refused) == 10
    for name, sentence in refused.items():
        if name.isidentifier():
            assert sentence.startswith(f"{name}: expected none, because this installation lacks")
        else:
            assert sentence.startswith("messages: expected")

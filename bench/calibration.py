"""Texts to calibrate a model with: the built-in ones, the user's, or the model's own answers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.profile import identify

from .generation import generate
from .model import BenchModel, Setting

BUILT_IN = "mtp-gguf's calibration text"
_ANSWER_DEPTH = 3


def built_in_text(write_chat: Callable[[str], str] | None) -> str:
    """The built-in text: several languages, code, and conversations.

    write_chat: renders a user's message with the model's chat template; None if it has none.
    """
    folder = resources.files(__package__) / "calibration"
    chat = (folder / "chat.txt").read_text(encoding="utf-8")
    conversations = []
    for part in chat.split("\n===\n"):
        question, answer = part.strip().split("\n---\n")
        asked = write_chat(question) if write_chat else f"User: {question}\nAssistant: "
        conversations.append(f"{asked}{answer}\n")
    return "\n".join([(folder / "text.txt").read_text(encoding="utf-8"), *conversations])


def answers(
    model: BenchModel,
    prompts: Sequence[Sequence[int]],
    length: int,
    state: Path,
    *,
    drafts: bool,
    progress: Callable[[int], None] = lambda _: None,
) -> list[int]:
    """The prompts, each followed by the model's greedy answer of up to `length` tokens.

    state: a file that has the answers of an interrupted call with the same arguments, and gets
    each new one; the caller removes it. drafts: the model has a head to draft with. progress:
    called with the number of prompts that are answered.
    """
    identity = identify(model.path)
    words = repr((identity.fingerprint, identity.size, prompts, length))
    key = hashlib.sha256(words.encode()).hexdigest()
    found: list[list[int]] = _read_state(state, key)
    depth = _ANSWER_DEPTH if drafts else 0
    with model.session(Setting(max_depth=depth)) as session:
        for prompt in prompts[len(found) :]:
            if not prompt or len(prompt) + length > model.n_ctx:
                raise RequestError(
                    f"--prompt-file: expected prompts of 1 to {model.n_ctx - length} tokens, found "
                    f"one of {len(prompt)}"
                )
            answer = generate(model, session, prompt, length, depth).tokens
            session.remove(0)
            found.append(list(answer[:length]))
            state.write_text(json.dumps({"key": key, "answers": found}), encoding="utf-8")
            progress(len(found))
    return [t for pair in zip(prompts, found, strict=True) for part in pair for t in part]


def _read_state(state: Path, key: str) -> list[list[int]]:
    try:
        fields = parse_json(state.read_text(encoding="utf-8"))
        same = fields["key"] == key
        return [[int(token) for token in answer] for answer in fields["answers"]] if same else []
    except (OSError, ValueError, TypeError, KeyError):
        return []

"""Compares answers of llama-server and MTPLlama field by field."""

from __future__ import annotations

import json
import re
import urllib.error
from collections.abc import Iterable, Iterator
from http import HTTPStatus
from typing import Any

import pytest

from mtp_gguf.native import MTPLlama
from support.models import ROOT
from support.real_server import chunks_of, opened

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
CLOSE = 1e-3  # of log-probabilities; rounding depends on the size of the batch
# Differences of most answers, as the first cells of the table in docs/server.md.
NO_VALUE = "fields without a value, such as `logprobs`"
MEASURED = "`timings`, `system_fingerprint`, `usage.prompt_tokens_details`"
COUNT = "`usage.completion_tokens`"
CONTENT = "`content` in the `logprobs` of completions"
OFFSET = "`text_offset` without `echo`"
EVERYWHERE = (NO_VALUE, MEASURED, COUNT, CONTENT, OFFSET)
# Of each answer its own.
_OWN = re.compile(r"id|created|choices\.\d+\.message\.tool_calls\.\d+\.id")
_MEASURED = re.compile(r"timings\..*|system_fingerprint|usage\.prompt_tokens_details\..*")
_MISSING = "(missing)"


def fields(answer: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The values of an answer by their places, such as choices.0.message.content."""
    if answer and isinstance(answer, dict | list):
        items = answer.items() if isinstance(answer, dict) else enumerate(answer)
        for key, value in items:
            yield from fields(value, f"{place}.{key}" if place else str(key))
    else:
        yield place, answer


def differing(found: Any, wanted: Any) -> dict[str, tuple[Any, Any]]:
    """The fields of two answers that differ."""
    one, other = dict(fields(found)), dict(fields(wanted))
    pairs = {key: (one.get(key, _MISSING), other.get(key, _MISSING)) for key in {**one, **other}}
    return {key: pair for key, pair in pairs.items() if not _is_same(key, *pair)}


def _is_same(place: str, found: Any, wanted: Any) -> bool:
    if _OWN.fullmatch(place):
        return type(found) is type(wanted)
    if isinstance(found, float) or isinstance(wanted, float):
        return found == pytest.approx(wanted, abs=CLOSE)
    return type(found) is type(wanted) and bool(found == wanted)


def differing_by_row(
    found: dict[str, Any], wanted: dict[str, Any], body: dict[str, Any]
) -> dict[str, dict[str, tuple[Any, Any]]]:
    """The fields of the server's and Python's answers that differ, by the row that says why.

    "" has those that no row of EVERYWHERE is about. `error` stands for all of an answer if one
    side refuses what the other one answers.
    """
    if "error" in found or "error" in wanted:
        both = found.get("error"), wanted.get("error")
        return {} if both[0] == both[1] else {"": {"error": both}}
    ended = wanted["choices"][0]["finish_reason"] == "stop"
    rows: dict[str, dict[str, tuple[Any, Any]]] = {}
    for place, (ours, theirs) in differing(found, wanted).items():
        row = ""
        if ours in (None, _MISSING) and theirs in (None, _MISSING):
            row = NO_VALUE
        elif _MEASURED.fullmatch(place) and theirs == _MISSING:
            row = MEASURED
        elif place in ("usage.completion_tokens", "usage.total_tokens") and ended:
            row = COUNT if ours == theirs + 1 else ""
        elif "prompt" in body and ".logprobs.content" in place and theirs == _MISSING:
            row = CONTENT
        elif ".text_offset." in place and _MISSING not in (ours, theirs) and not body.get("echo"):
            row = OFFSET if ours + len(body["prompt"]) == theirs else ""
        rows.setdefault(row, {})[place] = (ours, theirs)
    return rows


def ask_server(port: int, body: dict[str, Any]) -> dict[str, Any]:
    """The server's answer, put together if it is a stream, or its sentence as `error`."""
    try:
        with opened(port, COMPLETIONS if "prompt" in body else CHATS, body) as found:
            if body.get("stream"):
                return joined(chunks_of(found))
            answer: dict[str, Any] = json.load(found)
            return answer
    except urllib.error.HTTPError as error:
        with error:
            sentence = json.load(error)["error"]["message"]
        if error.code != HTTPStatus.BAD_REQUEST:
            raise
        return {"error": sentence}


def ask_python(llm: MTPLlama, body: dict[str, Any]) -> dict[str, Any]:
    """Python's answer as JSON, put together if it is a stream, or its sentence as `error`."""
    method: Any = llm.create_completion if "prompt" in body else llm.create_chat_completion
    try:
        found = method(**body)
    except (RuntimeError, ValueError, TypeError) as error:
        return {"error": str(error)}
    answer = joined(found) if body.get("stream") else found
    copy: dict[str, Any] = json.loads(json.dumps(answer))
    return copy


def joined(chunks: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The answer that a client puts together of a stream."""
    whole: dict[str, Any] = {}
    usage: dict[str, Any] = {}
    for chunk in chunks:
        usage |= chunk.get("usage") or {}
        for choice in chunk["choices"]:
            rest = dict(choice)
            _extend(whole.setdefault("logprobs", {}), rest.pop("logprobs", None) or {})
            if "text" in rest:
                whole["text"] = whole.get("text", "") + rest.pop("text")
            else:
                _add_delta(whole.setdefault("message", {}), rest.pop("delta"))
            whole |= rest
    choice = {key: value for key, value in whole.items() if value != {}}
    return {"choices": [choice], **({"usage": usage} if usage else {})}


def _extend(lists: dict[str, Any], more: dict[str, Any]) -> None:
    for name, values in more.items():
        if values is not None:
            lists.setdefault(name, []).extend(values)


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for key, value in delta.items():
        if key == "tool_calls":
            calls = message.setdefault(key, [])
            for call in value:
                index = call["index"]
                calls.extend({"function": {}} for _ in range(len(calls), index + 1))
                function = calls[index]["function"]
                for name, text in call["function"].items():
                    function[name] = function.get(name, "") + text
                calls[index] |= {k: v for k, v in call.items() if k not in ("index", "function")}
        elif key == "role":
            message[key] = value
        elif value is not None:
            message[key] = message.get(key, "") + value


def rows_of_the_docs() -> list[str]:
    """The first cells of the table of differences in docs/server.md."""
    page = (ROOT / "docs" / "server.md").read_text(encoding="utf-8")
    table = page.partition("with these differences:\n\n")[2].partition("\n\n")[0]
    return [line.split(" | ")[0].removeprefix("| ") for line in table.splitlines()[2:]]

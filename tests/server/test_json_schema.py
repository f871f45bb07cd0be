"""JSON schemas over HTTP: the answers of the patched llama-server are JSON of the schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.native import MTPLlama, schema_grammar
from support.models import Models
from support.real_server import DEPTH, Server, post
from support.schemas import SCHEMAS, Acceptance, check

pytestmark = pytest.mark.server

SEEDS = 40  # of each schema
OWN_SEEDS = 5  # with our grammars, which tests/native tests in full


def chat(port: int, **options: Any) -> dict[str, Any]:
    """The choice that a chat at a high temperature answers."""
    messages = [{"role": "user", "content": "Write JSON."}]
    body = {"messages": messages, "temperature": 1.2, "max_tokens": 250, **options}
    _, found = post(port, "/v1/chat/completions", body)
    choice: dict[str, Any] = found["choices"][0]
    return choice


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    return models.gguf("demo", "Q4_K_M", "F16")


@pytest.fixture(scope="module")
def port(server: Server, model: Path) -> Iterator[int]:
    with server.running(model, options=["--spec-draft-n-max", DEPTH]) as client:
        yield client.port


@pytest.fixture(scope="module")
def accepts(model: Path) -> Iterator[Acceptance]:
    with MTPLlama(str(model), n_ctx=64, depth=0) as llm:
        yield Acceptance(llm)


def check_texts(port: int, schema: Any, seeds: range, *options: dict[str, Any]) -> None:
    """Answers are JSON of the schema, with options that alternate; few are cut by max_tokens."""
    choices = [chat(port, seed=seed, **options[seed % len(options)]) for seed in seeds]
    texts = [c["message"]["content"] for c in choices if c["finish_reason"] == "stop"]
    for text in texts:
        check(text, schema)
    assert len(texts) > 0.9 * len(choices)


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(SCHEMAS)), ids=SCHEMAS)
def test_response_format(port: int, number: int) -> None:
    schema = [*SCHEMAS.values()][number]
    forms: list[Any] = [
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        {"type": "json_object", "schema": schema},
    ]
    seeds = range(SEEDS * number, SEEDS * (number + 1))
    check_texts(port, schema, seeds, *({"response_format": form} for form in forms))


@pytest.mark.parametrize("number", range(len(SCHEMAS)), ids=SCHEMAS)
def test_our_grammars(port: int, number: int) -> None:
    """A server without our patches takes them, too."""
    schema = [*SCHEMAS.values()][number]
    seeds = range(OWN_SEEDS * number, OWN_SEEDS * (number + 1))
    check_texts(port, schema, seeds, {"grammar": schema_grammar(schema)})


TREE = {
    "type": "object",
    "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}, "ref": {"type": "null"}},
    "required": ["kids"],
}
EQUAL_NAMES = {
    "$defs": {"a b": {"type": "null"}, "a-b": {"type": "boolean"}},
    "type": "array",
    "prefixItems": [{"$ref": "#/$defs/a b"}, {"$ref": "#/$defs/a-b"}],
}
NAMED = {"properties": {"ab": {"type": "null"}}, "additionalProperties": {"type": "integer"}}
ACCEPTED: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "integer", "minimum": 100}, ["100", "999", "1000"], ["10", "99", "0100"]),
    ({"type": "integer", "maximum": -105}, ["-105", "-1000"], ["-104", "-0105", "-15", "1"]),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": 2}, ["-1.5", "1.99"], ["-1.6", "2"]),
    ({"type": "number", "exclusiveMinimum": 1e-7}, ["0.00000011", "7"], ["0.0000001", "0", "-1"]),
    ({"type": "number", "minimum": 1, "exclusiveMinimum": True}, ["1.1"], ["1", "0.5"]),
    ({"type": "number", "maximum": 1e300}, ["-1", "9999999999999999"], ['"1"']),
    ({"type": ["string", "null"], "enum": ["a", 1, None]}, ['"a"', "null"], ["1", '"b"']),
    ({"type": "integer", "enum": [1.0, 1.5]}, ["1.0"], ["1.5"]),
    (TREE, ['{"kids": [{"kids": []}]}', '{"kids": [], "ref": null}'], ['{"kids": [{}]}']),
    (EQUAL_NAMES, ["[null, true]"], ["[null, null]", "[true, true]"]),
    ({"pattern": "b+"}, ['"abc"', '"b"'], ['"ac"']),
    ({"pattern": r'^[ -~]\.["\\]$'}, ['"x.\\""', '"\\\\.\\\\"'], ['"x.""', '"x.\\"']),
    ({"pattern": r"^\w+\s\S\D$"}, ['"a_1 éx"', '"a\\t.."'], ['"é .."', '"a  ."', '"a .1"']),
    ({"pattern": r"^a\.*$"}, ['"a"', '"a.."'], ['"a.a."', '""']),
    ({"pattern": "^[ä-ü€]$"}, ['"ö"', '"€"'], ['"o"']),
    (NAMED, ['{"ab": null}', '{"x": 1}'], ['{"\\c": 1}', '{"\n": 1}', '{"x": null}']),
]


@pytest.mark.parametrize(
    ("schema", "texts", "others"), ACCEPTED, ids=[json.dumps(schema) for schema, *_ in ACCEPTED]
)
def test_what_a_schema_accepts(
    port: int, accepts: Acceptance, schema: Any, texts: list[str], others: list[str]
) -> None:
    body = {"prompt": "x", "n_predict": 0, "json_schema": schema}
    grammar = post(port, "/completion", body)[1]["generation_settings"]["grammar"]
    for text in texts:
        assert accepts(grammar, text), text
    for text in others:
        assert not accepts(grammar, text), text

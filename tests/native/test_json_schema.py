"""JSON schemas: what a model generates is JSON of the schema, whatever the seed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from llama_cpp.llama_grammar import LlamaGrammar

from mtp_gguf.native import MTPLlama, NativeError
from mtp_gguf.native.schemas.json_schema import schema_grammar
from mtp_gguf.native.schemas.schema_numbers import beyond, integers, numbers
from support.commands import check_refusal, invoke
from support.generation import load
from support.models import Models
from support.schemas import SCHEMAS, Acceptance, check

SEEDS = 200
MESSAGES: Any = [{"role": "user", "content": "Write JSON."}]


@pytest.fixture(scope="module")
def model(models: Models) -> Path:
    return models.gguf("demo", "Q4_K_M", "F16")


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[MTPLlama]:
    with load(model, n_ctx=512, depth=2) as llm:
        yield llm


def answers(llm: MTPLlama, response_format: Any, seeds: range) -> list[str]:
    """What the model answers at a high temperature, without the answers that were cut off."""
    texts = []
    for seed in seeds:
        choice = llm.create_chat_completion(
            MESSAGES, response_format=response_format, temperature=1.2, seed=seed, max_tokens=250
        )["choices"][0]
        if choice["finish_reason"] == "stop":
            texts.append(choice["message"]["content"])
    assert len(texts) > 0.9 * len(seeds)
    return texts


@pytest.mark.thorough
@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(len(SCHEMAS)), ids=SCHEMAS)
def test_texts_of_some_seeds(llm: MTPLlama, number: int) -> None:
    schema = [*SCHEMAS.values()][number]
    share = SEEDS // len(SCHEMAS)
    response_format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    for text in answers(llm, response_format, range(share * number, share * (number + 1))):
        check(text, schema)
    assert llm.mtp_stats.cycles


@pytest.mark.slow
@pytest.mark.parametrize("schema", SCHEMAS.values(), ids=SCHEMAS)
def test_texts_of_every_seed(llm: MTPLlama, schema: Any) -> None:
    for text in answers(llm, {"type": "json_object", "schema": schema}, range(SEEDS)):
        check(text, schema)


def test_strings_have_no_raw_control_characters(llm: MTPLlama) -> None:
    """A model of code likes line breaks; llama_cpp's own grammar allows them in a string."""
    schema = {"type": "string", "minLength": 60, "maxLength": 90}
    for text in answers(llm, {"type": "json_object", "schema": schema}, range(5)):
        check(text, schema)


def test_arguments_of_forced_tools_parse(llm: MTPLlama) -> None:
    """They use llama_cpp's own grammar, whose strings had raw line breaks."""
    text = {"type": "string", "minLength": 60, "maxLength": 90}
    parameters = {"type": "object", "properties": {"text": text}, "required": ["text"]}
    choice: Any = {"type": "function", "function": {"name": "note", "parameters": parameters}}
    for seed in range(5):
        answer: Any = llm.create_chat_completion(
            MESSAGES, tools=[choice], tool_choice=choice, temperature=1.2, seed=seed, max_tokens=250
        )
        [call] = answer["choices"][0]["message"]["tool_calls"]
        check(call["function"]["arguments"], parameters)


class TestResponseFormat:
    def test_no_schema(self, llm: MTPLlama) -> None:
        for response_format in (
            {"type": "json_object"},
            {"type": "json_object", "schema": {}},
            {"type": "json_schema", "json_schema": {"name": "x"}},
        ):
            choice = llm.create_chat_completion(
                MESSAGES, response_format=response_format, temperature=0, max_tokens=32
            )["choices"][0]
            assert choice["message"]["content"].startswith("{")

    def test_text(self, llm: MTPLlama) -> None:
        want, got = (
            llm.create_chat_completion(MESSAGES, temperature=0, max_tokens=8, **options)["choices"]
            for options in ({}, {"response_format": {"type": "text"}})
        )
        assert want == got

    def test_a_stream(self, llm: MTPLlama) -> None:
        schema = {"enum": ["yes", "no"]}
        chunks = llm.create_chat_completion(
            MESSAGES, response_format={"type": "json_object", "schema": schema}, stream=True
        )
        check("".join(c["choices"][0]["delta"].get("content", "") for c in chunks), schema)

    @pytest.mark.parametrize(
        ("response_format", "words"),
        [
            ({"type": "yaml"}, "response_format: expected type text, json_object, or json_schema"),
            ({"type": "json_schema"}, "json_schema with an object `json_schema`, found"),
            ("json", 'response_format: expected an object, found "json"'),
            ({"type": "json_object", "schema": {"$ref": "#"}}, "response_format: llama.cpp cannot"),
            ({"type": "json_object", "schema": {"not": {}}}, "the JSON schema at #: expected"),
        ],
    )
    def test_refusals(self, llm: MTPLlama, response_format: Any, words: str) -> None:
        with pytest.raises(NativeError) as caught:
            llm.create_chat_completion(MESSAGES, response_format=response_format)
        assert words in str(caught.value)

    def test_not_with_a_grammar(self, llm: MTPLlama) -> None:
        with pytest.raises(NativeError, match="expected no grammar beside it"):
            llm.create_chat_completion(
                MESSAGES,
                response_format={"type": "json_object"},
                grammar=LlamaGrammar.from_string('root ::= "a"'),
            )


def test_a_malformed_grammar_is_refused(llm: MTPLlama) -> None:
    """llama_cpp would add no sampler in its place, and crash."""
    with pytest.raises(NativeError, match="cannot read the grammar"):
        llm.create_completion("x", grammar=LlamaGrammar.from_string("root ::= ("), max_tokens=2)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "Expecting property name"),
        ("3", "the JSON schema at #: expected a schema, found 3"),
        ('{"items": {"type": "strin"}}', "the JSON schema at #/items: expected types among"),
    ],
)
def test_refusals_of_the_command(model: Path, schema: str, words: str) -> None:
    done = invoke("generate", model, "-p", "x", "-j", schema)
    check_refusal(done.exit_code, done.stderr, words, code=2)


@pytest.fixture(scope="module")
def accepts(llm: MTPLlama) -> Callable[[Any, str], bool]:
    """Whether the grammar of a schema can generate a text."""
    accepts = Acceptance(llm)
    return lambda schema, text: accepts(schema_grammar(schema), text)


PERSON = {"type": "object", "properties": {"age": {"type": "integer"}}, "required": ["age"]}
TREE = {
    "properties": {"kids": {"type": "array", "items": {"$ref": "#"}}},
    "required": ["kids"],
    "additionalProperties": False,
}
DRAFT_7 = "http://json-schema.org/draft-07/schema#"
ACCEPTED: list[tuple[Any, list[str], list[str]]] = [
    (True, ["1", '"a"', "[null, true]", '{"a": {"b": []}}'], ["", "tru", "01", "[1,]", "{1: 2}"]),
    ({"type": "string"}, ['"é\\n\\u00e9"', '"\\ud83d\\ude00"'], ['"\n"', '"\\x"', '"\\ud83d"']),
    ({"type": "number"}, ["-0.5e-99", "12"], ["1e999", ".5", "1.", "+1", "NaN", "1.2.3"]),
    ({"type": ["string", "null"], "enum": ["a", 1, None]}, ['"a"', "null"], ["1", '"b"']),
    ({"type": ["integer", "number"]}, ["1", "1.5"], ['"1"']),
    ({"const": {"a": 'b"\\\n'}}, ['{"a": "b\\"\\\\\\n"}'], ['{"a": "b"}']),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"a\\nb"'], ['"a"', '"abcd"']),
    ({"type": "string", "format": "uuid"}, [f'"{"0" * 8}-0000-0000-0000-{"0" * 12}"'], ['"0"']),
    ({"type": "string", "format": "date"}, ['"2024-02-28"'], ['"2024-04-31"', '"2024-00-01"']),
    ({"type": "string", "format": "date-time"}, ['"2024-01-31T23:59:59Z"'], ['"2024-01-31"']),
    ({"type": "string", "format": "no such format"}, ['"x"'], ["1"]),
    # Objects.
    (PERSON, ['{"age": 3}', '{\n  "age": 3\n}'], ["{}", '{"age": "3"}', '{"name": 3}']),
    ({"properties": {"a": {}, "b": {}}}, ["{}", '{"b": 1}', '{"a": 1, "b": 2}'], ['{"a": 1,}']),
    (
        {"properties": {"a": {}, "b": {}, "c": {}}, "required": ["b"]},
        ['{"b": 1}', '{"a": 1, "b": 2}', '{"b": 1, "c": 2}', '{"a": 1, "b": 2, "c": 3}'],
        ["{}", '{"a": 1}', '{"a": 1, "c": 2}', '{, "b": 1}'],
    ),
    (
        {"properties": {"ab": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        ["{}", '{"ab": null}', '{"a": 1, "abc": 2}', '{"ab": null, "": 1, "c": 2}'],
        ['{"ab": 1}', '{"a\\u0062": 1}', '{"c": null}', '{"\\c": 1}'],
    ),
    ({"additionalProperties": False}, ["{}", "{ }"], ['{"a": 1}']),
    ({"required": ["a"]}, ['{"a": 1}', '{"a": 1, "b": 2}'], ["{}", '{"b": 1}']),
    ({"type": "object", "minProperties": 1}, ['{"a": 1}'], ["{}"]),
    ({"properties": {"a": False, "b": {}}}, ['{"b": 1}'], ['{"a": 1}']),
    (TREE, ['{"kids": [{"kids": []}, {"kids": []}]}'], ['{"kids": [{}]}']),
    # Arrays.
    (
        {"items": {"type": "null"}, "maxItems": 2},
        ["[]", "[null, null]"],
        ["[1]", "[null,null,null]"],
    ),
    ({"type": "array", "minItems": 2}, ["[1, []]"], ["[]", "[1]"]),
    ({"prefixItems": [{"const": 1}, {"const": 2}]}, ["[1, 2]"], ["[2, 1]", "[1, 2, 3]"]),
    ({"prefixItems": [{"const": 1}], "items": {"const": 2}}, ["[1]", "[1, 2, 2]"], ["[1, 1]"]),
    (
        {"$schema": DRAFT_7, "items": [{"const": 1}], "additionalItems": False},
        ["[1]"],
        ["[1, 1]"],
    ),
    ({"type": "array", "maxItems": 0}, ["[]", "[ ]"], ["[1]"]),
    # Combinations.
    ({"$ref": "#/$defs/a", "$defs": {"a": PERSON}}, ['{"age": 1}'], ["{}"]),
    ({"$ref": "#/$defs/a", "minimum": 5, "$defs": {"a": {"type": "integer"}}}, ["5"], ["4"]),
    ({"oneOf": [{"type": "null"}, PERSON]}, ["null", '{"age": 1}'], ["1"]),
    ({"type": "integer", "anyOf": [{"maximum": 1}, {"minimum": 8}]}, ["1", "8"], ["2"]),
    (
        {"allOf": [PERSON, {"properties": {"age": {"maximum": 9}, "b": {}}, "required": ["b"]}]},
        ['{"age": 9, "b": 1}'],
        ['{"age": 9}', '{"age": 10, "b": 1}'],
    ),
    ({"allOf": [{"enum": [1, 2]}, {"enum": [True, 2]}]}, ["2"], ["1", "true"]),
    (
        {"allOf": [{"anyOf": [{"type": "string"}, {"type": "null"}]}, {"maxLength": 1}]},
        ['"a"', "null"],
        ['"ab"', "1"],
    ),
    # Patterns.
    ({"pattern": "^a|b$"}, ['"axyz"', '"xyzb"', '"a"'], ['"xay"', '"\n"']),
    ({"pattern": "b+"}, ['"abc"', '"b"'], ['"ac"']),
    ({"pattern": "^(?:ab){2,3}c?$"}, ['"ababc"'], ['"ab"', '"abababab"']),
    ({"pattern": r'^[ -~]\.["\\]$'}, ['"x.\\""', '"\\"."'[:3] + '.\\\\"'], ['"x.""', '"x.\\"']),
    ({"pattern": r"^\w+\s\S\D$"}, ['"a_1 éx"', '"a\\t.."'], ['"é .."', '"a  ."', '"a .1"']),
    ({"pattern": r"^[\x01]$"}, ['"\\u0001"'], ['"\x01"']),
    ({"pattern": "^[ä-ü€]$"}, ['"ö"', '"€"'], ['"o"']),
    ({"pattern": "^$"}, ['""'], ['"a"']),
    ({"pattern": ""}, ['""', '"a"'], ["1"]),
]


@pytest.mark.parametrize(
    ("schema", "texts", "others"), ACCEPTED, ids=[json.dumps(schema) for schema, *_ in ACCEPTED]
)
def test_what_a_schema_accepts(
    accepts: Callable[[Any, str], bool], schema: Any, texts: list[str], others: list[str]
) -> None:
    for text in texts:
        assert accepts(schema, text), text
        check(text, schema)
    for text in others:
        assert not accepts(schema, text), text


@pytest.mark.parametrize(
    ("least", "most"), [(0, 4096), (1, None), (2500, None), (1999, 2001), (3000, 5500)]
)
def test_lengths_beyond_the_limit_of_a_rule(
    accepts: Callable[[Any, str], bool], least: int, most: int | None
) -> None:
    schema = {"type": "string", "minLength": least}
    if most is not None:
        schema["maxLength"] = most
    for length in (0, max(least - 1, 0), least, 2000, 3700, most or 6000, (most or 6000) + 1):
        inside = least <= length and (most is None or length <= most)
        assert accepts(schema, f'"{"a" * length}"') == inside, length


@pytest.mark.parametrize(
    ("schema", "place", "found"),
    [
        ({"items": {"uniqueItems": True}}, "#/items", "uniqueItems; leave it out"),
        ({"properties": {"a/b": {"multipleOf": 3}}}, "#/properties/a~1b", "multipleOf"),
        ({"anyOf": [{"type": "null"}, {"patternProperties": {"a": {}}}]}, "#/anyOf/1", "pattern"),
        ({"type": "object", "minProperties": 2}, "#", "minProperties"),
        ({"type": "object", "maxProperties": 2}, "#", "maxProperties"),
        ({"if": {}}, "#", "if; leave it out"),
        ({"$ref": "https://example.com/a.json"}, "#", "found https://example.com/a.json"),
        ({"$ref": "#/$defs/a"}, "#", "found #/$defs/a"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "#", "one that none satisfies"),
        ({"type": "number", "exclusiveMinimum": 1, "maximum": 1}, "#", "one that none satisfies"),
        ({"type": "string", "minLength": 2, "maxLength": 1}, "#", "one that none satisfies"),
        ({"minItems": 2, "maxItems": 1}, "#", "one that none satisfies"),
        ({"enum": [1], "type": "string"}, "#", "one that none satisfies"),
        ({"properties": {"a": False}, "required": ["a"]}, "#/properties/a", "none satisfies"),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, "#", "one that none satisfies"),
        ({"allOf": [{"pattern": "a"}, {"pattern": "b"}]}, "#", "several; write them as one"),
        ({"enum": ["a"], "minLength": 1}, "#", "minLength"),
        ({"pattern": "a", "minLength": 1}, "#", "put the length into the pattern"),
        ({"pattern": "(?=a)b"}, "#", "a lookahead or lookbehind"),
        ({"pattern": r"(a)\1"}, "#", "groupref"),
        ({"pattern": r"a\bc"}, "#", "an anchor or boundary inside"),
        ({"pattern": "(?i)a"}, "#", "flags"),
        ({"pattern": "("}, "#", "missing )"),
        ({"pattern": "[^\\s\\S]"}, "#", "a class without characters"),
        ({"maxLength": -1}, "#", "expected maxLength of 0 or more, found -1"),
        ({"minimum": "1"}, "#", "expected a number as minimum, found '1'"),
        ({"minimum": True}, "#", "expected a number as minimum, found True"),
        ({"type": []}, "#", "found []"),
        ({"properties": []}, "#", "expected another value of properties, found []"),
        ({"enum": [float("nan")]}, "#", "found nan"),
        ({"enum": ["\ud800"]}, "#", "expected a value that JSON can express"),
        ({"anyOf": [False]}, "#", "one that none satisfies"),
        ([], "#", "expected a schema, found []"),
        ({"$ref": "#", "minimum": 1}, "#", "nested too deeply"),
    ],
)
def test_what_is_refused(schema: Any, place: str, found: str) -> None:
    with pytest.raises(NativeError) as caught:
        schema_grammar(schema)
    assert str(caught.value).startswith(f"the JSON schema at {place}: expected ")
    assert found in str(caught.value)


def expression_of(grammar: str | None) -> re.Pattern[str]:
    """A grammar of digits as a regular expression."""
    return re.compile(re.sub('[" ]', "", grammar or "(?!)").replace(".", r"\."))


def test_every_range_of_small_integers() -> None:
    bounds = [None, -101, -100, -99, -12, -10, -9, -1, 0, 1, 5, 9, 10, 11, 45, 99, 100, 101, 230]
    for low in bounds:
        for high in bounds:
            found = expression_of(integers(low, high))
            for value in range(-250, 251):
                inside = (low is None or low <= value) and (high is None or value <= high)
                assert bool(found.fullmatch(str(value))) == inside, (low, high, value)


def test_random_ranges_of_numbers() -> None:
    source = random.Random(3)

    def number() -> Decimal:
        return Decimal(source.randint(-(10**5), 10**5)).scaleb(-source.randint(0, 5))

    for _ in range(300):
        low, high = sorted([number(), number()])
        edges = [low, high, beyond(low, -1), beyond(high, 1), beyond(low, 1), beyond(high, -1)]
        bounded, above, below = numbers(low, high), numbers(low, None), numbers(None, high)
        for value in [*edges, *(number() for _ in range(20))]:
            text = f"{value:f}"
            assert bool(expression_of(bounded).fullmatch(text)) == (low <= value <= high)
            assert bool(expression_of(above).fullmatch(text)) == (low <= value)
            assert bool(expression_of(below).fullmatch(text)) == (value <= high)

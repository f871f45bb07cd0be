"""JSON schemas whose texts are short, so that a model that knows nothing ends them, too."""

from __future__ import annotations

import ctypes
import json
from typing import Any

from jsonschema import Draft202012Validator
from jsonschema.validators import validator_for

from mtp_gguf.native import MTPLlama
from mtp_gguf.native.runtime import llama_cpp

SCHEMAS: dict[str, dict[str, Any]] = {
    "recursive": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 6},
            "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
        },
        "required": ["name", "children"],
        "additionalProperties": False,
    },
    "$ref": {
        "$defs": {"string": {"type": "integer"}, "a/b": {"type": "array", "items": {"enum": [1]}}},
        "type": "object",
        "properties": {"n": {"$ref": "#/$defs/string"}, "ones": {"$ref": "#/$defs/a~1b"}},
        "required": ["n", "ones"],
    },
    "enum": {
        "type": "array",
        "items": {"enum": ['"é\\\n', 2, None, {"x": [True]}], "type": ["string", "null", "object"]},
        "minItems": 1,
        "maxItems": 3,
    },
    "number": {
        "type": "object",
        "properties": {
            "share": {"type": "number", "minimum": 0, "maximum": 1},
            "price": {"type": "number", "exclusiveMinimum": 0},
            "count": {"type": "integer", "minimum": -12, "exclusiveMaximum": 345},
        },
        "required": ["share", "price", "count"],
    },
    "pattern": {
        "type": "object",
        "properties": {
            "code": {"type": "string", "pattern": r"^[A-Z].{0,3}[^a-z]\d{2}$"},
            "day": {"type": "string", "format": "date"},
        },
        "required": ["code", "day"],
    },
}


def check(text: str, schema: Any) -> None:
    """The text is JSON of the schema."""
    validator_for(schema, Draft202012Validator)(schema).validate(json.loads(text))


class Acceptance:
    """Tells whether llama.cpp's sampler lets a grammar generate a text."""

    def __init__(self, llm: MTPLlama) -> None:
        self.llm = llm
        self.vocabulary = llama_cpp.llama_model_get_vocab(llm.model)

    def __call__(self, grammar: str, text: str) -> bool:
        sampler = llama_cpp.llama_sampler_init_grammar(self.vocabulary, grammar.encode(), b"root")
        assert sampler
        tokens = self.llm.tokenize(text.encode(), add_bos=False, special=False)
        try:
            return all(self.takes(sampler, token) for token in [*tokens, self.llm.token_eos()])
        finally:
            llama_cpp.llama_sampler_free(sampler)

    def takes(self, sampler: Any, token: int) -> bool:
        candidate = llama_cpp.llama_token_data(id=token, logit=0.0, p=0.0)
        array = llama_cpp.llama_token_data_array(ctypes.pointer(candidate), 1, -1, False)
        llama_cpp.llama_sampler_apply(sampler, ctypes.byref(array))
        taken = candidate.logit == 0.0
        if taken and token != self.llm.token_eos():
            llama_cpp.llama_sampler_accept(sampler, token)
        return taken

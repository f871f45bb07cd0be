"""Tools that a chat may call, for llama-server and MTPLlama alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TEMPLATE = Path(__file__).parents[1] / "server" / "templates" / "qwen_tools.jinja"
PLACE = {
    "type": "object",
    "properties": {"kind": {"enum": ["file", "folder"]}, "hidden": {"type": "boolean"}},
    "required": ["kind", "hidden"],
    "additionalProperties": False,
}


def tool(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A function whose arguments are all required."""
    schema = {"type": "object", "properties": fields, "required": [*fields]}
    return {"type": "function", "function": {"name": name, "parameters": schema}}


OPEN_PATH = tool("open_path", {"place": PLACE, "write": {"type": "boolean"}})
SET_FLAGS = tool(
    "set_flags",
    {"flags": {"type": "array", "items": {"enum": ["r", "w"]}, "minItems": 2, "maxItems": 3}},
)

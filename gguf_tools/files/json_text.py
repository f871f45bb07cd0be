"""JSON from outside."""

import json
from collections.abc import Callable
from typing import Any


def parse_json(
    text: str | bytes, object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None
) -> Any:
    """The value of `text`; ValueError for whatever is wrong with it.

    json.loads alone ends in a RecursionError, which is no ValueError, where text is nested too
    deeply. object_pairs_hook: as for json.loads.
    """
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except RecursionError:
        raise ValueError("text that is nested too deeply") from None

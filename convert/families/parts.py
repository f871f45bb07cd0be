"""Which tensors of a checkpoint a conversion of a part of the model reads."""

import re
from typing import Any

from ..checkpoints.checkpoint import canonical_name, head_test, is_vision
from .target_model import HeadChoice

_LAYERS = re.compile(r"(model|backbone)\.layers\.")


def wants(name: str, head: HeadChoice, config: dict[str, Any]) -> bool:
    """Whether a conversion of this part of the model reads the source tensor `name`."""
    if is_vision(name) or head is HeadChoice.VISION:
        return is_vision(name) and head is HeadChoice.VISION
    in_head = head_test(config)(name)
    if head is HeadChoice.NONE:
        return not in_head
    if head is HeadChoice.BLOCK:
        return in_head
    whole = head is HeadChoice.WITH_TRUNK
    return whole or in_head or not _LAYERS.match(canonical_name(name))

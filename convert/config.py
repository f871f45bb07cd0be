"""Reading config.json with types."""

from typing import Any, TypeGuard

import numpy as np

from mtp_gguf.gguf_tools.errors import CheckpointError

LARGEST_SIZE = (1 << 31) - 1
LARGEST_F32 = float(np.finfo(np.float32).max)


class ConfigReader:
    """Typed access to a config.json; a value of another type is named in the error.

    What stands in text_config, as multimodal models have it, goes before what stands outside.
    """

    def __init__(self, where: str, config: dict[str, Any]) -> None:
        self.where = where
        text_config = config.get("text_config") or {}
        if not isinstance(text_config, dict):
            raise CheckpointError(
                f"{where}: text_config: expected an object, found {text_config!r:.60}"
            )
        self.config = {**config, **text_config}

    def fault(self, key: str, expected: str, found: object) -> CheckpointError:
        """An error about `key`, to be raised."""
        return CheckpointError(f"{self.where}: {key}: expected {expected}, found {found!r:.80}")

    def size(
        self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST_SIZE
    ) -> int:
        """A whole number from `least` to `most`; `default` where the key is absent or null."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if not is_whole(value) or not least <= value <= most:
            raise self.fault(key, f"a whole number from {least} to {most}", value)
        return value

    def number(
        self,
        holder: dict[str, Any],
        key: str,
        default: float,
        least: float = -LARGEST_F32,
        most: float = LARGEST_F32,
    ) -> float:
        """The number under `key` of the config or of an object in it, which F32 can hold."""
        value = holder.get(key, default)
        if not (is_whole(value) or isinstance(value, float)) or not least <= value <= most:
            raise self.fault(key, f"a number from {least:g} to {most:g}", value)
        return float(value)

    def flag(self, key: str) -> bool:
        """True or false; false where the key is absent."""
        value = self.config.get(key, False)
        if not isinstance(value, bool):
            raise self.fault(key, "true or false", value)
        return value

    def rope(self) -> dict[str, Any]:
        """The rope parameters, whichever of the two places they stand in."""
        rope = self.config.get("rope_parameters") or self.config.get("rope_scaling") or {}
        if not isinstance(rope, dict):
            raise self.fault("rope_parameters", "an object", rope)
        merged = dict(rope)
        for key in ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"):
            if key not in merged and self.config.get(key) is not None:
                merged[key] = self.config[key]
        return merged


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value of JSON is a whole number (Python counts true and false among them)."""
    return isinstance(value, int) and not isinstance(value, bool)

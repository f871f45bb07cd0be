"""Reading config.json with types."""

from typing import Any

from mtp_gguf.gguf_tools.errors import CheckpointError


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
        return CheckpointError(f"{self.where}: {key}: expected {expected}, found {found!r}")

    def size(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number from `least`; `default` where the key is absent or null."""
        value = self.config.get(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 31:
            raise self.fault(key, f"a whole number from {least}", value)
        return value

    def number(self, holder: dict[str, Any], key: str, default: float) -> float:
        """The number under `key` of the config or of an object in it."""
        value = holder.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fault(key, "a number", value)
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

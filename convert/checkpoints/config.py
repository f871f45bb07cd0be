"""Typed access to config.json."""

from typing import Any, TypeGuard

import numpy as np

from mtp_gguf.gguf_tools.errors import CheckpointError

# The classes of models by `model_type`, for configs that do not name a class.
_CLASSES = {
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen4_exp": "Qwen4ExpForConditionalGeneration",
    "qwen4_exp_text": "Qwen4ExpForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "glm5_next": "Glm5NextForConditionalGeneration",
    "glm5_next_text": "Glm5NextForConditionalGeneration",
    "mimo_v2": "MiMoV2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "step3p5": "Step3p5ForCausalLM",
    "step3p7": "Step3p7ForConditionalGeneration",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
}

LARGEST_SIZE = (1 << 31) - 1
_SHOWN_DIGITS = 40
LARGEST_F32 = float(np.finfo(np.float32).max)


# For multimodal models, transformers reads this key only outside text_config.
_DECIDED_OUTSIDE = "tie_word_embeddings"


class ConfigReader:
    """Typed access to a config.json; values of another type raise a CheckpointError.

    Values in text_config, which multimodal models have, take precedence over values outside. In
    both places null means that a key is not set: transformers writes it for every unset key.
    """

    def __init__(self, where: str, config: dict[str, Any]) -> None:
        self.where = where
        text_config = config.get("text_config")
        if not isinstance(text_config, dict | None):
            raise self.fault("text_config", "an object", text_config)
        outside = {key: value for key, value in config.items() if value is not None}
        inside = {key: value for key, value in (text_config or {}).items() if value is not None}
        self.config = {**outside, **inside}
        if _DECIDED_OUTSIDE in outside:
            self.config[_DECIDED_OUTSIDE] = outside[_DECIDED_OUTSIDE]

    def fault(self, key: str, expected: str, found: object) -> CheckpointError:
        """An error about `key`, for the caller to raise."""
        return CheckpointError(f"{self.where}: {key}: expected {expected}, found {shown(found)}")

    @property
    def architecture(self) -> str | None:
        """The model's class in transformers; None if the config tells neither it nor its type."""
        named = self.config.get("architectures", [])
        if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
            raise self.fault("architectures", "a list of names", named)
        kind = self.config.get("model_type")
        return named[0] if named else _CLASSES.get(kind) if isinstance(kind, str) else None

    def size(
        self, key: str, default: int | None = None, least: int = 1, most: int = LARGEST_SIZE
    ) -> int:
        """An integer from `least` to `most`; `default` if the key is not set."""
        value = self.config.get(key, default)
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
        """The number under `key` of the config or of an object in it, within the range of F32.

        `default` if the key is not set.
        """
        value = holder.get(key)
        if value is None:
            return default
        if not (is_whole(value) or isinstance(value, float)) or not least <= value <= most:
            raise self.fault(key, f"a number from {least:g} to {most:g}", value)
        return float(value)

    def flag(self, key: str) -> bool:
        """A boolean; False if the key is not set."""
        value = self.config.get(key, False)
        if not isinstance(value, bool):
            raise self.fault(key, "true or false", value)
        return value

    def each_layer(self, key: str, layers: int) -> list[Any]:
        """A list with an entry for each layer of the trunk."""
        found = self.config.get(key)
        if not isinstance(found, list) or len(found) != layers:
            count = len(found) if isinstance(found, list) else found
            raise self.fault(key, f"{layers} entries (num_hidden_layers)", count)
        return found

    def rope(self) -> dict[str, Any]:
        """The rope parameters that are set, from all places where they may be.

        As in transformers, rope_scaling (the older name) takes precedence over rope_parameters, and
        theta and the partial factor may also be outside of both.
        """
        merged: dict[str, Any] = {}
        for key in ("rope_parameters", "rope_scaling"):
            found = self.config.get(key)
            if not isinstance(found, dict | None):
                raise self.fault(key, "an object", found)
            merged = found or merged
        merged = {key: value for key, value in merged.items() if value is not None}
        for key in ("rope_theta", "partial_rotary_factor"):
            if key in self.config:
                merged.setdefault(key, self.config[key])
        return merged

    def rope_of(self, kind: str) -> dict[str, Any]:
        """The rope parameters of layers of a kind, such as `sliding_attention`.

        Configs have them for each kind, or for all layers; then `rope_theta` is that of full
        attention, and `swa_rope_theta` that of the others.
        """
        rope = self.rope()
        own = rope.get(kind)
        if not isinstance(own, dict | None):
            raise self.fault(f"rope_parameters: {kind}", "an object", own)
        if own is None and kind != "full_attention" and "swa_rope_theta" in self.config:
            own = {"rope_theta": self.config["swa_rope_theta"]}
        return {**rope, **(own or {})}


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a JSON value is an integer (in Python, bool is a subclass of int)."""
    return isinstance(value, int) and not isinstance(value, bool)


def shown(value: object) -> str:
    """A JSON value for a message: on one line, and shortened if it is long."""
    if is_whole(value) and abs(value) >= 10**_SHOWN_DIGITS:
        return "a number of too many digits"
    return f"{value!r:.80}"

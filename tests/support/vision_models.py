"""Small random Qwen3.5 checkpoints with a vision tower, as transformers saves them."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from mtp_gguf.gguf_tools.files.format import Value, ValueType
from support.checkpoints import TINY, Spec, write_checkpoint
from support.conversions import converted
from support.gguf_files import edited
from support.models import DEMO

DEMO_WIDTH = 256
# As the demo's own, for contents of several parts as well.
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}"
    "{%- for part in message.content %}{{- part.text }}{%- endfor %}{%- endif %}"
    "{{- '<|im_end|>\\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

# Small, with an odd number of positions along no side; wider than tall in every matrix.
TOWER = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_heads": 2,
    "num_position_embeddings": 64,
    "patch_size": 16,
}
PROCESSOR = {
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.25, 0.5],
    "image_std": [0.5, 0.5, 0.125],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}


def write_vision_checkpoint(
    folder: Path, spec: Spec, tower: Mapping[str, Any] = TOWER, dtype: str = "bfloat16"
) -> Path:
    """Save a random model of the spec's sizes with a vision tower; it has no MTP head."""
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415
    from transformers import models  # noqa: PLC0415

    transformers.utils.logging.disable_progress_bar()
    source = write_checkpoint(folder.parent / f"{folder.name}-source", spec)
    text = json.loads((source / "config.json").read_text(encoding="utf-8"))
    text = text.get("text_config", text)
    vision = {**tower, "out_hidden_size": spec.hidden}
    torch.manual_seed(0)
    if spec.experts:
        kinds = models.qwen3_5_moe
        config = kinds.Qwen3_5MoeConfig(text_config=text, vision_config=vision)
        model = kinds.Qwen3_5MoeForConditionalGeneration(config)
    else:
        config = transformers.Qwen3_5Config(text_config=text, vision_config=vision)
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    with torch.no_grad():  # transformers starts biases at 0 and norms at 1
        for parameter in model.model.visual.parameters():
            parameter.add_(torch.randn_like(parameter) / 8)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    transformers.AutoTokenizer.from_pretrained(source).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR), encoding="utf-8")
    return folder


def png(width: int, height: int, seed: int = 0) -> bytes:
    """A picture of noise (of one color if it is large), as a PNG file."""
    if width * height > 1 << 20:
        row = b"\0" + bytes(3 * width)
        rows = zlib.compress(row * height, 1)
    else:
        noise = np.random.default_rng(seed).integers(0, 256, (height, width * 3), np.uint8)
        rows = zlib.compress(np.pad(noise, ((0, 0), (1, 0))).tobytes())
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", rows), (b"IEND", b""))
    chunks = (
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))
        for name, data in parts
    )
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def demo_with_tower(folder: Path) -> Path:
    """Write the demo model with a template for pictures, and a random tower that fits it.

    They are `model.gguf` and `mmproj.gguf` in the folder, which is returned.
    """
    converted(DEMO, folder / "demo.gguf", "--quant", "F16", "--mtp-f16")

    template = {"tokenizer.chat_template": Value(ValueType.STRING, TEMPLATE)}
    edited(folder / "demo.gguf", folder / "model.gguf", metadata=template)
    spec = replace(TINY, mtp=False, hidden=DEMO_WIDTH)
    tower = write_vision_checkpoint(folder / "checkpoint", spec)
    converted(tower, folder / "mmproj.gguf", "--mmproj-only")
    return folder


def picture(data: bytes) -> dict[str, Any]:
    """A PNG as a part of a message."""
    text = base64.b64encode(data).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}}


def says(*parts: str | dict[str, Any], role: str = "user") -> Any:
    """A message of texts and pictures."""
    content = [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts]
    return {"role": role, "content": content}


WIDE, NARROW = picture(png(160, 96)), picture(png(64, 64, 1))
CHATS: dict[str, list[Any]] = {
    "one picture": [says("def is_prime(n):\n", WIDE, "for name in ")],
    "two pictures": [says(NARROW, " and ", WIDE, "?")],
    "a picture in the middle": [
        says("What does os.path.join do?"),
        says("It joins paths.", role="assistant"),
        says("And this? ", WIDE),
    ],
    "text": [says("What does len do?")],
}

"""What a model reaches of what the machine reads and multiplies at most."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFReader

from mtp_gguf.bench.limits import Work, measure_limits, reached, work_of
from mtp_gguf.bench.result import CycleCosts, Limits, PrefillCosts
from mtp_gguf.bench.stats import summarize
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native.runtime import plugged_kernels
from support.models import Dial


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_the_work_of_a_token(dial: Dial, shape: str) -> None:
    reader = GGUFReader(dial(shape))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    head = max(int(name.split(".")[1]) for name in tensors if name.startswith("blk."))
    output = "output.weight" if "output.weight" in tensors else "token_embd.weight"
    keys = (f"qwen35moe.{key}" for key in ("expert_used_count", "expert_count"))
    used, count = (int(reader.fields[k].contents()) for k in keys) if "moe" in shape else (1, 1)
    nbytes = products = 0
    for name, tensor in tensors.items():
        if name.startswith(f"blk.{head}.") or (name == "token_embd.weight" != output):
            continue
        times = used / count if "_exps." in name else 1
        nbytes += int(tensor.n_bytes * times)
        if name != output and len(tensor.shape) > 1:
            products += int(prod(tensor.shape.tolist()) * times)
    prefix = "qwen35moe" if "moe" in shape else "qwen35"
    state, inner = (
        int(reader.fields[f"{prefix}.ssm.{key}"].contents()) for key in ("state_size", "inner_size")
    )
    for name, tensor in tensors.items():
        if name.endswith(".ssm_conv1d.weight"):
            taps, channels = map(int, tensor.shape)
            nbytes += 2 * 4 * ((taps - 1) * channels + state * inner)  # read and written, F32
    with open_model(dial(shape)) as model:
        assert work_of(model) == Work(nbytes, products)


def test_shares() -> None:
    ms = summarize([20.0])
    cycles = CycleCosts(0, (ms,), (), ms)
    prompt = PrefillCosts(100, summarize([500.0]), ms, ms)
    limits = [Limits(read=read, products=1e12) for read in (99e9, 50e9, 20e9)]
    found = reached(limits, Work(800_000_000, 1_000_000_000), cycles, prompt)
    assert (found.of_read, found.of_products) == pytest.approx((0.8, 0.2))
    alone = reached(limits, Work(800_000_000, 1_000_000_000), cycles, None)
    assert alone == replace(found, of_products=None)


HAS_KERNELS = plugged_kernels.instructions is not None


def test_limits_are_measured(tmp_path: Path) -> None:
    path = tmp_path / "16 MiB"
    path.write_bytes(bytes(1 << 24))
    found = measure_limits(path, 1)
    if not HAS_KERNELS:
        assert found is None
        return
    assert found
    assert found.read > 1e7
    assert found.products > 1e8


def test_what_is_too_small_to_be_read_in_threads() -> None:
    assert plugged_kernels.read_limit(np.zeros(100, np.uint8), 2, 0.01) == 0
    assert plugged_kernels.read_limit(np.zeros(1 << 24, np.uint8), 0, 0.01) == 0
    assert (plugged_kernels.product_limit(2, 0.01) > 0) == HAS_KERNELS

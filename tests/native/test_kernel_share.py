"""How much of a file our kernels compute on this CPU, as doctor and bench say it."""

from __future__ import annotations

import json
import re

import pytest

from mtp_gguf.gguf_tools.files.format import TensorInfo
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.native.libraries.kernel_share import KernelShare, kernel_share, weight_matrices
from mtp_gguf.native.runtime import plugged_kernels
from support.commands import succeed
from support.models import Models


def tensor(name: str, kind: str, *shape: int) -> TensorInfo:
    return TensorInfo(name, shape, BY_NAME[kind], 0)


FILE = [
    tensor("token_embd.weight", "Q8_0", 256, 64),
    tensor("output_norm.weight", "F32", 256),
    tensor("blk.0.attn_q.weight", "Q4_K", 256, 256),
    tensor("blk.0.ffn_up_exps.weight", "TQ1_0", 256, 32, 4),
    tensor("blk.0.ssm_conv1d.weight", "F32", 4, 256),
    tensor("blk.0.ssm_a", "F32", 1, 16),
]


def test_what_is_multiplied_with_activations() -> None:
    names = [matrix.name for matrix in weight_matrices(FILE)]
    assert names == ["token_embd.weight", "blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight"]
    untied = [*FILE, tensor("output.weight", "Q6_K", 256, 64)]
    names = [matrix.name for matrix in weight_matrices(untied)]
    assert names == ["blk.0.attn_q.weight", "blk.0.ffn_up_exps.weight", "output.weight"]


@pytest.mark.skipif(not plugged_kernels.types(), reason="no kernels are plugged in")
def test_a_type_without_kernels_is_named() -> None:
    embedding, matrix, experts = 64 * 272, 256 * 144, 4 * 32 * 54
    found = kernel_share(FILE)
    assert found.nbytes == embedding + matrix + experts
    assert found.left == {"TQ1_0": experts}
    assert found.share == (embedding + matrix) / found.nbytes
    assert found.text == (
        f"{plugged_kernels.instructions} for 88.7% of the weights' bytes, llama.cpp's own for the "
        "rest (TQ1_0 11.3%)"
    )
    assert kernel_share(FILE[:3]).text == f"{plugged_kernels.instructions} for all weights"
    assert kernel_share([]).share == 1


def test_without_kernels_the_reason_is_named() -> None:
    found = KernelShare(None, "MTP_GGUF_KERNELS=0", 100, {"Q4_K": 100})
    assert found.share == 0
    assert found.text == "llama.cpp's own (MTP_GGUF_KERNELS=0)"


def test_doctor_says_it(models: Models) -> None:
    path = models.gguf("demo", "Q4_K_M", "F16")
    said = succeed("doctor", path)
    found = json.loads(succeed("doctor", path, "--json"))["kernels"]
    assert found["instructions"] == plugged_kernels.instructions
    [line] = re.findall("^kernels: (.*)$", said, re.MULTILINE)
    assert line == KernelShare(**found).text

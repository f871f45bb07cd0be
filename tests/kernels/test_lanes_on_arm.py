"""The NEON kernels on CPUs emulated by qemu: with I8MM, with dot products, with neither.

On an ARM machine test_lanes.py tests them natively.
"""

from __future__ import annotations

from functools import cache
from hashlib import sha256
from typing import Protocol

import numpy as np
import pytest

from support.kernels.emulated_build import build_driver, missing_tools
from support.kernels.emulated_ggml import EmulatedGgml
from support.kernels.results import GOLDEN, MAX_NMSE, Arrays, cases, check_strided_rows, differing
from support.kernels.sweep import PATCHED, SUPER_BLOCKS, expert_products, golden, products

pytestmark = [
    pytest.mark.slow,
    pytest.mark.upstream,
    pytest.mark.skipif(bool(missing_tools()), reason=f"not on the PATH: {missing_tools()}"),
]

CPUS = {"NEON_I8MM": "max", "NEON_DOTPROD": "neoverse-n1", "": "cortex-a72"}
KERNELS = [name for name in CPUS if name]
DEARER = ("Q8_0", "F16")  # have kernels where MTP_GGUF_KERNELS is "all"


class Emulated(Protocol):
    """Runs the sweep on a CPU with a value of MTP_GGUF_KERNELS, each once."""

    def __call__(self, cpu: str, lanes: str = "all") -> Arrays:
        """What it computed, by name."""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Emulated:
    """See Emulated."""
    driver = build_driver(tmp_path_factory.mktemp("arm"))

    @cache
    def run(cpu: str, lanes: str) -> Arrays:
        with EmulatedGgml(driver, cpu, lanes) as ggml:
            found: Arrays = {
                "exact": SUPER_BLOCKS,
                "lanes": ggml.lanes(),
                **products(ggml, PATCHED),
            }
            return found | expert_products(ggml, PATCHED, SUPER_BLOCKS) | golden(ggml)

    def with_lanes(cpu: str, lanes: str = "all") -> Arrays:
        return run(cpu, lanes)

    return with_lanes


def of_types(found: Arrays, names: tuple[str, ...]) -> list[str]:
    """The products of matrices of some types."""
    keys = [key for key in found if key.startswith(("product/", "experts/"))]
    return [key for key in keys if key.split("/")[1].split()[0] in names]


@pytest.mark.parametrize("name", CPUS)
def test_a_cpu_takes_the_best_kernels_that_it_can(emulated: Emulated, name: str) -> None:
    assert emulated(CPUS[name])["lanes"] == name


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("kind", ["product", "experts"])
def test_a_column_is_the_same_in_every_batch(emulated: Emulated, kind: str, name: str) -> None:
    found = emulated(CPUS[name])
    assert len(list(cases(found, kind))) > 20
    assert differing(found, kind) == []


@pytest.mark.parametrize("name", KERNELS)
def test_strided_rows_equal_those_of_the_whole_matrix(emulated: Emulated, name: str) -> None:
    check_strided_rows(emulated(CPUS[name]))


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("type_", SUPER_BLOCKS)
def test_quants_of_256_have_the_bits_of_x86(emulated: Emulated, type_: str, name: str) -> None:
    assert sha256(emulated(CPUS[name])[f"golden/{type_}"].tobytes()).hexdigest() == GOLDEN[type_]


def test_quants_have_the_same_bits_with_matrix_and_with_dot_products(emulated: Emulated) -> None:
    best, dots = emulated("max"), emulated("max", "all,dotprod")
    assert (best["lanes"], dots["lanes"]) == ("NEON_I8MM", "NEON_DOTPROD")
    keys = of_types(best, (*SUPER_BLOCKS, "Q8_0"))
    assert len(keys) > 100
    assert [key for key in keys if best[key].tobytes() != dots[key].tobytes()] == []


@pytest.mark.parametrize("name", KERNELS)
def test_products_are_those_of_ggml_but_for_rounding(emulated: Emulated, name: str) -> None:
    ours, off = emulated(CPUS[name]), emulated(CPUS[name], "0")
    assert off["lanes"] == ""
    for key in of_types(off, PATCHED):
        error = np.square(ours[key].astype(np.float64) - off[key]).sum()
        assert error <= MAX_NMSE * np.square(off[key].astype(np.float64)).sum(), key


def test_types_slower_for_one_column_keep_the_kernels_of_ggml(emulated: Emulated) -> None:
    unasked, ours, off = (emulated("max", lanes) for lanes in ("", "all", "0"))
    for key in of_types(ours, DEARER):
        assert unasked[key].tobytes() == off[key].tobytes(), key
    assert any(ours[k].tobytes() != off[k].tobytes() for k in of_types(ours, DEARER))
    for key in of_types(ours, SUPER_BLOCKS):
        assert unasked[key].tobytes() == ours[key].tobytes(), key

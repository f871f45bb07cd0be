"""The CPUs that portable libraries are compiled for.

Wheels run on other machines than the one that builds them. So they have one libggml-cpu for each of
these CPUs, and native/runtime.py loads the best one that runs.
"""

import platform
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class CpuVariant:
    """A libggml-cpu of a portable build.

    name: its folder. needs: the instruction sets that it uses beyond the machine's baseline, named
    as in /proc/cpuinfo. options: for cmake.
    """

    name: str
    needs: tuple[str, ...]
    options: tuple[str, ...]


# What each option of ggml needs beyond the baseline, which is SSE 4.2.
_X86_OPTIONS = {
    "SSE42": (),
    "AVX": ("avx",),
    "AVX2": ("avx2",),
    "F16C": ("f16c",),
    "FMA": ("fma",),
    "BMI2": ("bmi2",),
    "AVX512": ("avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"),
    "AVX512_VNNI": ("avx512_vnni",),
    "AVX512_BF16": ("avx512_bf16",),
}
_HASWELL = "SSE42 AVX AVX2 F16C FMA BMI2"


def cpu_variants() -> list[CpuVariant]:
    """The variants for this kind of machine, best first; the last one needs the baseline only."""
    machine = platform.machine()
    if machine == "x86_64":
        return [
            # Without VNNI, our kernels use AVX2; no code of ggml's uses VBMI.
            _x86("cooperlake", f"{_HASWELL} AVX512 AVX512_VNNI AVX512_BF16"),
            _x86("cascadelake", f"{_HASWELL} AVX512 AVX512_VNNI"),
            _x86("haswell", _HASWELL),
            _x86("x86-64-v2", "SSE42"),
        ]
    if machine == "aarch64":
        return [
            _arm("armv8.6", "asimddp asimdhp sve i8mm", "armv8.6-a+dotprod+fp16+sve+i8mm"),
            _arm("armv8.2", "asimddp asimdhp", "armv8.2-a+dotprod+fp16"),
            _arm("armv8", "", "armv8-a"),
        ]
    # On Apple, the compiler's default is the first of these CPUs, and prompts run on the GPU.
    return [CpuVariant(f"{machine}-{sys.platform}", (), ("-DGGML_NATIVE=OFF",))]


def _x86(name: str, options: str) -> CpuVariant:
    on = options.split()
    needs = [feature for option in on for feature in _X86_OPTIONS[option]]
    states = [f"-DGGML_{option}={'ON' if option in on else 'OFF'}" for option in _X86_OPTIONS]
    return CpuVariant(name, tuple(needs), ("-DGGML_NATIVE=OFF", *states))


def _arm(name: str, needs: str, architecture: str) -> CpuVariant:
    options = ("-DGGML_NATIVE=OFF", f"-DGGML_CPU_ARM_ARCH={architecture}")
    return CpuVariant(name, tuple(needs.split()), options)


if __name__ == "__main__":  # for llama-cpp-python's own libraries, which have no variants
    print(*cpu_variants()[-1].options)

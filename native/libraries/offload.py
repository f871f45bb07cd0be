"""What llama.cpp puts on which device: checks of MTPLlama's options, and overrides of tensors."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from typing import Any

from .._bindings import library
from ..errors import NativeError
from .devices import buffer_type, devices
from .loaded import has_gpu

_EXPERTS = r"^blk\.({})\.ffn_[a-z_]*_(ch)?exps\."
_ALL_LAYERS = 512  # LLAMA_MAX_LAYERS
_MOST_LAYERS = 2**31 - 1
_SPLIT_MODES = ("none", "layer", "row", "tensor")  # llama_split_mode


class TensorOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override of llama.h, which llama_cpp does not declare."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def check_gpu_layers(n_gpu_layers: Any) -> None:
    """NativeError unless this is a number of layers, or -1 for all.

    More layers than the model has are all of its layers, as in llama.cpp.
    """
    if not isinstance(n_gpu_layers, int) or not -1 <= n_gpu_layers <= _MOST_LAYERS:
        raise NativeError(
            f"n_gpu_layers: expected -1 (all) to {_MOST_LAYERS}, found {n_gpu_layers!r}"
        )


def gpu_names() -> list[str]:
    """Ggml's names of the GPUs, in the order in which llama.cpp numbers them."""
    found = [library().mtp_gpu_name(i).decode() for i in range(len(devices()))]
    return [name for name in found if name != "CPU"]


def check_split(options: Mapping[str, Any]) -> None:
    """NativeError unless split_mode, tensor_split and main_gpu fit llama.cpp and the GPUs here."""
    mode, shares, main = (options.get(n) for n in ("split_mode", "tensor_split", "main_gpu"))
    if mode is not None and mode not in range(len(_SPLIT_MODES)):
        modes = ", ".join(f"{i} ({name})" for i, name in enumerate(_SPLIT_MODES))
        raise NativeError(f"split_mode: expected one of {modes}, found {mode!r}")
    gpus = gpu_names() if options.get("n_gpu_layers", 0) else []
    if main is not None and (not isinstance(main, int) or main < 0 or (gpus and main >= len(gpus))):
        most = f"0 to {len(gpus) - 1} ({', '.join(gpus)})" if gpus else "0 or more"
        raise NativeError(f"main_gpu: expected {most}, found {main!r}")
    if shares is None:
        return
    if not all(isinstance(s, int | float) and 0 <= s < math.inf for s in shares) or not any(shares):
        raise NativeError(f"tensor_split: expected numbers of which one is not 0, found {shares}")
    if gpus and len(shares) > len(gpus):
        raise NativeError(
            f"tensor_split: expected {len(gpus)} shares or fewer, of {', '.join(gpus)}, found "
            f"{len(shares)}"
        )


def last_gpu(options: Mapping[str, Any]) -> str:
    """Ggml's name of the device of the trunk's last layer, as `check_split` has accepted it."""
    gpus = gpu_names() if options.get("n_gpu_layers", 0) else []
    if not gpus:
        return "CPU"
    if options.get("split_mode") == 0:
        return gpus[options.get("main_gpu") or 0]
    shares = options.get("tensor_split") or [1] * len(gpus)
    return gpus[max(i for i, share in enumerate(shares) if share > 0)]


def missing_gpu(option: str, n_gpu_layers: int) -> str | None:
    """Return a warning, about `option`, if layers should go on a GPU and there is none."""
    if n_gpu_layers == 0 or has_gpu():
        return None
    return (
        f"{option}{n_gpu_layers}: llama.cpp found no GPU that it can use and runs all layers on "
        "the CPU; docs/gpu.md says how to install it with a GPU backend"
    )


def usable_gpu_layers(gpu_layers: int, say: Callable[[str], None]) -> int:
    """How many layers of -ngl can go on a GPU: 0, after saying why, if llama.cpp has none."""
    note = missing_gpu("-ngl ", gpu_layers)
    if note is None:
        return gpu_layers
    say(f"mtp-gguf: {note}")
    return 0


def idle_cpu_moe(n_cpu_moe: int, n_gpu_layers: int, metadata: Mapping[str, str]) -> str | None:
    """Return a warning if experts should stay on the CPU and none of them would leave it.

    metadata: the loaded model's, with all values as text.
    """
    if n_cpu_moe == 0:
        return None
    experts = metadata.get(f"{metadata.get('general.architecture')}.expert_count", "0")
    if experts == "0":
        why = "the model has no experts"
    elif n_gpu_layers == 0:
        why = "all layers run on the CPU"
    else:
        return None  # without a GPU, missing_gpu warns
    return f"n_cpu_moe: has no effect, because {why}"


def check_device(option: str, name: str) -> None:
    """NativeError, naming `option`, unless ggml has a device of this name."""
    names = [device.name for device in devices()]
    if name not in names:
        raise NativeError(f"{option}: expected one of {', '.join(names)}, found {name!r}")


def tensor_overrides(n_cpu_moe: int, overrides: Mapping[str, str]) -> Any:
    """The array for llama_model_params.tensor_buft_overrides, which must outlive the loading.

    n_cpu_moe: the experts of the first so many layers stay on the CPU. overrides: ggml's name of a
    device for each regular expression, which is searched in the names of tensors; the first that
    is found decides, and the experts come last.
    """
    if not isinstance(n_cpu_moe, int) or not 0 <= n_cpu_moe <= _MOST_LAYERS:
        raise NativeError(f"n_cpu_moe: expected 0 to {_MOST_LAYERS}, found {n_cpu_moe!r}")
    places = [*overrides.items()]
    for pattern, device in places:
        if not pattern:
            raise NativeError("tensor_overrides: expected a regular expression, found ''")
        check_device(f"tensor_overrides[{pattern!r}]", device)
    if n_cpu_moe:
        blocks = "|".join(map(str, range(n_cpu_moe))) if n_cpu_moe < _ALL_LAYERS else "[0-9]+"
        places.append((_EXPERTS.format(blocks), "CPU"))
    array = (TensorOverride * (len(places) + 1))()  # the last one, with NULL, ends it
    for entry, (pattern, device) in zip(array, places, strict=False):
        entry.pattern, entry.buft = pattern.encode(), buffer_type(device)
    return array

"""Checks of a model file before llama.cpp loads it."""

from pathlib import Path

import jinja2

from mtp_gguf.gguf_tools.errors import FormatError, MtpGgufError
from mtp_gguf.gguf_tools.files.format import ValueType, open_gguf
from mtp_gguf.gguf_tools.files.loadable import load_faults
from mtp_gguf.gguf_tools.machine.text import printable
from mtp_gguf.gguf_tools.model import open_model

from ..errors import ModelRefusedError

# The errors of compiling a chat template: Jinja's own, and Python's about the code Jinja generates.
TEMPLATE_ERRORS = (jinja2.TemplateError, SyntaxError, RecursionError)


def template_fault(error: BaseException) -> str:
    """Describe an error in a model's chat template, which llama_cpp compiles on loading."""
    return f"tokenizer.chat_template: expected a Jinja template, found an error in it: {error}"


def check_name(path: Path) -> None:
    """Raise ModelRefusedError for a path that is no valid text, which llama_cpp cannot pass on."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ModelRefusedError(
            f"{printable(str(path))}: expected a path in UTF-8, found other bytes in it; rename "
            "the file or its folder"
        ) from None


def check_trunk(model: Path) -> str | None:
    """Return a model's architecture; None if llama.cpp has to report what is wrong with the file.

    Raises ModelRefusedError for a file that llama.cpp would crash on instead of rejecting it.

    That is a file that the strict reader rejects, a head without a trunk, or one with a fault that
    `load_faults` finds. `mtp-gguf doctor --load` finds faults that the header does not show.
    """
    if not model.exists():
        return None  # llama_cpp reports it
    try:
        with open_model(model) as opened:
            alone = opened.head.is_alone and opened.head.report.ready
            faults = load_faults(opened)
            architecture = opened.architecture
    except FormatError as error:
        raise ModelRefusedError(str(error)) from None
    except (MtpGgufError, OSError):
        return None  # llama.cpp reports what it cannot read
    if alone:
        raise ModelRefusedError(
            f"{model}: expected a model, found only an MTP head; load the model that it is for, "
            "with this file as its head"
        )
    if faults:
        more = f" (and {len(faults) - 1} more faults)" if len(faults) > 1 else ""
        raise ModelRefusedError(
            f"{model}: {faults[0]}{more}; llama.cpp would crash on it: convert or download it again"
        )
    return architecture


def check_adapter(path: Path, architecture: str | None) -> None:
    """Raise ModelRefusedError unless a file says that it is a LoRA adapter.

    architecture: of the model that it is for; None if unknown. llama.cpp crashes on keys of the
    wrong type, and llama_cpp uses an adapter that llama.cpp has refused.
    """
    check_name(path)
    if not path.exists():
        raise ModelRefusedError(f"lora_path: expected a LoRA adapter, found no file {path}")
    wanted = {"general.type": "adapter", "adapter.type": "lora"}
    if architecture is not None:
        wanted["general.architecture"] = architecture
    try:
        with open_gguf(path) as file:
            found = {key: file.scalar(key) for key in wanted}
            alpha = file.types.get("adapter.lora.alpha", ValueType.F32)
    except MtpGgufError as error:
        raise ModelRefusedError(
            f"{error}; a LoRA adapter has to be a GGUF, as llama.cpp's convert_lora_to_gguf.py "
            "writes it"
        ) from None
    for key, value in wanted.items():
        if found[key] != value:
            raise ModelRefusedError(
                f"{path}: {key}: expected {value} for a LoRA adapter of this model, found "
                f"{'none' if found[key] is None else found[key]}"
            )
    if alpha is not ValueType.F32:
        raise ModelRefusedError(
            f"{path}: adapter.lora.alpha: expected type F32, found {alpha.name}"
        )

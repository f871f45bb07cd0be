"""What a file must be before llama.cpp is given it as a model."""

from pathlib import Path

import jinja2

from mtp_gguf.gguf_tools.errors import FormatError, MtpGgufError
from mtp_gguf.gguf_tools.loadable import load_faults
from mtp_gguf.gguf_tools.model import open_model

from .errors import ModelRefusedError

# What compiling a chat template raises: Jinja's own errors, and Python's over what Jinja makes.
TEMPLATE_ERRORS = (jinja2.TemplateError, SyntaxError, RecursionError)


def template_fault(error: BaseException) -> str:
    """Say what is wrong with a model's chat template, which llama_cpp compiles when it loads."""
    return f"tokenizer.chat_template: expected a Jinja template, found an error in it: {error}"


def check_trunk(model: Path) -> None:
    """Refuse, with ModelRefusedError, what llama.cpp would crash on instead of refusing it.

    That is a file which the strict reader does not take, a head alone, and whatever `load_faults`
    finds. What no header shows is found by `mtp-gguf doctor --load`.
    """
    if not model.exists():
        return  # llama_cpp says so
    try:
        with open_model(model) as opened:
            alone = opened.head.is_alone and opened.head.report.ready
            faults = load_faults(opened)
    except FormatError as error:
        raise ModelRefusedError(str(error)) from None
    except (MtpGgufError, OSError):
        return  # llama.cpp says what it cannot read
    if alone:
        raise ModelRefusedError(
            f"{model}: expected a model, found a head alone; load the model that it belongs to, "
            "with this file as its head"
        )
    if faults:
        more = f" (and {len(faults) - 1} faults more)" if len(faults) > 1 else ""
        raise ModelRefusedError(
            f"{model}: {faults[0]}{more}; llama.cpp would crash on it: convert or fetch it anew"
        )

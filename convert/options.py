"""The options that conversions and grafts share, and their checks. Quick to import."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from mtp_gguf.gguf_tools.errors import OptionError
from mtp_gguf.gguf_tools.files.torch_file import SUFFIXES as WEIGHT_SUFFIXES
from mtp_gguf.gguf_tools.heads.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.hub.remote import hub_model

StrPath: TypeAlias = str | Path

DEFAULT_QUANT = "Q4_K_M"  # of the base
DEFAULT_HEAD_TYPE = "Q8_0"
DEFAULT_LAYOUT = DraftLayout.IDS
BPW_RANGE = 1.0, 16.0  # of --target-bpw
LEAST_KLD = 1e-9  # of --target-kld
PREFERENCES = "quality", "speed"  # of --prefer
DEFAULT_SIZE = -1  # stands for --fastmtp without a number

_SEPARATORS = tuple(filter(None, (os.sep, os.altsep)))


@dataclass(frozen=True)
class DraftOptions:
    """The options for a draft vocabulary; `size` None means the default.

    It is ranked by the ids file if there is one, else by the corpus, else by id.
    """

    wanted: bool = False
    size: int | None = None
    corpus: tuple[Path, ...] = ()
    ids_file: Path | None = None
    layout: DraftLayout = DEFAULT_LAYOUT

    @classmethod
    def parse(
        cls,
        size: int | None,
        corpus: Sequence[Path] | None,
        ids_file: Path | None,
        prefix: str = "--fastmtp-",
    ) -> "DraftOptions":
        """Check and return the options; OptionError if they contradict each other.

        prefix: the first part of the option names for corpus and ids in this command.
        """
        if corpus and ids_file:
            raise OptionError(f"{prefix}ids and {prefix}corpus contradict each other")
        if size is not None and size < 1 and size != DEFAULT_SIZE:
            raise OptionError(f"expected a size from 1, found {size}", option="--fastmtp")
        for path in corpus or ():
            if path.suffix == ".gguf":
                raise OptionError(
                    f"expected text files, found a GGUF: {path}", option=f"{prefix}corpus"
                )
        wanted = bool(size is not None or corpus or ids_file)
        return cls(wanted, None if size == DEFAULT_SIZE else size, tuple(corpus or ()), ids_file)

    @classmethod
    def of(
        cls,
        size: int | bool | None,
        corpus: StrPath | Sequence[StrPath] = (),
        ids_file: StrPath | None = None,
    ) -> "DraftOptions":
        """Check and return the arguments of a Python function. size: True means the default."""
        files = [Path(path) for path in listed(corpus)]
        return cls.parse(draft_size(size), files, None if ids_file is None else Path(ids_file))

    @property
    def files(self) -> list[Path]:
        """The files to read, which the output must not replace."""
        return [*self.corpus, *([self.ids_file] if self.ids_file else [])]


def draft_size(size: int | bool | None) -> int | None:
    """The size as a command has it: DEFAULT_SIZE for True, None for False."""
    if isinstance(size, bool):
        return DEFAULT_SIZE if size else None
    return size


def listed(values: StrPath | Sequence[StrPath]) -> tuple[str, ...]:
    """Several values, or the only one, as texts."""
    return (str(values),) if isinstance(values, str | Path) else tuple(map(str, values))


def head_type_named(mtp_f16: bool, mtp_type: str | None) -> str | None:
    """The name of the head's type that --mtp-f16 or --mtp-type asks for; None without them."""
    if mtp_f16 and mtp_type and mtp_type.upper() != "F16":
        raise OptionError("--mtp-f16 and another --mtp-type contradict each other")
    return "F16" if mtp_f16 else mtp_type


def check_range(option: str, value: float | None, least: float, most: float | None = None) -> None:
    """OptionError for a number outside of the range."""
    highest = float("inf") if most is None else most
    if value is not None and not least <= value <= highest:
        wanted = f"at least {least:g}" if most is None else f"{least:g} to {most:.12g}"
        raise OptionError(f"expected {wanted}, found {value}", option)


def check_revision(model: str, revision: str | None) -> None:
    """OptionError for --revision if the model has none, or includes one in its name."""
    if revision is None:
        return
    hub = hub_model(model)
    if hub is None:
        raise OptionError(f"--revision is for models on the hub, and {model} is not there")
    if hub.revision is not None:
        raise OptionError(f"--revision and {model} contradict each other")


def output_file(text: str) -> Path:
    """The path of a file to write, or of an existing folder for it; else OptionError."""
    path = Path(text)
    if text == "-":
        raise OptionError(
            "expected a file or a folder, found -; weights are written at offsets, which standard "
            "output does not have"
        )
    if text.endswith(_SEPARATORS) and not path.is_dir():
        raise OptionError(
            f"expected a folder that exists, found no {text}; create it: mkdir -p "
            f"{shlex.quote(text)}"
        )
    return path


def gguf_output(text: str) -> Path:
    """The path of a GGUF to write, or of an existing folder for it; else OptionError."""
    path = output_file(text)
    if path.suffix in WEIGHT_SUFFIXES and not path.is_dir():
        raise OptionError(
            f"expected a name for a GGUF, such as {path.with_suffix('.gguf')}, found {path}, which "
            "names another format"
        )
    return path

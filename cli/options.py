"""The options that commands share, each defined once, and the command class that parses them.

An option has the same spelling in every command; former spellings and those of llama.cpp are read,
too.
"""

import re
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeAlias

import typer
from typer.core import TyperCommand, TyperGroup

from mtp_gguf.convert.options import DEFAULT_SIZE, gguf_output, output_file
from mtp_gguf.gguf_tools.errors import MtpGgufError, RequestError
from mtp_gguf.gguf_tools.files.format import MAGIC
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME, TensorType
from mtp_gguf.gguf_tools.machine.shell import as_argument
from mtp_gguf.gguf_tools.machine.system import LARGEST_CONTEXT, MAX_THREADS

from .console import CONSOLE
from .help import ReadableHelp
from .progress import USAGE_ERROR, print_json_error, usage_errors

DRAFT = "FastMTP draft vocabulary"  # panel of the help
# Options in other panels.
head_option = partial(typer.Option, rich_help_panel="MTP head")
sampling_option = partial(typer.Option, rich_help_panel="Sampling")

SEEDS = (1 << 32) - 1  # of samplers; this one is llama.cpp's -1, which stands for a random seed
_UNITS = {"": 1, "s": 1, "m": 60, "h": 3600}
_LONGEST_BUDGET = 7 * 24 * 3600

# Other spellings, by ours. If a command uses one for another option, that option wins.
_ELSEWHERE = {  # in llama.cpp and mlx-lm; the help names them
    "--ctx": ("--ctx-size",),
    "--depth": ("--spec-draft-n-max",),
    "--gpu-layers": ("--n-gpu-layers",),
    "--quant": ("--outtype",),
    "--prompt-file": ("--file",),
    "--stop": ("--reverse-prompt",),
    "--system": ("--system-prompt",),
    "--temp": ("--temperature",),
    "--tokens": ("--predict", "--n-predict", "--max-tokens"),
}
_FORMER = {  # in earlier versions; the help does not name them
    "--ctx": ("--context",),
    "--from": ("--mtp-from", "--source"),
    "--prompt-file": ("--prompts",),
    "--size": ("-n",),
}
_MODEL = ("-m", "--model")  # llama.cpp's, for the argument MODEL


def parse_output(text: str) -> Path:
    """Parse the path of a file to write, or of an existing folder for it."""
    with usage_errors():
        return output_file(text)


def parse_gguf_output(text: str) -> Path:
    """Parse the path of a GGUF to write, or of an existing folder for it."""
    with usage_errors():
        return gguf_output(text)


def output_option(text: str, parser: Callable[[str], Path] = parse_gguf_output) -> Any:
    """Return the option -o PATH with this help."""
    return typer.Option("-o", "--output", metavar="PATH", parser=parser, help=text)


def text_option(text: str) -> Any:
    """Return the option --text FILE… with this help."""
    return typer.Option("--text", metavar="FILE…", help=text)


def prompt_files_option(text: str) -> Any:
    """Return the option -f FILE… with this help."""
    return typer.Option("-f", "--prompt-file", metavar="FILE…", help=text)


def head_type_option(text: str, **more: Any) -> Any:
    """Return the option --mtp-type with this help; more: other arguments of typer.Option."""
    return head_option("--mtp-type", help=text, **more)


def corpus_option(name: str, panel: str | None = None) -> Any:
    """Return the option that ranks the tokens of a draft vocabulary by text files."""
    text = "Rank tokens by these text files (default: by token id)."
    return typer.Option(name, metavar="FILE…", rich_help_panel=panel, help=text)


def ids_option(name: str, panel: str | None = None) -> Any:
    """Return the option that reads a draft vocabulary from a file."""
    text = "Read ranked token ids from a JSON, .npy or text file."
    return typer.Option(name, metavar="FILE", rich_help_panel=panel, help=text)


def depth_option(panel: str | None = None) -> Any:
    """Return the option --depth of a command that generates text."""
    text = (
        "Draft N tokens per cycle, 0: none; auto: as many as pay off (default: as tuned, else "
        "auto)."
    )
    return typer.Option(metavar="N|auto", rich_help_panel=panel, help=text)


# A model to read, for `open_any_model`.
ModelFile: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="GGUF with an MTP head (any shard); also OWNER/NAME:QUANT or hf://OWNER/NAME/FILE on "
        "the hub, https://….",
    ),
]
# A model to run, for `local_model`.
ModelName: TypeAlias = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="GGUF with an MTP head (any shard), or one on the hub, which is downloaded: "
        "OWNER/NAME:QUANT, hf://OWNER/NAME/FILE.",
    ),
]
HeadFile: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--head",
        metavar="FILE",
        help="Take the head from this GGUF, local or on the hub (default: the model's own, or one "
        "beside it).",
    ),
]
LoadedType: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--mtp-type",
        metavar="TYPE|auto",
        help="Quantize the head to this type, such as Q8_0, while loading; auto: the fastest that "
        "loses no drafts, measured once for a model (default: as stored).",
    ),
]
MtpF16: TypeAlias = Annotated[
    bool,
    head_option(
        "--mtp-f16",
        help="Store the head's matrices in F16; short for --mtp-type F16.",
    ),
]
FastMtp: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--fastmtp",
        metavar="[N]",
        rich_help_panel=DRAFT,
        help="Add a draft vocabulary of N tokens (default: 32768).",
    ),
]
FastMtpCorpus: TypeAlias = Annotated[list[Path] | None, corpus_option("--fastmtp-corpus", DRAFT)]
FastMtpIds: TypeAlias = Annotated[Path | None, ids_option("--fastmtp-ids", DRAFT)]
Revision: TypeAlias = Annotated[
    str | None,
    typer.Option("--revision", help="Use this branch, tag or commit on the hub (default: main)."),
]
Overwrite: TypeAlias = Annotated[
    bool, typer.Option("--overwrite", help="Replace an existing output.")
]
NoCheck: TypeAlias = Annotated[
    bool, typer.Option("--no-check", help="Do not measure the acceptance rate.")
]
LeastAcceptance: TypeAlias = Annotated[
    float,
    typer.Option(
        "--least-acceptance",
        min=0.0,
        max=1.0,
        help="Report a head as bad if fewer of its first drafts are accepted.",
    ),
]
Force: TypeAlias = Annotated[
    bool, typer.Option("--force", help="Use a head that accepts far fewer drafts than its source.")
]
AsJson: TypeAlias = Annotated[
    bool, typer.Option("--json", help="Print one JSON object, also for an error.")
]
Filter: TypeAlias = Annotated[
    str | None,
    typer.Option("--filter", metavar="REGEX", help="Show only tensors whose name matches REGEX."),
]
Context: TypeAlias = Annotated[
    int,
    typer.Option(
        "-c",
        "--ctx",
        min=0,
        max=LARGEST_CONTEXT,
        help="Size of the context in tokens; 0: the model's own.",
    ),
]
Temperature: TypeAlias = Annotated[
    float, typer.Option("--temp", min=0.0, max=100.0, help="Sample at this temperature; 0: greedy.")
]
TopK: TypeAlias = Annotated[
    int | None,
    sampling_option(
        "--top-k",
        min=0,
        help="Sample from the K likeliest tokens; 0: all (default: the file's, else 40).",
    ),
]
TopP: TypeAlias = Annotated[
    float | None,
    sampling_option(
        "--top-p",
        min=0.0,
        max=1.0,
        help="Sample from the likeliest tokens that add up to P; 1: all (default: the file's, else "
        "0.95).",
    ),
]
MinP: TypeAlias = Annotated[
    float | None,
    sampling_option(
        "--min-p",
        min=0.0,
        max=1.0,
        help="Drop tokens less likely than P times the likeliest; 0: none (default: the file's, "
        "else 0.05).",
    ),
]
RepeatPenalty: TypeAlias = Annotated[
    float | None,
    sampling_option(
        "--repeat-penalty",
        min=0.0,
        max=100.0,
        help="Penalize repeated tokens by this factor; 1: none (default: the file's, else 1).",
    ),
]
PresencePenalty: TypeAlias = Annotated[
    float,
    sampling_option(
        "--presence-penalty",
        min=-100.0,
        max=100.0,
        help="Lower the logits of tokens that occurred by this; 0: none.",
    ),
]
FrequencyPenalty: TypeAlias = Annotated[
    float,
    sampling_option(
        "--frequency-penalty",
        min=-100.0,
        max=100.0,
        help="Lower the logit of a token by this for each time it occurred; 0: none.",
    ),
]
Seed: TypeAlias = Annotated[
    int,
    sampling_option(
        "-s",
        "--seed",
        min=-1,
        max=SEEDS,
        help="Seed the sampler with this number; -1: a random one.",
    ),
]
Stop: TypeAlias = Annotated[
    list[str] | None,
    typer.Option(
        "-r",
        "--stop",
        metavar="TEXT",
        help="Stop before this text, which is not printed; repeatable.",
    ),
]
System: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "-sys", "--system", metavar="TEXT", help="Begin the conversation with this system message."
    ),
]
Lora: TypeAlias = Annotated[
    Path | None,
    typer.Option("--lora", metavar="FILE", help="Apply this LoRA adapter (GGUF) to the trunk."),
]
Mmproj: TypeAlias = Annotated[
    Path | None,
    typer.Option(
        "-mm",
        "--mmproj",
        metavar="FILE",
        help="See pictures with this vision tower (default: the one beside the model).",
    ),
]
Images: TypeAlias = Annotated[
    list[Path] | None,
    typer.Option("--image", metavar="FILE…", help="Show these pictures with the prompt."),
]
Threads: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "-t",
        "--threads",
        min=1,
        max=MAX_THREADS,
        help="Number of CPU threads (default: the performance cores it may use).",
    ),
]
GpuLayers: TypeAlias = Annotated[
    int,
    typer.Option("-ngl", "--gpu-layers", min=-1, help="Put this many layers on the GPU; -1: all."),
]
CpuMoe: TypeAlias = Annotated[
    int,
    typer.Option(
        "--n-cpu-moe", min=0, help="Keep the experts of the first N layers on the CPU (for -ngl)."
    ),
]
PromptSets: TypeAlias = Annotated[
    str,
    typer.Option("--prompts", metavar="SET,…", help="Measure with these built-in prompts."),
]
PromptFiles: TypeAlias = Annotated[
    list[Path] | None,
    prompt_files_option("Also measure with the prompt in each file."),
]
Raw: TypeAlias = Annotated[
    bool, typer.Option("--raw", help="Continue the prompts without the chat template.")
]
WindowSize: TypeAlias = Annotated[
    int, typer.Option("-c", "--ctx", min=16, max=1 << 16, help="Read windows of N tokens.")
]
Windows: TypeAlias = Annotated[
    int | None,
    typer.Option("--chunks", min=1, help="Read at most N windows (default: the whole text)."),
]
NoColor: TypeAlias = Annotated[
    bool, typer.Option("--no-color", help="Do not color tokens by their source.")
]
Budget: TypeAlias = Annotated[
    str | None,
    typer.Option(
        "--budget",
        metavar="TIME",
        help="Measure about this long, such as 90s, 5m or 1h, and skip lower-priority "
        "measurements to fit (default: 5m).",
    ),
]
Full: TypeAlias = Annotated[
    bool, typer.Option("--full", help="Measure everything, however long that takes.")
]
AnswerTokens: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "-n",
        "--tokens",
        min=2,
        max=4096,
        help="Generate this many tokens per answer (default: as many as the budget allows).",
    ),
]
Rounds: TypeAlias = Annotated[
    int | None,
    typer.Option(
        "--rounds",
        min=1,
        max=1000,
        help="Measure this many rounds (default: as many as the budget allows).",
    ),
]


Passed: TypeAlias = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- OPTIONS]", help="Options for llama-server itself."),
]
Host: TypeAlias = Annotated[str, typer.Option("--host", help="Listen at this address.")]
Port: TypeAlias = Annotated[
    int, typer.Option("--port", min=1, max=65535, help="Listen at this port.")
]


class CacheType(str, Enum):
    """Types of the KV cache, as llama.cpp allows them."""

    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    Q8_0 = "q8_0"
    Q4_0 = "q4_0"
    Q4_1 = "q4_1"
    IQ4_NL = "iq4_nl"
    Q5_0 = "q5_0"
    Q5_1 = "q5_1"

    @property
    def tensor_type(self) -> TensorType:
        """This type in ggml's table."""
        return BY_NAME[self.value.upper()]


CacheTypeK: TypeAlias = Annotated[
    CacheType | None,
    typer.Option(
        "-ctk", "--cache-type-k", help="Store the keys of the KV cache in this type (default: f16)."
    ),
]
CacheTypeV: TypeAlias = Annotated[
    CacheType | None,
    typer.Option(
        "-ctv",
        "--cache-type-v",
        help="Store the values of the KV cache in this type (default: f16).",
    ),
]


def sampler_seed(seed: int) -> int:
    """Return the seed to use for --seed: a random number if it asks for one."""
    return secrets.randbelow(SEEDS) if seed in (-1, SEEDS) else seed


class Group(ReadableHelp, TyperGroup):
    """A command of commands."""


class Command(ReadableHelp, TyperCommand):
    """A command that accepts lists of files, bare options and other spellings.

    An option with a metavar such as `FILE…` takes all files that follow it (`--corpus notes/*.txt
    MODEL`), and one such as `[N]` its default if no such value follows. `-m MODEL` is read as
    MODEL.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        others = [f"{_MODEL[0]} (MODEL)"] if self._takes_model() else []
        for param in self.params:
            if names := self._other(param, (_ELSEWHERE,)):
                ours = next(name for name in param.opts if name in _ELSEWHERE)
                others.append(f"{', '.join(names)} ({ours})")
        if others:
            self.epilog = f"Also accepted: {'; '.join(others)}."

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments; with --json, print a usage error as JSON too."""
        try:
            if self._takes_model():
                args = _with_model_first(args, set(self._value_options()))
            return super().parse_args(
                ctx, _with_lists(args, set(self._list_options()), self._bare_options())
            )
        except USAGE_ERROR as error:
            error.message = error.message.removeprefix("Value error, ")  # pydantic's
            if "--json" in args:
                print_json_error(error.format_message(), error.exit_code)
            raise

    def make_parser(self, ctx: Any) -> Any:
        """Return the parser, which also accepts the other spellings."""
        parser = super().make_parser(ctx)
        for param in self.params:
            if names := self._other(param):
                alias = copy(param)
                alias.opts, alias.secondary_opts = names, []
                alias.add_to_parser(parser, ctx)
        return parser

    def _other(
        self, param: Any, tables: Sequence[Mapping[str, Sequence[str]]] = (_ELSEWHERE, _FORMER)
    ) -> list[str]:
        """Return other spellings of an option, except those of another option of this command."""
        used = {name for other in self.params for name in other.opts}
        names = [name for table in tables for own in param.opts for name in table.get(own, ())]
        return [name for name in names if name not in used]

    def _takes_model(self) -> bool:
        """Whether `-m MODEL` can stand for an argument of this command."""
        used = {name for param in self.params for name in param.opts}
        return not used & set(_MODEL) and any(
            param.param_type_name == "argument" and param.metavar == "MODEL"
            for param in self.params
        )

    def _value_options(self) -> Iterator[str]:
        """Yield the spellings of options that always take a value."""
        bare = self._bare_options()
        for param in self.params:
            flag = getattr(param, "is_flag", True)  # arguments have no such attribute
            if not flag and param.opts[0] not in bare:
                yield from (*param.opts, *self._other(param))

    def _bare_options(self) -> dict[str, "_Bare"]:
        """Return the options that may lack their value, by spelling."""
        held = ((param, _BARE.get(param.metavar or "")) for param in self.params)
        return {name: bare for param, bare in held if bare for name in param.opts}

    def _list_options(self) -> Iterator[str]:
        """Yield the spellings of options that take a list of files."""
        for param in self.params:
            if param.param_type_name == "option" and (param.metavar or "").endswith("…"):
                yield from (*param.opts, *self._other(param))


class _Bare(NamedTuple):
    """An option that may lack its value: whether a word is one, and the default."""

    fits: Callable[[str], bool]
    default: str


# By metavar.
_BARE = {
    "[N]": _Bare(str.isdecimal, str(DEFAULT_SIZE)),
    "[NAME]": _Bare(lambda word: word[:1] not in ("", "-") and not word.endswith(".gguf"), ""),
    "[TYPE]": _Bare(lambda word: word.upper() in BY_NAME, "F16"),
}


def _with_model_first(args: Sequence[str], with_value: Collection[str]) -> list[str]:
    """Move the value of `-m` to the front, where the argument MODEL is read.

    with_value: options whose value is the next word, whatever it is.
    """
    words = iter(args)
    models: list[str] = []
    rest: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if word == "--":
            return [*models, *rest, word, *words]
        if word in _MODEL and (following := next(words, None)) is not None:
            models.append(as_argument(following))
        elif equals and name == _MODEL[1]:
            models.append(as_argument(value))
        else:
            rest.append(word)
            if word in with_value and (following := next(words, None)) is not None:
                rest.append(following)
    return [*models, *rest]


def _with_lists(args: Sequence[str], lists: set[str], bare: Mapping[str, "_Bare"]) -> list[str]:
    """Give a bare option its value, and repeat a list option before each of its files.

    A list ends before an argument that is not a file, and before a GGUF, which is the model: it is
    one by its name, too, if its contents are damaged.
    """
    given: list[str] = []
    option = ""  # the list option that the next file belongs to
    for index, arg in enumerate(args):
        if arg == "--":
            return [*given, *args[index:]]
        if option and given[-1] != option:  # the first value may be any word, as with other options
            if _belongs_to_list(arg):
                given.append(option)
            else:
                option = ""
        if arg in lists:
            option = arg
        given.append(arg)
        following = args[index + 1] if index + 1 < len(args) else ""
        if arg in bare and not bare[arg].fits(following):
            given.append(bare[arg].default)
    return given


def _belongs_to_list(arg: str) -> bool:
    try:
        path = Path(arg)
        if arg.startswith("-") or path.suffix == ".gguf" or not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) != MAGIC
    except (OSError, ValueError):
        return False


@contextmanager
def usage_of(option: str) -> Iterator[None]:
    """Turn a RequestError about the value of `option` into a usage error."""
    try:
        yield
    except RequestError as error:
        text = str(error).removeprefix(f"{option}: ")
        raise typer.BadParameter(text, param_hint=option) from None


@contextmanager
def spelled(names: Mapping[str, str]) -> Iterator[None]:
    """Rename options in library errors to those of this command.

    names: the name in the error, and the option that the user typed for it.
    """
    try:
        yield
    except MtpGgufError as error:
        raise type(error)(with_options(names, str(error))) from None


def with_options(names: Mapping[str, str], text: str) -> str:
    """Rename options in a library's message, as `spelled` does."""
    pattern = "|".join(rf"(?<![\w-]){re.escape(name)}(?!-)" for name in names)
    return re.sub(pattern, lambda match: names[match[0]], text)


def usable_gpu_layers(gpu_layers: int) -> int:
    """Return how many layers can go on a GPU: 0, with a note, if llama.cpp has none."""
    if gpu_layers == 0:
        return 0
    from mtp_gguf.native.libraries import offload  # noqa: PLC0415  (loads llama.cpp)

    return offload.usable_gpu_layers(gpu_layers, CONSOLE.say)


def check_passed(words: Sequence[str] | None) -> None:
    """Raise a usage error unless the words for llama-server begin with an option."""
    if words and not words[0].startswith("-"):
        raise typer.BadParameter(f"expected llama-server's options after `--`, found {words[0]!r}")


def parse_budget(text: str | None, full: bool) -> float | None:
    """Return the seconds of --budget, or None for --full; a usage error for both together."""
    if full:
        if text is not None:
            raise typer.BadParameter("--full and --budget contradict each other")
        return None
    text = "5m" if text is None else text
    match = re.fullmatch(r"(\d{1,6}(?:\.\d{1,3})?) ?([smh]?)", text.strip().lower(), re.ASCII)
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not 0 < seconds <= _LONGEST_BUDGET:
        raise typer.BadParameter(
            f"expected a time such as 90s, 5m or 1h; found {text!r}", param_hint="--budget"
        )
    return seconds


def parse_bytes(text: str, option: str = "--split-max-size") -> int:
    """Parse bytes such as `5002496`, `500M` or `4G`; units are decimal as in llama.cpp."""
    units = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9}
    match = re.fullmatch(r"0*([1-9][0-9]{0,17})([KMG]?)", text, re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(
            "expected bytes, or a number and K, M or G (thousands, millions, billions of bytes), "
            f"such as 4G; found {text!r}",
            param_hint=option,
        )
    return int(match[1]) * units[match[2].upper()]


def parse_filter(pattern: str | None) -> re.Pattern[str]:
    """Compile the regular expression of --filter; without one, match everything."""
    try:
        return re.compile(pattern or "")
    except (re.error, OverflowError, RecursionError) as error:
        raise typer.BadParameter(
            f"{pattern!r} is not a regular expression: {error}", param_hint="--filter"
        ) from None

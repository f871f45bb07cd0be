"""`mtp-gguf generate`: complete a text with drafting, and report its statistics."""

import json
import secrets
import sys
from collections import Counter
from contextlib import closing
from dataclasses import asdict
from enum import Enum
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.profile import AUTO, AUTO_MAX_DEPTH, MAX_DEPTH

from . import token_colors
from .drafting_model import drafting_model
from .options import (
    AsJson,
    Context,
    CpuMoe,
    GpuLayers,
    HeadFile,
    ModelName,
    Temperature,
    Threads,
)
from .progress import reports_errors

if TYPE_CHECKING:
    from mtp_gguf.native.llama import MTPLlama
    from mtp_gguf.native.session import MtpStats

# Panels of the help.
_SAMPLING, _DRAFTING = "Sampling", "Drafting"

_LARGEST_INPUT = 16 << 20  # bytes of a prompt, a grammar or a schema
_SEEDS = (1 << 32) - 1  # llama.cpp's -1, which stands for a random seed


class RollbackMode(str, Enum):
    """Ways to roll back rejected drafts."""

    SNAPSHOT = "snapshot"
    CHECKPOINT = "checkpoint"
    TWO_PHASE = "two-phase"
    HOST = "host"


@reports_errors
def generate(
    model: ModelName,
    prompt: Annotated[
        str | None,
        typer.Option("-p", "--prompt", help="Continue this text (default: standard input)."),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            "-f",
            "--prompt-file",
            metavar="FILE",
            allow_dash=True,
            help="Continue the text of this file; -: standard input.",
        ),
    ] = None,
    chat: Annotated[
        bool,
        typer.Option(
            "--chat", help="Answer the prompt as a user message in the model's chat template."
        ),
    ] = False,
    n: Annotated[
        int,
        typer.Option(
            "-n",
            "--tokens",
            min=-1,
            help="Generate at most N tokens; 0 or -1: as many as the context holds.",
        ),
    ] = 256,
    context: Context = 4096,
    threads: Threads = None,
    gpu_layers: GpuLayers = 0,
    n_cpu_moe: CpuMoe = 0,
    temperature: Temperature = 0.0,
    top_k: Annotated[
        int,
        typer.Option(
            min=0, rich_help_panel=_SAMPLING, help="Sample from the K likeliest tokens; 0: all."
        ),
    ] = 40,
    top_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            rich_help_panel=_SAMPLING,
            help="Sample from the likeliest tokens that add up to P; 1: all.",
        ),
    ] = 0.95,
    min_p: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=1.0,
            rich_help_panel=_SAMPLING,
            help="Drop tokens less likely than P times the likeliest; 0: none.",
        ),
    ] = 0.05,
    repeat_penalty: Annotated[
        float,
        typer.Option(
            min=0.0,
            max=100.0,
            rich_help_panel=_SAMPLING,
            help="Penalize repeated tokens by this factor; 1: none.",
        ),
    ] = 1.0,
    seed: Annotated[
        int,
        typer.Option(
            min=-1,
            max=_SEEDS,
            rich_help_panel=_SAMPLING,
            help="Seed the sampler with this number; -1: a random one.",
        ),
    ] = 0,
    grammar_file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            rich_help_panel=_SAMPLING,
            help="Constrain the text to the GBNF grammar in this file.",
        ),
    ] = None,
    json_schema: Annotated[
        str | None,
        typer.Option(
            "-j",
            "--json-schema",
            metavar="SCHEMA",
            rich_help_panel=_SAMPLING,
            help="Constrain the text to JSON of this schema; {} for any JSON object.",
        ),
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto",
            rich_help_panel=_DRAFTING,
            help="Draft N tokens per cycle, 0: none; auto: as many as pay off (default: as tuned, "
            "else auto).",
        ),
    ] = None,
    max_depth: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=MAX_DEPTH,
            rich_help_panel=_DRAFTING,
            help=f"Draft at most N tokens with --depth auto (default: {AUTO_MAX_DEPTH}).",
        ),
    ] = None,
    head: HeadFile = None,
    lookup: Annotated[
        bool | None,
        typer.Option(
            "--lookup/--no-lookup",
            rich_help_panel=_DRAFTING,
            help="Also draft from earlier text (default: with depth auto and fast rollback).",
            show_default=False,
        ),
    ] = None,
    lookup_file: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            rich_help_panel=_DRAFTING,
            help="Also draft from this text file or folder of them; repeatable.",
        ),
    ] = None,
    rollback: Annotated[
        RollbackMode | None,
        typer.Option(
            rich_help_panel=_DRAFTING,
            help="Roll back rejected drafts this way (default: as tuned, else snapshot).",
        ),
    ] = None,
    exact: Annotated[
        bool,
        typer.Option(
            "--exact",
            rich_help_panel=_DRAFTING,
            help="Generate the same greedy text at every depth, to the byte.",
        ),
    ] = False,
    fastmtp_size: Annotated[
        int | None,
        typer.Option(
            min=-1,
            rich_help_panel=_DRAFTING,
            help="Use N rows of the draft vocabulary; 0: all, -1: no list (default: as tuned, "
            "else all).",
        ),
    ] = None,
    draft_threads: Annotated[
        int | None,
        typer.Option(
            min=0,
            rich_help_panel=_DRAFTING,
            help="Draft with N CPU threads; 0: as many as the trunk (default: as tuned, else 0).",
        ),
    ] = None,
    no_profile: Annotated[
        bool,
        typer.Option(
            "--no-profile",
            rich_help_panel=_DRAFTING,
            help="Ignore the settings that `mtp-gguf tune` found.",
        ),
    ] = False,
    plain: Annotated[
        bool, typer.Option("--no-color", help="Do not color tokens by their source.")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Report speed, acceptance, device and libraries.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Complete a text, drafting with the model's MTP head.

    On a terminal each token shows its source: accepted drafts are colored and underlined, with one
    color for each position in the draft and one for drafts from the text; tokens sampled by the
    trunk are plain.

    **Examples**

    mtp-gguf generate model.gguf -p "def quicksort(a):" -n 256 --stats

    mtp-gguf generate OWNER/NAME:Q4_K_M -p "def quicksort(a):"

    mtp-gguf generate model.gguf --chat --temp 0.7 --seed -1 -f question.txt

    git diff | mtp-gguf generate model.gguf -f -
    """
    wanted = parse_depth(depth)
    if max_depth is not None and isinstance(wanted, int):
        raise typer.BadParameter("--max-depth is for --depth auto; give --depth alone")
    if grammar_file is not None and json_schema is not None:
        raise typer.BadParameter("--grammar-file and --json-schema contradict each other")
    text = _prompt(prompt, prompt_file)
    constraint = _constraint(grammar_file, json_schema)
    if seed in (-1, _SEEDS):
        seed = secrets.randbelow(_SEEDS)
    llm = drafting_model(
        model,
        head,
        wanted,
        context,
        threads,
        gpu_layers,
        n_cpu_moe,
        max_depth=AUTO_MAX_DEPTH if max_depth is None else max_depth,
        rollback=rollback.value if rollback else None,
        exact=exact,
        lookup=lookup,
        lookup_files=lookup_file or (),
        fastmtp_size=fastmtp_size,
        draft_threads=draft_threads,
        profile=not no_profile,
    )
    from mtp_gguf.native.libraries import loaded_libraries  # noqa: PLC0415  (loads llama.cpp)

    colored = not (as_json or plain) and token_colors.wanted(sys.stdout)
    with closing(llm):
        llm.set_seed(seed)  # passed to Llama as an argument, 0 would mean a random seed
        tokens = llm.tokenize((_in_template(llm, text) if chat else text).encode(), special=True)
        if not 0 < len(tokens) < llm.n_ctx():
            source = "--prompt-file" if prompt_file else "standard input"
            source = source if prompt is None else "--prompt"
            raise RequestError(
                f"{source}: expected 1 to {llm.n_ctx() - 1} tokens, found {len(tokens)}"
                + ("; shorten it, or raise --ctx" if tokens else "")
            )
        most = min(n, llm.n_ctx() - len(tokens)) if n > 0 else llm.n_ctx() - len(tokens)
        began = perf_counter()
        pieces: list[str] = []
        generated: Counter[int] = Counter()  # tokens by origin
        terminal = sys.stdout.isatty() and not as_json
        shown = token_colors.TokenText(colored=colored, terminal=terminal)
        stream = llm.generate(
            tokens,
            temp=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repeat_penalty=repeat_penalty,
            grammar=_grammar(llm, constraint) if constraint else None,
        )
        for token in islice(stream, max(most, 1)):
            if llm.is_end(token):
                break
            generated[llm.token_origin] += 1
            pieces.append(shown.add(llm.detokenize([token]), llm.token_origin))
            if not as_json:
                sys.stdout.write(pieces[-1])
                sys.stdout.flush()
        stream.close()
        pieces.append(shown.end())
        seconds = perf_counter() - began
        did = llm.mtp_stats
        libraries = loaded_libraries(gpu_layers)
    if as_json:
        record = {
            "text": "".join(pieces),
            "depth": llm.depth,
            "seed": seed,
            "seconds": seconds,
            "prompt_tokens": len(tokens),
            **asdict(did),
            "libraries": asdict(libraries),
        }
        typer.echo(json.dumps(record))
        return
    sys.stdout.write(pieces[-1] + "\n")
    if terminal and (any(did.drafted) or did.text_drafted):
        colored = colored and sys.stderr.isatty()
        from_text = did.text_accepted / did.text_drafted if did.text_drafted else None
        table = token_colors.table(generated, did.acceptance, from_text, colored=colored)
        sys.stderr.write(table + "\n")
    if stats:
        sys.stderr.write(report(did, generated.total(), seconds))
        sys.stderr.write(
            f"runs on: {libraries.device}, {libraries.kernels} kernels, llama.cpp of "
            f"{libraries.folder} (llama-cpp-python {libraries.llama_cpp_python})\n"
        )
        if temperature > 0:
            sys.stderr.write(f"seed: {seed}\n")


def parse_depth(text: str | None) -> int | Literal["auto"] | None:
    """Return the value of --depth; None if it is not given."""
    if text is None or text == AUTO:
        return AUTO if text else None
    if not text.isascii() or not text.isdigit() or int(text) > MAX_DEPTH:
        raise typer.BadParameter(
            f"expected 0 to {MAX_DEPTH} or auto, found {text!r}", param_hint="--depth"
        )
    return int(text)


def _prompt(text: str | None, file: Path | None) -> str:
    """Return the text to continue: as given, from the file, or from standard input."""
    if text is not None:
        if file is not None:
            raise typer.BadParameter("--prompt and --prompt-file contradict each other")
        return text
    from_input = file is None or str(file) == "-"
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise typer.BadParameter("expected -p TEXT, -f FILE or a text on standard input")
    if from_input:
        raw = sys.stdin.buffer.read(_LARGEST_INPUT + 1)
        read = _decoded("standard input", raw)
    else:
        assert file is not None
        read = _read(file)
    return read.removesuffix("\n")  # as in llama.cpp: editors add it; it is not part of the prompt


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return _decoded(str(path), file.read(_LARGEST_INPUT + 1))
    except OSError as error:
        raise RequestError(f"{path}: cannot be read: {error.strerror}") from None


def _decoded(name: str, raw: bytes) -> str:
    if len(raw) > _LARGEST_INPUT:
        raise RequestError(f"{name}: expected at most {_LARGEST_INPUT} bytes")
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: expected UTF-8, found: {error.reason}") from None


def _constraint(grammar_file: Path | None, json_schema: str | None) -> tuple[str, str] | None:
    """Return the option that constrains the text, and its GBNF grammar."""
    if grammar_file is not None:
        return "--grammar-file", _read(grammar_file)
    if json_schema is None:
        return None
    from mtp_gguf.native.runtime import llama_cpp  # noqa: PLC0415

    try:
        schema = json.loads(json_schema)
        if not isinstance(schema, dict):
            raise ValueError(f"expected an object, found {type(schema).__name__}")
        if not schema:
            schema = {"type": "object"}
        return "--json-schema", llama_cpp.llama_grammar.json_schema_to_gbnf(json.dumps(schema))
    except Exception as error:  # the converter raises many types, depending on the schema
        raise typer.BadParameter(
            f"expected a JSON schema that a grammar can express: {error or type(error).__name__}",
            param_hint="--json-schema",
        ) from None


def _grammar(llm: "MTPLlama", constraint: tuple[str, str]) -> Any:
    """Return the grammar for llama.cpp; RequestError if llama.cpp cannot read it."""
    from mtp_gguf.native.runtime import llama_cpp  # noqa: PLC0415

    option, text = constraint
    vocabulary = llama_cpp.llama_model_get_vocab(llm.model)
    sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, text.encode(), b"root")
    if not sampler:
        raise RequestError(f"{option}: llama.cpp cannot read the grammar; its start must be `root`")
    llama_cpp.llama_sampler_free(sampler)
    return llama_cpp.llama_grammar.LlamaGrammar.from_string(text, verbose=False)


def _in_template(llm: "MTPLlama", text: str) -> str:
    """Return the text as a user message in the model's chat template."""
    from mtp_gguf.native.generate import chat_writer  # noqa: PLC0415

    write = chat_writer(llm.metadata.get("tokenizer.chat_template"))
    if write is None:
        raise RequestError("--chat: the model has no chat template; leave --chat out")
    return write(text)


def report(did: "MtpStats", generated: int, seconds: float) -> str:
    """Return a short report: speed, acceptance by position, time by part."""
    cycles = max(did.cycles, 1)
    parts = {
        "draft": did.draft_ms,
        "verify": did.verify_ms,
        "rollback": did.rollback_ms,
        "sample": did.sample_ms,
    }
    drafts = []
    if any(did.drafted):
        drafts.append(f"accepted by position: {' '.join(f'{a:.0%}' for a in did.acceptance)}")
    if did.text_cycles:
        drafts.append(f"from the text: {did.text_accepted} of {did.text_drafted} drafts accepted")
    lines = [
        f"{generated} tokens in {seconds:.2f} s, prompt included",
        f"prompt: {did.prefilled} tokens, trunk {did.prefill_ms:.0f} ms, "
        f"head {did.prefill_head_ms:.0f} ms",
        f"cycles: {did.cycles}, {did.tokens_per_cycle:.2f} tokens each",
        *(drafts or ["no drafts made"]),
        "ms per cycle: " + ", ".join(f"{k} {v / cycles:.2f}" for k, v in parts.items()),
        f"graphs per cycle: trunk {did.decodes / cycles:.2f}, head {did.draft_graphs / cycles:.2f}",
        *(
            [
                f"head's device per cycle: waited for {did.draft_syncs / cycles:.2f} times, "
                f"{did.draft_bytes_up / cycles:,.0f} bytes up, "
                f"{did.draft_bytes_down / cycles:,.0f} bytes down"
            ]
            if did.draft_syncs
            else []
        ),
    ]
    return "\n".join(lines) + "\n"

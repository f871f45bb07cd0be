"""`mtp-gguf generate`: complete a text with drafting, and report its statistics."""

import json
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.files.json_text import parse_json
from mtp_gguf.gguf_tools.machine.interrupted import Interrupted
from mtp_gguf.gguf_tools.profile import AUTO, AUTO_MAX_DEPTH, MAX_DEPTH

from . import options, session_option, token_colors
from .drafting_model import drafting_model, vision_tower
from .gpu_options import MainGpu, Split, TensorSplit, split_options
from .progress import reports_errors
from .session_option import SessionFile

if TYPE_CHECKING:
    from mtp_gguf.native.chat.generate import Renderer
    from mtp_gguf.native.llama.mtp_llama import MTPLlama
    from mtp_gguf.native.session import MtpStats

_DRAFTING = "Drafting"  # panel of the help
_drafting_option = partial(typer.Option, rich_help_panel=_DRAFTING)

_LARGEST_INPUT = 16 << 20  # bytes of a prompt, a grammar or a schema


class RollbackMode(str, Enum):
    """Ways to roll back rejected drafts; auto is the profile's, else snapshot."""

    AUTO = "auto"
    SNAPSHOT = "snapshot"
    CHECKPOINT = "checkpoint"


@reports_errors
def generate(
    model: options.ModelName,
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
    system: options.System = None,
    image: options.Images = None,
    mmproj: options.Mmproj = None,
    n: Annotated[
        int,
        typer.Option(
            "-n",
            "--tokens",
            min=-1,
            help="Generate at most N tokens; 0: read the prompt only, -1: fill the context.",
        ),
    ] = 256,
    stop: options.Stop = None,
    session: SessionFile = None,
    context: options.Context = 4096,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = 0,
    n_cpu_moe: options.CpuMoe = 0,
    split_mode: Split = None,
    tensor_split: TensorSplit = None,
    main_gpu: MainGpu = None,
    lora: options.Lora = None,
    cache_type_k: options.CacheTypeK = None,
    cache_type_v: options.CacheTypeV = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = None,
    top_p: options.TopP = None,
    min_p: options.MinP = None,
    repeat_penalty: options.RepeatPenalty = None,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = 0,
    grammar_file: Annotated[
        Path | None,
        options.sampling_option(
            metavar="FILE",
            help="Constrain the text to the GBNF grammar in this file.",
        ),
    ] = None,
    json_schema: Annotated[
        str | None,
        options.sampling_option(
            "-j",
            "--json-schema",
            metavar="SCHEMA",
            help="Constrain the text to JSON of this schema; {} for any JSON object.",
        ),
    ] = None,
    depth: Annotated[str | None, options.depth_option(_DRAFTING)] = None,
    max_depth: Annotated[
        int | None,
        _drafting_option(
            min=0,
            max=MAX_DEPTH,
            help=f"Draft at most N tokens with --depth auto (default: {AUTO_MAX_DEPTH}).",
        ),
    ] = None,
    head: options.HeadFile = None,
    mtp_type: options.LoadedType = None,
    lookup: Annotated[
        bool | None,
        _drafting_option(
            "--lookup/--no-lookup",
            help="Also draft from earlier text (default: with depth auto and fast rollback).",
            show_default=False,
        ),
    ] = None,
    lookup_file: Annotated[
        list[Path] | None,
        _drafting_option(
            metavar="PATH",
            help="Also draft from this text file or folder of them; repeatable.",
        ),
    ] = None,
    rollback: Annotated[
        RollbackMode,
        _drafting_option(
            help="Roll back rejected drafts this way; auto: as tuned, else snapshot.",
        ),
    ] = RollbackMode.AUTO,
    exact: Annotated[
        bool,
        _drafting_option(
            "--exact",
            help="Generate the same greedy text at every depth, to the byte.",
        ),
    ] = False,
    fastmtp_size: Annotated[
        int | None,
        _drafting_option(
            min=-1,
            help="Use N rows of the draft vocabulary, or of one that is made if the file has none; "
            "0: all, -1: no list (default: as tuned, else all).",
        ),
    ] = None,
    draft_threads: Annotated[
        int | None,
        _drafting_option(
            min=0,
            help="Draft with N CPU threads; 0: as many as the trunk (default: as tuned, else 0).",
        ),
    ] = None,
    no_profile: Annotated[
        bool,
        _drafting_option(
            "--no-profile",
            help="Ignore the settings that `mtp-gguf tune` found.",
        ),
    ] = False,
    plain: options.NoColor = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Report speed, acceptance, device and libraries.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Complete a text, drafting with the model's MTP head.

    On a terminal each token shows its source: accepted drafts are colored and underlined, with one
    color for each position in the draft and one for drafts from the text; tokens sampled by the
    trunk are plain.

    **Examples**

    mtp-gguf generate model.gguf -p "def quicksort(a):" -n 256 --stats

    mtp-gguf generate OWNER/NAME:Q4_K_M -p "def quicksort(a):"

    mtp-gguf generate model.gguf --chat --temp 0.7 --seed -1 -f question.txt

    mtp-gguf generate model.gguf --image photo.jpg -p "What does this show?"

    git diff | mtp-gguf generate model.gguf -f -

    mtp-gguf generate model.gguf --session story.session -p "Once upon a time"
    """
    wanted = parse_depth(depth)
    if max_depth is not None and isinstance(wanted, int):
        raise typer.BadParameter("--max-depth is for --depth auto; give --depth alone")
    if grammar_file is not None and json_schema is not None:
        raise typer.BadParameter("--grammar-file and --json-schema contradict each other")
    if mmproj is not None and not image:
        raise typer.BadParameter("--mmproj is for --image; give both")
    if not all(stop or ()):
        raise typer.BadParameter("expected a text, found an empty one", param_hint="--stop")
    if session is not None and image:
        raise typer.BadParameter("--session is for text; leave out --image")
    text = _prompt(prompt, prompt_file, optional=session is not None and session.exists())
    constraint = _constraint(grammar_file, json_schema)
    seed = options.sampler_seed(seed)
    llm = drafting_model(
        model,
        head,
        wanted,
        context,
        threads,
        gpu_layers,
        n_cpu_moe,
        split=split_options(split_mode, tensor_split, main_gpu),
        lora=lora,
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        max_depth=AUTO_MAX_DEPTH if max_depth is None else max_depth,
        rollback=None if rollback is RollbackMode.AUTO else rollback.value,
        exact=exact,
        lookup=lookup,
        lookup_files=lookup_file or (),
        fastmtp_size=fastmtp_size,
        draft_threads=draft_threads,
        mtp_type=mtp_type,
        profile=not no_profile,
    )
    from mtp_gguf.native.libraries.loaded import loaded_libraries  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.native.llama.generation import read_grammar  # noqa: PLC0415
    from mtp_gguf.native.llama.sampling import Sampling  # noqa: PLC0415

    colored = not (as_json or plain) and token_colors.wanted(sys.stdout)
    sampling = Sampling.chosen(
        llm.metadata,
        temp=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repeat_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
    )
    with closing(llm):
        llm.set_seed(seed)  # passed to Llama as an argument, 0 would mean a random seed
        began = perf_counter()
        resumed = session_option.load(llm, session)
        continued = None
        if image:
            tokens = _with_pictures(llm, system, text, image, mmproj)
        else:
            if chat or system is not None:
                option = "--chat" if system is None else "--system"
                text = _renderer(llm, option)(_messages(system, text))
            if resumed is not None:
                continued = session_option.prompt_tokens(llm, resumed, text)
            tokens = continued or llm.tokenize(text.encode(), special=True)
        if not 0 < len(tokens) < llm.n_ctx():
            source = "--prompt-file" if prompt_file else "standard input"
            source = source if prompt is None else "--prompt"
            raise RequestError(
                f"{source}: expected 1 to {llm.n_ctx() - 1} tokens, found {len(tokens)}"
                + ("; shorten it, or raise --ctx" if tokens else "")
            )
        room = llm.n_ctx() - len(tokens)
        most = room if n < 0 else min(n, room)
        terminal = sys.stdout.isatty() and not as_json
        shown = token_colors.TokenText(colored=colored, terminal=terminal, stops=stop or ())
        pieces: list[str] = []
        following: list[int] = []  # the last token, which is not evaluated
        generated: Counter[int] = Counter()  # tokens by origin
        finish_reason = "length"
        stream = llm.generate(
            tokens,
            **asdict(sampling),
            grammar=read_grammar(llm, *constraint) if constraint else None,
        )
        try:
            for token in islice(stream, max(most, 1)):  # the first one makes it read the prompt
                if most == 0:
                    break
                following = [token]
                if llm.is_end(token):
                    finish_reason = "stop"
                    break
                generated[llm.token_origin] += 1
                pieces.append(shown.add(llm.detokenize([token]), llm.token_origin))
                if not as_json:
                    sys.stdout.write(pieces[-1])
                    sys.stdout.flush()
                if shown.stopped:
                    finish_reason = "stop"
                    break
        except KeyboardInterrupt:
            finish_reason = "interrupted"
        stream.close()
        pieces.append(shown.end())
        seconds = perf_counter() - began
        did = llm.mtp_stats
        if session is not None:
            session_option.save(llm, session, {"next": following})
        libraries = loaded_libraries(gpu_layers)
    record = {
        "text": "".join(pieces),
        "finish_reason": finish_reason,
        "depth": llm.depth,
        "seed": seed,
        "seconds": seconds,
        "prompt_tokens": len(tokens),
        "completion_tokens": generated.total(),
        **asdict(did),
        "libraries": asdict(libraries),
    }
    if not as_json:
        sys.stdout.write(pieces[-1] + "\n")
        sys.stdout.flush()
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
    if finish_reason == "interrupted":
        raise Interrupted(fields=record)
    if as_json:
        typer.echo(json.dumps(record))


def parse_depth(text: str | None) -> int | Literal["auto"] | None:
    """Return the value of --depth; None if it is not given."""
    if text is None or text == AUTO:
        return AUTO if text else None
    if not text.isascii() or not text.isdigit() or int(text) > MAX_DEPTH:
        raise typer.BadParameter(
            f"expected 0 to {MAX_DEPTH} or auto, found {text!r}", param_hint="--depth"
        )
    return int(text)


def _prompt(text: str | None, file: Path | None, *, optional: bool) -> str:
    """Return the text to continue: as given, from the file, or from standard input.

    optional: on a terminal it may be missing.
    """
    if text is not None:
        if file is not None:
            raise typer.BadParameter("--prompt and --prompt-file contradict each other")
        return as_utf8("--prompt", text)
    from_input = file is None or str(file) == "-"
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        if optional:
            return ""
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


def as_utf8(name: str, text: str) -> str:
    """Return the text; RequestError, with the name of its source, for bytes that are not UTF-8.

    Python keeps such bytes of arguments and of standard input as surrogates.
    """
    return _decoded(name, text.encode("utf-8", "surrogatepass"))


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
    from mtp_gguf.native.errors import NativeError  # noqa: PLC0415
    from mtp_gguf.native.schemas.json_schema import ANY_OBJECT, schema_grammar  # noqa: PLC0415

    try:
        schema = parse_json(json_schema)
        return "--json-schema", schema_grammar(ANY_OBJECT if schema == {} else schema)
    except (ValueError, NativeError) as error:
        raise typer.BadParameter(str(error), param_hint="--json-schema") from None


def _messages(system: str | None, content: Any) -> list[dict[str, Any]]:
    """Return a user message, after the system message if there is one."""
    first = [] if system is None else [{"role": "system", "content": system}]
    return [*first, {"role": "user", "content": content}]


def _renderer(llm: "MTPLlama", option: str) -> "Renderer":
    """Return the model's chat template; RequestError if it has none for `option`."""
    from mtp_gguf.native.chat.generate import chat_renderer  # noqa: PLC0415

    render = chat_renderer(llm.metadata.get("tokenizer.chat_template"))
    if render is None:
        raise RequestError(f"{option}: the model has no chat template; leave {option} out")
    return render


def _with_pictures(
    llm: "MTPLlama", system: str | None, text: str, images: Sequence[Path], mmproj: Path | None
) -> list[int]:
    """Evaluate a user message that begins with pictures; return the ids of the prompt."""
    from mtp_gguf.native.chat.pictures import Pictures  # noqa: PLC0415

    tower = vision_tower(llm, mmproj)
    if tower is None:
        raise RequestError(
            f"{llm.model_path}: expected a vision tower that fits it (mmproj-*.gguf) in its "
            "folder, found none; name one with --mmproj"
        )
    pictures = Pictures(llm, tower)
    content = [*map(pictures.read, images), {"type": "text", "text": text}]
    return pictures.prompt(_messages(system, content), _renderer(llm, "--image"))[1]


def report(did: "MtpStats", generated: int, seconds: float) -> str:
    """Return a short report: speed, acceptance by position, time by part."""
    speed = f"{generated} tokens in {seconds:.2f} s, prompt included"
    if not did.prefilled and not did.cycles:  # llama_cpp.Llama's methods ran it, uncounted
        return f"{speed}\nno drafts made\n"
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
        speed,
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

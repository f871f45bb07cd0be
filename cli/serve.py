"""`mtp-gguf serve`."""

import json
import os
import shlex
import sys
import warnings
import webbrowser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from mtp_gguf.gguf_tools.depth_file import VARIABLE as DEPTH_FILE
from mtp_gguf.gguf_tools.depth_file import depth_file
from mtp_gguf.gguf_tools.errors import RequestError, ServerError
from mtp_gguf.gguf_tools.hub.remote import on_hub
from mtp_gguf.gguf_tools.machine.huge_pages import read_in_huge_pages
from mtp_gguf.gguf_tools.machine.process_memory import free_memory
from mtp_gguf.gguf_tools.machine.processors import computing_threads
from mtp_gguf.gguf_tools.machine.text import human_bytes, printable
from mtp_gguf.gguf_tools.model import shard_paths
from mtp_gguf.gguf_tools.profile import AUTO, MAX_DEPTH, DraftSettings, find_profile
from mtp_gguf.native.checks.head_types import type_without_drafts
from mtp_gguf.server.address import check_free, check_rpc_servers, resolve
from mtp_gguf.server.command import (
    MMPROJ_OPTIONS,
    ServerCommand,
    SessionFolder,
    server_command,
    without_key,
)
from mtp_gguf.server.find import VARIABLE, LlamaServer, ask, find_server, finds_gpu
from mtp_gguf.server.huge_pages import huge_page_environment
from mtp_gguf.server.kernels import default_environment
from mtp_gguf.server.launch import RunningServer
from mtp_gguf.server.model import (
    NoHeadError,
    ServedModel,
    check_loads,
    choose_head,
    choose_mmproj,
    open_model,
)

from .gpu_options import MainGpu, Split, TensorSplit
from .gpu_options import tensor_split as parse_tensor_split
from .local_model import local_model
from .options import (
    AsJson,
    Command,
    Host,
    LoadedType,
    Passed,
    Port,
    Threads,
    check_passed,
    parse_bytes,
    spelled,
)
from .progress import USAGE_ERROR, reports_errors, status_line

_EXAMPLE = """
from openai import OpenAI

client = OpenAI(base_url="{address}/v1", api_key="{key}")
answer = client.chat.completions.create(
    model="default", messages=[{{"role": "user", "content": "Hello"}}]
)
print(answer.choices[0].message.content)
"""
_ANY_SITE = (
    "this llama-server answers web pages of any site that you open in a browser; "
    "--api-key KEY or a server of `mtp-gguf build-server` prevents that"
)
_KERNELS = (
    "this llama-server uses the CPU kernels of this package (MTP_GGUF_KERNELS=0 keeps its own; "
    "without serve: mtp-gguf kernels -- llama-server)"
)


class CommandClass(Command):
    """The command; for an unknown option it explains how to pass it to llama-server."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the arguments."""
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            option = getattr(error, "option_name", None)
            if option is not None and "no such option" in error.message.lower():
                error.message += f". An option of llama-server goes after `--`: -- {option} …"
            raise


@reports_errors
def serve(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="GGUF model (any shard), or one on the hub, which is downloaded: "
            "OWNER/NAME:QUANT, hf://OWNER/NAME/FILE.",
        ),
    ] = None,
    passed: Passed = None,
    hf_repo: Annotated[
        str | None,
        typer.Option(
            "-hf",
            "--hf-repo",
            metavar="OWNER/NAME[:QUANT]",
            help="Serve this model on the hub, like MODEL.",
        ),
    ] = None,
    llama_server: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help=f"Run this server (default: from {VARIABLE}, else build-server, else the PATH).",
        ),
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    allow_public: Annotated[
        bool,
        typer.Option("--allow-public", help="Allow access from other machines without an API key."),
    ] = False,
    api_key: Annotated[
        str | None,
        typer.Option("--api-key", metavar="KEY", help="Answer only requests with this key."),
    ] = None,
    context: Annotated[
        int | None,
        typer.Option(
            "-c",
            "--ctx",
            min=0,
            help="Total context of all slots in tokens (default: the model's own).",
        ),
    ] = None,
    parallel: Annotated[
        int | None,
        typer.Option(
            "-np", "--parallel", min=1, help="Serve N requests at once (default: llama-server's)."
        ),
    ] = None,
    threads: Threads = None,
    gpu_layers: Annotated[
        int | None,
        typer.Option(
            "-ngl",
            "--gpu-layers",
            min=-1,
            help="Put this many layers on the GPU (default: llama-server's).",
        ),
    ] = None,
    split_mode: Split = None,
    tensor_split: TensorSplit = None,
    main_gpu: MainGpu = None,
    head: Annotated[
        str | None,
        typer.Option(
            "--head",
            metavar="FILE",
            help="Take the head from this GGUF, local or on the hub (default: the model's, or one "
            "beside it).",
        ),
    ] = None,
    mtp_type: LoadedType = None,
    mmproj: Annotated[
        Path | None,
        typer.Option(
            "--mmproj",
            metavar="FILE",
            help="See pictures with this vision tower (default: the one beside the model).",
        ),
    ] = None,
    depth: Annotated[
        str | None,
        typer.Option(
            "--depth",
            metavar="N|auto",
            help="Draft N tokens per cycle; auto: as many as pay off (default: as tuned, else auto "
            "if the server supports it, else by model size).",
        ),
    ] = None,
    no_draft: Annotated[
        bool, typer.Option("--no-draft", help="Serve without drafting with a head.")
    ] = False,
    lookup: Annotated[
        bool | None,
        typer.Option(
            "--lookup/--no-lookup",
            help="Also draft from earlier text of a slot if it repeats; with --no-draft, alone "
            "(default: only for a model of attention without a head).",
            show_default=False,
        ),
    ] = None,
    lookup_file: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Also draft from this text file or folder of them; repeatable. Implies --lookup.",
        ),
    ] = None,
    session_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Keep conversations in this folder across restarts; servers may share it.",
        ),
    ] = None,
    session_size: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Keep at most this much in --session-dir; the least recently used conversations "
            "go first (default: 20G).",
        ),
    ] = None,
    share_sessions: Annotated[
        bool,
        typer.Option(
            "--share-sessions",
            help="Let every API key continue the conversations of the others (default: its own).",
        ),
    ] = False,
    huge_pages: Annotated[
        bool,
        typer.Option(
            "--huge-pages",
            help="Copy the weights into huge pages instead of mapping the file: more tokens per "
            "second on a CPU, a slower start (Linux).",
        ),
    ] = False,
    rpc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,…",
            help="Spread the model over these ggml RPC servers (default: none).",
        ),
    ] = None,
    example: Annotated[
        bool,
        typer.Option(
            "--example", help="Print a program for the openai client once the server is ready."
        ),
    ] = False,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the web page in a browser once it is ready.")
    ] = False,
    print_command: Annotated[
        bool, typer.Option("--print-command", help="Print the command instead of running it.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Serve a model with llama-server, drafting with its MTP head.

    Before the server starts, its features are queried and the model is checked. A head
    (`mtp-*.gguf`) and a vision tower (`mmproj-*.gguf`) beside the model are used if they fit it.
    The exit code is the server's.

    **Examples**

    mtp-gguf serve model.gguf --port 8080

    mtp-gguf serve OWNER/NAME:Q4_K_M --depth 3

    mtp-gguf serve model.gguf -c 32768 --parallel 4 -- --cache-type-k q8_0
    """
    passed = passed or []
    if hf_repo is not None:
        passed = [model, *passed] if model is not None else passed
        model = on_hub(hf_repo)
    if model is None:
        raise typer.BadParameter("missing argument", param_hint="MODEL")
    check_passed(passed)
    if open_page and print_command:
        raise typer.BadParameter("--open cannot be combined with --print-command")
    if session_size and session_dir is None:
        raise typer.BadParameter("--session-size needs --session-dir")
    if no_draft and (head or depth or mtp_type):
        raise typer.BadParameter("--no-draft cannot be combined with --head, --depth or --mtp-type")
    parse_tensor_split(tensor_split)
    wanted = None if depth is None else _depth(depth)
    ours = {
        "--ctx-size": context,
        "--parallel": parallel,
        "--threads": threads,
        "--n-gpu-layers": "all" if gpu_layers == -1 else gpu_layers,
        "--split-mode": None if split_mode is None else split_mode.value,
        "--tensor-split": tensor_split,
        "--main-gpu": main_gpu,
        "--api-key": api_key,
    }
    given = [str(w) for pair in ours.items() if pair[1] is not None for w in pair]
    found = local_model(model, head, drafts=not no_draft)
    file = open_model(found.path)
    served, headless = ServedModel(file, None), ""
    if not no_draft:
        try:
            served = choose_head(file, found.head)
        except NoHeadError as error:
            if depth not in (None, AUTO):
                raise
            headless = str(error)
    tower, several = None, ""
    if mmproj or not any(option in passed for option in MMPROJ_OPTIONS):
        tower, several = choose_mmproj(file, mmproj)
    served = replace(served, mmproj=tower)
    check_loads(served)
    address = resolve(host, port)
    server = ask(find_server(llama_server))
    if headless:
        if lookup is None:
            lookup = server.lookup and file.attends_only  # no copies of a state
        source = "with drafts from its text" if lookup or lookup_file else "without drafts"
        headless += f"; serving {source}"
    tuned, ignored = None, None
    if served.head_file is not None:
        tuned, ignored = find_profile(file.path, server.kernels, None)
    settings = tuned.settings if tuned else None
    typed = ""
    idle = served.head_file is None or (wanted is None and tuned and tuned.settings.depth == 0)
    if mtp_type is not None and idle:
        typed = type_without_drafts("--mtp-type", mtp_type)
        mtp_type = None
    elif mtp_type is not None:
        mtp_type, typed = _head_type(mtp_type, served, settings, threads, gpu_layers)
    index = _lookup_index(lookup_file, file.path, server) if lookup_file else None
    sessions = None
    if session_dir is not None:
        sessions = SessionFolder(session_dir, parse_bytes(session_size or "20G", "--session-size"))
    command = server_command(
        server,
        served,
        address,
        wanted,
        settings,
        rpc,
        allow_public,
        [*given, *passed],
        lookup=bool(lookup) or index is not None,
        lookup_index=index,
        sessions=sessions,
        share_sessions=share_sessions,
        huge_pages=huge_pages,
        mtp_type=mtp_type,
    )
    missing = ""
    if gpu_layers and rpc is None and not finds_gpu(server.path):
        missing = (
            f"-ngl {gpu_layers}: this llama-server finds no GPU that it can use and runs all "
            "layers on the CPU; docs/gpu.md says how to build it with a GPU backend"
        )
    if not print_command:
        check_free(address)
        if rpc is not None:
            check_rpc_servers(rpc)
    variables = None if server.fastmtp else default_environment(server.path, os.environ)
    kernels = _KERNELS if variables is not None else ""
    if huge_pages:
        _check_room(served, server)
        variables = huge_page_environment(os.environ if variables is None else variables)
    files = [one.path for one in (served.file, served.head_file) if one]
    if served.head_file is not None:
        costs = (server.path, wanted, settings, rpc, lookup, huge_pages, mtp_type)
        remembered = depth_file(files, *map(str, costs), *without_key([*given, *passed]))
        if remembered:
            variables = {**(os.environ if variables is None else variables)}
            variables[DEPTH_FILE] = str(remembered)
    lacking = _lacking(server)
    stated = served.acceptance
    acceptance = f"acceptance: {stated}" if stated else ""
    notes = (
        *(lacking, kernels, headless, several, ignored, missing, acceptance, typed),
        *command.notes,
    )
    for note in filter(None, notes):
        typer.echo(f"mtp-gguf: {printable(note)}", err=True)
    if print_command:
        typer.echo(json.dumps(_fields(command)) if as_json else shlex.join(command.words))
        return
    typer.echo(shlex.join(without_key(command.words)), err=True)
    name = found.path.name
    with status_line(f"reading {printable(name)}"):
        shards = [shard for file in dict.fromkeys(files) for shard in shard_paths(file)]
        read_in_huge_pages(shards)
    raise typer.Exit(_run(command, variables, name, as_json, example, open_page))


def _head_type(
    wanted: str,
    served: ServedModel,
    settings: DraftSettings | None,
    threads: int | None,
    gpu_layers: int | None,
) -> tuple[str | None, str]:
    """Return the type for the head's matrices, None for as stored, and a note on the choice."""
    from mtp_gguf.native.checks.head_types import choose_type  # noqa: PLC0415
    from mtp_gguf.native.head import check_head  # noqa: PLC0415
    from mtp_gguf.native.libraries.exact import kernels  # noqa: PLC0415  (loads llama.cpp)

    trunk, head = served.file.path, served.separate_head
    size = settings.fastmtp_size if settings else 0
    if served.head_file is not None and served.head_file.drafter:
        raise RequestError(f"--mtp-type {wanted}: expected an MTP head, found another drafter")
    if wanted.lower() != AUTO:
        with spelled({"mtp_type:": "--mtp-type:"}):
            check_head(
                head or trunk,
                trunk=trunk if head else None,
                device="CPU",
                fastmtp_size=size,
                mtp_type=wanted,
            )
        return wanted, ""
    options = {
        "n_threads": threads or computing_threads(),
        "n_gpu_layers": gpu_layers or 0,
        "fastmtp_size": size,
    }
    choice = choose_type(trunk, head, kernels(), options)
    return choice.name, choice.text


def _check_room(served: ServedModel, server: LlamaServer) -> None:
    """RequestError if a copy of the weights on the CPU needs more memory than is free."""
    files = {file.path: file for file in (served.file, served.head_file) if file}
    needed, free = sum(file.nbytes for file in files.values()), free_memory()
    if needed > free and not finds_gpu(server.path):
        raise RequestError(
            f"--huge-pages: expected {human_bytes(needed)} of free memory for the weights, found "
            f"{human_bytes(free)}; without it the file is mapped, and read as it is needed"
        )


def _lacking(server: LlamaServer) -> str:
    """A line with what the server lacks compared with ours; "" if that is nothing."""
    if not server.lacking:
        return ""
    return (
        f"this llama-server ({server.version}) has no {', no '.join(server.lacking)}; "
        "mtp-gguf build-server builds one that has"
    )


def _lookup_index(paths: Sequence[Path], model: Path, server: LlamaServer) -> Path:
    """Return an index of lookup files for a model's vocabulary, built if it is not in the cache."""
    if not server.lookup_index:
        raise ServerError(
            f"{server.path} ({server.version}): cannot draft from lookup files; build one that can "
            "with mtp-gguf build-server, or serve without --lookup-file"
        )
    from mtp_gguf.native.lookup_files import open_lookup_files  # noqa: PLC0415  (loads llama.cpp)
    from mtp_gguf.native.vocabulary import Vocabulary  # noqa: PLC0415

    with (
        warnings.catch_warnings(record=True) as notes,
        spelled({"lookup files:": "--lookup-file:"}),
        Vocabulary(model) as vocabulary,
    ):
        warnings.simplefilter("always")
        with open_lookup_files(
            paths,
            vocabulary.fingerprint(),
            vocabulary.size,
            lambda text: vocabulary.encode(text, special=False).tolist(),
        ) as index:
            path = index.path
    for note in notes:  # a damaged index was built again
        typer.echo(f"mtp-gguf: {printable(str(note.message))}", err=True)
    return path


def _fields(command: ServerCommand) -> dict[str, Any]:
    return {"url": command.health.removesuffix("/health"), "command": list(command.words)}


def _depth(text: str) -> int | Literal["auto"]:
    """Parse the value of --depth."""
    if text == AUTO:
        return AUTO
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= MAX_DEPTH:
        instead = "; pass --no-draft to serve without drafts" if text.strip("+-0") == "" else ""
        raise typer.BadParameter(
            f"expected 1 to {MAX_DEPTH}, or auto, found {text!r}{instead}",
            param_hint="--depth (--spec-draft-n-max)",
        )
    return int(text)


def _open(url: str, server: RunningServer) -> None:
    """Open the server's web page, or say why not."""
    if not server.has_page(f"{url}/"):
        typer.echo(
            "mtp-gguf: this llama-server has no web page; `mtp-gguf build-server` builds one that "
            "has it, if npm is installed",
            err=True,
        )
    elif not webbrowser.open(f"{url}/"):
        typer.echo(f"mtp-gguf: no browser found; open {url} in one", err=True)


def _run(
    command: ServerCommand,
    variables: Mapping[str, str] | None,
    name: str,
    as_json: bool,
    example: bool,
    open_page: bool,
) -> int:
    """Run the server, with these environment variables, until it ends; return its exit code."""
    address = command.health.removesuffix("/health")
    title = f"loading {printable(name)}"
    words, health = command.words, command.health
    with RunningServer(
        words, health, sys.stderr.buffer, environment=variables, grace=command.grace
    ) as server:
        with status_line(title) as update:
            ready = server.wait_until_ready(lambda seconds: update(f"{title}: {seconds:.0f} s"))
        if ready:
            server.show_log()
            answers_any_site = not command.has_key and server.answers_any_site()
            typer.echo(f"ready: {address}", err=True)
            if answers_any_site:
                typer.echo(f"mtp-gguf: {_ANY_SITE}", err=True)
            if as_json:
                typer.echo(json.dumps(_fields(command)))
            elif example:
                key = "YOUR_KEY" if command.has_key else "none"
                typer.echo(_EXAMPLE.format(address=address, key=key))
            sys.stdout.flush()
            if open_page:
                _open(address, server)
            return server.wait()
        code = server.wait()
        for line in server.last_lines():
            typer.echo(printable(line), err=True)
        if not server.signalled and code:
            typer.echo(
                f"mtp-gguf: llama-server ended with code {code} before it was ready", err=True
            )
        return code

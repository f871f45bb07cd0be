"""Plans what is left to do until a model is served, and why: the steps of `mtp-gguf up`."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from mtp_gguf.gguf_tools.doctor import UNKNOWN_ORIGINAL, original_of
from mtp_gguf.gguf_tools.errors import CheckpointError, FormatError, RequestError, ServerError
from mtp_gguf.gguf_tools.files.safetensors import checkpoint_files
from mtp_gguf.gguf_tools.heads.nextn import ARCHITECTURES, BLOCKS, OUR_ARCHITECTURES
from mtp_gguf.gguf_tools.hub.remote import (
    HubGguf,
    HubModel,
    absent_model,
    download_command,
    hub_gguf,
)
from mtp_gguf.gguf_tools.hub.resolve import open_any_model
from mtp_gguf.gguf_tools.machine.processors import usable_cores
from mtp_gguf.gguf_tools.machine.shell import as_argument
from mtp_gguf.gguf_tools.machine.system import PATCHED
from mtp_gguf.gguf_tools.machine.text import duration, human_bytes
from mtp_gguf.gguf_tools.model import Model, open_model, whole_name
from mtp_gguf.gguf_tools.profile import find_profile
from mtp_gguf.server.address import check_free, resolve
from mtp_gguf.server.command import check_access, without_key
from mtp_gguf.server.find import VARIABLE, LlamaServer, ask, find_server
from mtp_gguf.server.model import NoHeadError, choose_head
from mtp_gguf.server.model import open_model as open_served

# Estimates; the steps report their real progress.
_DOWNLOAD_RATE = 10e6  # bytes a second: a line of 80 Mbit/s
_CONVERT_RATE = 100e6  # bytes of weights a second and core; two Zen 5 cores reach twice this
_COPY_RATE = 300e6  # bytes a second that a graft copies
_CHECK_SECONDS = 15.0  # of a graft's check of the acceptance rate
_BUILD_SECONDS = 600.0


class StepName(str, Enum):
    """The steps, in their order."""

    DOWNLOAD = "download"
    CONVERT = "convert"
    GRAFT = "graft"
    TUNE = "tune"
    BUILD_SERVER = "build-server"
    SERVE = "serve"


@dataclass(frozen=True)
class Step:
    """One step. words: what follows `mtp-gguf`, or for a download, the name of the model.

    what: what it does, with its size. nbytes: read, or downloaded; None if unknown. seconds:
    estimated; None if it lasts until it is stopped. done: why there is nothing to do; "" if there
    is.
    """

    name: StepName
    words: tuple[str, ...]
    what: str
    nbytes: int | None = None
    seconds: float | None = None
    done: str = ""

    @property
    def command(self) -> str:
        """The command that does the same, without the API key for llama-server."""
        if self.name is StepName.DOWNLOAD:
            return download_command(self.words[0]).removesuffix(" --local-dir .")
        return shlex.join(without_key(["mtp-gguf", *self.words]))

    @property
    def text(self) -> str:
        """What it does and how long that takes, or why there is nothing to do."""
        if self.done:
            return f"{self.name.value}: nothing to do, {self.done}"
        about = "" if self.seconds is None else f", about {duration(max(self.seconds, 1))}"
        return f"{self.name.value}: {self.what}{about}"


@dataclass(frozen=True)
class Asked:
    """What the user asked for; see the options of `mtp-gguf up`."""

    model: str
    output: Path | None
    quant: str
    draft: tuple[str, ...]
    original: str | None
    skip: frozenset[StepName]
    budget: str
    seconds: float
    host: str
    port: int
    llama_server: Path | None
    passed: tuple[str, ...]


@dataclass(frozen=True)
class _Made:
    """How the model is made: the steps, and then its name or path and that of its head.

    why_plain: why it cannot draft; "" if it can. ours: whether our runtime drafts with it, which
    measures for `tune`.
    """

    steps: tuple[Step, ...]
    model: str
    head: str | None = None
    why_plain: str = ""
    ours: bool = True


def make_plan(asked: Asked) -> list[Step]:
    """The steps for a model, reading only names and headers; MtpGgufError if it cannot be made."""
    if StepName.SERVE not in asked.skip:
        address = resolve(asked.host, asked.port)
        check_access(address, False, asked.passed)
        check_free(address)
    made = _model(asked)
    for step in made.steps:
        if step.name in asked.skip and not step.done:
            raise RequestError(
                f"--skip {step.name.value}: expected its result, found none; leave --skip out, or "
                f"run: {step.command}"
            )
    server = _server(asked)
    kernels = server.kernels if server else PATCHED
    return [*made.steps, _tune(asked, made, kernels), _build(asked, server), _serve(asked, made)]


def _model(asked: Asked) -> _Made:
    found = hub_gguf(asked.model)
    if found is None:
        path = Path(asked.model)
        if path.is_dir():
            return _checkpoint(asked, None)
        if path.is_file():
            return _local_gguf(asked, path)
        raise RequestError(
            f"{asked.model}: expected a GGUF file, a checkpoint folder or a model on the hub, "
            f"found none; {absent_model(asked.model)}"
        )
    from mtp_gguf.gguf_tools.hub import hub_gguf as on_hub  # noqa: PLC0415  (slow to import)

    if found.file is None and found.quant is None and (size := on_hub.weights_of(found.model)):
        return _checkpoint(asked, found.model, size)
    return _gguf_on_hub(asked, found)


def _checkpoint(asked: Asked, hub: HubModel | None, nbytes: int = 0) -> _Made:
    """Convert; the head is taken from the original if the checkpoint lost it."""
    from ..checkpoints import doctor_checkpoint  # noqa: PLC0415  (NumPy)
    from .plan_checkpoint import planned_file  # noqa: PLC0415

    model = str(hub or asked.model)
    if hub is None:
        folder = Path(asked.model)
        nbytes = sum(path.stat().st_size for path in checkpoint_files(folder))
    seconds = nbytes / (_CONVERT_RATE * usable_cores())
    what = f"{human_bytes(nbytes)} of weights"
    if hub is not None:
        seconds += nbytes / _DOWNLOAD_RATE
        what = f"download {what} and convert them"
    try:
        name, drafts = planned_file(model, asked.quant, None)
    except (CheckpointError, FormatError):
        drafts = False
    source: tuple[str, ...] = ()
    why_plain = ""
    if not drafts:
        if hub is not None:
            diagnosis = doctor_checkpoint.diagnose_hub_checkpoint(*hub)
        else:
            diagnosis = doctor_checkpoint.diagnose_checkpoint(Path(asked.model))
        for finding in () if diagnosis.can_draft else diagnosis.findings:
            if finding.code not in ("no-head", "claimed-head"):
                where = "" if finding.text.startswith(asked.model) else f"{asked.model}: "
                raise RequestError(f"{where}{finding.text}")
            if StepName.GRAFT in asked.skip:
                why_plain = f"{finding.text}, and --skip graft leaves it so"
                continue
            original = asked.original or doctor_checkpoint.original_of_checkpoint(asked.model)
            if original is None:
                why_plain = f"{finding.text}, and its original is unknown (--from)"
            else:
                source = ("--from", original)
                what += f", with the head of {original}"
        name, _ = planned_file(model, asked.quant, source[-1] if source else None)
    output = _output(asked, name)
    words = ("convert", model, "-o", str(output), "--quant", asked.quant, "--mtp-f16", *asked.draft)
    done = _there(output)
    step = Step(StepName.CONVERT, (*words, *source), what, nbytes, None if done else seconds, done)
    return _Made((step,), str(output), why_plain="" if done else why_plain)


def _gguf_on_hub(asked: Asked, name: HubGguf) -> _Made:
    """Download, or graft from there if the head is missing and the original known."""
    from mtp_gguf.gguf_tools.hub import hub_gguf as on_hub  # noqa: PLC0415  (slow to import)

    files = on_hub.find(name)
    model = HubGguf(files.model, files.names[0])
    size = files.nbytes or 0
    with open_any_model(str(on_hub.cached(files) or model)) as opened:
        why_plain = "" if opened.report.ready else opened.report.reason
        ours = opened.architecture in OUR_ARCHITECTURES
        if why_plain and opened.architecture in ARCHITECTURES and files.beside:
            why_plain = ""  # it is downloaded with the model, and checked then
            size += files.beside[0][1] or 0
        elif why_plain:
            original = _original(asked, opened, files.model)
            if original and StepName.GRAFT not in asked.skip:
                return _graft(asked, str(model), size, original, remote=True)
            why_plain = _left_plain(asked, why_plain, opened.architecture)
    _refuse_corpus(asked)
    done = "it is in the cache" if on_hub.cached(files) else ""
    seconds = size / _DOWNLOAD_RATE
    step = Step(StepName.DOWNLOAD, (str(model),), human_bytes(size), size, seconds, done)
    return _Made((step,), str(model), why_plain=why_plain, ours=ours)


def _local_gguf(asked: Asked, path: Path) -> _Made:
    """Graft if there is no head in the file or beside it, and the original is known."""
    served = open_served(path)
    try:
        separate = choose_head(served, None).separate_head
    except NoHeadError:
        with open_model(path) as opened:
            original = _original(asked, opened, None)
            if original and StepName.GRAFT not in asked.skip:
                size = sum(file.stat().st_size for file in opened.paths)
                return _graft(asked, str(path), size, original, remote=False)
        _refuse_corpus(asked)
        return _Made(
            (),
            as_argument(path),
            why_plain=_left_plain(asked, served.head.reason, served.architecture),
        )
    _refuse_corpus(asked)
    ours = served.architecture in OUR_ARCHITECTURES
    return _Made((), as_argument(path), head=as_argument(separate) if separate else None, ours=ours)


def _graft(asked: Asked, base: str, size: int, original: str, *, remote: bool) -> _Made:
    name = Path(whole_name(Path(base))).stem
    output = _output(asked, f"{name}-MTP.gguf")
    target = as_argument(output)
    words = ("graft", as_argument(base), "--from", original, "-o", target, *asked.draft)
    what = f"add the head of {original} to {human_bytes(size)}"
    seconds = size / (_DOWNLOAD_RATE if remote else _COPY_RATE) + _CHECK_SECONDS
    step = Step(StepName.GRAFT, words, what, size, seconds, _there(output))
    return _Made((step,), target)


def _original(asked: Asked, model: Model, hub: HubModel | None) -> str | None:
    """The model to take the head from: as asked for, else as the file or its card names it."""
    if asked.original is not None:
        return asked.original
    if model.architecture not in OUR_ARCHITECTURES:
        return None
    if (named := original_of(model)) != UNKNOWN_ORIGINAL:
        return named
    if hub is None:
        return None
    from ..checkpoints.doctor_checkpoint import original_by_card  # noqa: PLC0415  (NumPy)

    return original_by_card(hub)


def _left_plain(asked: Asked, reason: str, architecture: str | None) -> str:
    if architecture not in BLOCKS:  # no head is for it
        return reason
    if StepName.GRAFT in asked.skip:
        return f"{reason}, and --skip graft leaves it so"
    return f"{reason}, and its original is unknown (--from)"


def _refuse_corpus(asked: Asked) -> None:
    """Options for a draft vocabulary need a step that writes a file."""
    if asked.draft:
        raise RequestError(
            f"--fastmtp: expected a model to convert or graft, found {asked.model}, which is used "
            "as it is; `mtp-gguf fastmtp add` adds a draft vocabulary to a GGUF"
        )


def _tune(asked: Asked, made: _Made, kernels: str) -> Step:
    """Measure, unless there is a profile that applies to the server with these kernels."""
    head = ("--head", made.head) if made.head else ()
    words = ("tune", made.model, "--budget", asked.budget, *head)
    done = ""
    if StepName.TUNE in asked.skip:
        done = "as asked (--skip)"
    elif made.why_plain:
        done = "the model cannot draft"
    elif not made.ours:
        done = "llama-server drafts with this architecture by its own defaults"
    elif not any(not step.done for step in made.steps):
        path = _local_path(made.model)
        if path is not None and find_profile(path, kernels, None)[0] is not None:
            done = "its profile is up to date"
    what = "measure the fastest settings here"
    return Step(StepName.TUNE, words, what, None, asked.seconds, done)


def _local_path(model: str) -> Path | None:
    """The path of a model that is on this machine already."""
    name = hub_gguf(model)
    if name is None:
        return Path(model)
    from mtp_gguf.gguf_tools.hub import hub_gguf as on_hub  # noqa: PLC0415  (slow to import)

    return on_hub.cached(on_hub.find(name))


def _server(asked: Asked) -> LlamaServer | None:
    """The server to run; None if it has to be built, or if none is needed."""
    if StepName.SERVE in asked.skip:
        return None
    try:
        return ask(find_server(asked.llama_server))
    except ServerError:
        named = asked.llama_server is not None or os.environ.get(VARIABLE)
        if named or StepName.BUILD_SERVER in asked.skip:
            raise
        return None


def _build(asked: Asked, server: LlamaServer | None) -> Step:
    done = "nothing is served" if StepName.SERVE in asked.skip else ""
    if server is not None:
        done = f"there is {server.path}"
    what = "fetch llama.cpp's sources and build the patched llama-server"
    return Step(StepName.BUILD_SERVER, ("build-server",), what, None, _BUILD_SECONDS, done)


def _serve(asked: Asked, made: _Made) -> Step:
    words = ["serve", made.model, "--host", asked.host, "--port", str(asked.port)]
    if made.head:
        words += ["--head", made.head]
    if asked.llama_server is not None:
        words += ["--llama-server", str(asked.llama_server)]
    words.append("--example")
    if asked.passed:
        words += ["--", *asked.passed]
    what = f"at http://{asked.host}:{asked.port}"
    if made.why_plain:
        what += f", without a head: {made.why_plain}"
    done = "as asked (--skip)" if StepName.SERVE in asked.skip else ""
    return Step(StepName.SERVE, tuple(words), what, done=done)


def _output(asked: Asked, name: str) -> Path:
    if asked.output is None:
        return Path(name)
    return asked.output / name if asked.output.is_dir() else asked.output


def _there(output: Path) -> str:
    """Why a file need not be made: an earlier run made it; RequestError if it is another one."""
    if not output.exists():
        return ""
    served = open_served(output)
    if not served.head.ready:
        raise RequestError(
            f"{output}: expected the result of an earlier run, found a file that cannot draft: "
            f"{served.head.reason}; name another output with -o"
        )
    return f"there is {output}"


def headline(model: str, steps: Sequence[Step]) -> str:
    """A line above the plan."""
    todo = [step for step in steps if not step.done]
    total = sum(step.seconds or 0 for step in todo)
    time = f", about {duration(total)} in all" if total else ""
    return f"{model}: {len(todo)} of {len(steps)} steps to do{time}"

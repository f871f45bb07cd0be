"""Why drafting does not pay with a model here: each cause with its measurement and its fix.

`measure` runs the model, `causes` reads the measurements, so that each can be tested alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

from mtp_gguf.gguf_tools.doctor import Diagnosis, Severity
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.heads.draft_list import read_draft_list
from mtp_gguf.gguf_tools.machine.shell import quoted
from mtp_gguf.gguf_tools.model import Model, open_model
from mtp_gguf.native.libraries.devices import devices
from mtp_gguf.native.runtime import llama_cpp

from .model import BenchModel, Setting
from .quality import Drafting, measure_drafting

# Prose and code, in words that every vocabulary has.
TEXT = """\
The river is low in summer, and the children of the village walk across it to the old mill. When
the rain comes in autumn, the water rises, and they have to take the long way over the bridge.

def count_words(path):
    counts = {}
    with open(path) as file:
        for line in file:
            for word in line.split():
                counts[word] = counts.get(word, 0) + 1
    return counts


def main():
    for name in sys.argv[1:]:
        print(name, len(count_words(name)))
"""
N_CTX = 512
POOR = 0.4  # acceptance of first drafts; heads that were trained with their trunk have 0.6 to 0.95
_PROMPT, _MOST_DRAFTS, _LEAST_DRAFTS = 12, 160, 16
_WINDOW, _WINDOWS = 32, 3  # tokens of the prompts that are continued
_LOST = 0.1  # acceptance that a list or a temperature may cost
_COVERED = 0.95  # of the text's tokens
_MARKER = re.compile(r"<\|[\w:.-]+\|>")
_NORMS = ("norm-not-raised", "norm-raised-twice")
_GPU = re.compile(r"(CUDA|ROCm|Vulkan|SYCL|HIP|MUSA|Metal|MTL)\d*")

Number: TypeAlias = float | int | str | None


@dataclass(frozen=True)
class Measured:
    """What running the model has shown.

    drafting: acceptance by position in greedy text, and the speed that it gives. first: acceptance
    of first drafts on the text; whole: over the whole vocabulary, None if nothing else can be
    drafted over. at_temperature: the same, sampled at `temperature`. covered: share of the text's
    tokens in the file's draft vocabulary, None if it has none. markers: special tokens of the chat
    template that the vocabulary does not have as one token. gpus: devices besides CPUs.
    """

    drafting: Drafting
    first: float
    whole: float | None
    at_temperature: float
    temperature: float
    covered: float | None
    markers: tuple[str, ...]
    gpus: tuple[str, ...]

    @property
    def gain(self) -> float:
        """Predicted speed at the best depth, relative to decoding without drafts."""
        return self.drafting.tokens_per_second / self.drafting.plain


@dataclass(frozen=True)
class Cause:
    """A reason why drafting does not pay.

    code: for scripts. measured: the figures behind it, by name. fix: the command that helps.
    """

    code: str
    text: str
    measured: dict[str, Number]
    fix: str


@dataclass(frozen=True)
class Usage:
    """How the model is to be run.

    context: tokens; 0 if not said. gpu_layers: layers on a GPU; 0 for none, -1 for all. threads:
    of the CPU.
    """

    context: int
    gpu_layers: int = 0
    threads: int = 1


@dataclass(frozen=True)
class Explanation:
    """The causes why drafting does not pay. measured: None if the model cannot draft."""

    measured: Measured | None
    causes: tuple[Cause, ...]

    def fields(self) -> dict[str, Any]:
        """Return the fields for --json."""
        measured = None
        if self.measured is not None:
            measured = {**asdict(self.measured), "gain": self.measured.gain}
        return {"measured": measured, "causes": [asdict(cause) for cause in self.causes]}

    def lines(self) -> Iterator[str]:
        """Yield the report."""
        if self.measured is not None:
            yield _summary(self.measured)
        for cause in self.causes:
            yield f"cause: {cause.text}"
            if cause.fix:
                yield f"  fix: {cause.fix}"
        if not self.causes:
            yield "no cause found: drafting pays here"


def explain_model(
    diagnosis: Diagnosis,
    path: Path,
    head: Path | None,
    text: str | None,
    temperature: float,
    usage: Usage,
) -> Explanation:
    """Explain a local model. head: its separate head. text: None for a short built-in one."""
    if not diagnosis.can_draft:
        return Explanation(None, tuple(from_headers(diagnosis)))
    with (
        open_model(path) as model,
        open_model(head or path) as drafts,
        BenchModel(
            path, n_ctx=N_CTX, threads=usage.threads, gpu_layers=usage.gpu_layers, head=head
        ) as loaded,
    ):
        if not drafts.head.kind.ours:
            return Explanation(None, tuple(from_headers(diagnosis)))
        measured = measure(loaded, drafts, TEXT if text is None else text, temperature)
        return Explanation(measured, tuple(causes(model, drafts, diagnosis, measured, usage)))


def _summary(measured: Measured) -> str:
    rates = " / ".join(f"{rate:.0%}" for rate in measured.drafting.acceptance)
    best = measured.drafting
    depth = f"depth {best.depth}" if best.depth else "no drafting"
    return (
        f"measured: acceptance by position {rates}, first drafts on the text {measured.first:.0%}, "
        f"at temperature {measured.temperature:g} {measured.at_temperature:.0%}; fastest with "
        f"{depth}, {measured.gain:.2f} times plain decoding"
    )


def measure(model: BenchModel, head: Model, text: str, temperature: float) -> Measured:
    """Measure drafting on a text. head: the file with the head, of the loaded model."""
    tokens = model.tokenize(text, special=False)[: _PROMPT + _MOST_DRAFTS]
    if len(tokens) < _PROMPT + _LEAST_DRAFTS:
        raise RequestError(
            f"the text has {len(tokens)} tokens, expected {_PROMPT + _LEAST_DRAFTS} or more"
        )
    stored = read_draft_list(head)
    first, sampled = _accepted(model, tokens, temperature, 0)
    whole = covered = None
    if stored is not None:
        listed = set(stored.ids)
        covered = sum(token in listed for token in tokens) / len(tokens)
    in_use = head.report.in_use
    if in_use is not None and in_use.gathered:
        whole, _ = _accepted(model, tokens, temperature, -1)
    count = min(max(len(tokens) // _WINDOW, 1), _WINDOWS)
    width = min(_WINDOW, len(tokens))
    windows = np.array(tokens[: count * width], np.int32).reshape(count, width)
    drafting = measure_drafting(model, windows)
    return Measured(
        drafting,
        first,
        whole,
        sampled,
        temperature,
        covered,
        tuple(_broken_markers(model)),
        tuple(d.name for d in devices() if _GPU.fullmatch(d.name)),
    )


def _accepted(
    model: BenchModel, tokens: Sequence[int], temperature: float, size: int
) -> tuple[float, float]:
    """Acceptance of first drafts over a text: greedy, and sampled at a temperature.

    A greedy draft is accepted with the probability that the trunk gives it.
    """
    with model.session(Setting(1, fastmtp_size=size)) as session:
        session.decode(tokens[:_PROMPT])
        accepted, probability = 0, 0.0
        for token in tokens[_PROMPT:]:
            [draft] = session.begin(token, 1)
            row = session.row(0)
            accepted += draft == session.argmax(row)
            probability += _probability(session.context, row, model.n_vocab, draft, temperature)
            session.end(0)
        count = len(tokens) - _PROMPT
        return accepted / count, probability / count


def _probability(context: object, row: int, n_vocab: int, token: int, temperature: float) -> float:
    """The trunk's probability of a token at a temperature; at 0, whether it is the likeliest."""
    pointer = llama_cpp.llama_get_logits_ith(context, row)
    logits = np.ctypeslib.as_array(pointer, (n_vocab,)).astype(np.float64)
    logits -= logits.max()
    if temperature <= 0:
        return float(logits[token] == 0)
    weights = np.exp(logits / temperature)
    return float(weights[token] / weights.sum())


def _broken_markers(model: BenchModel) -> Iterator[str]:
    """Special tokens that the chat template writes and that are several tokens here."""
    try:
        rendered = model.write_chat("Hello") if model.write_chat else ""
    except RequestError:
        rendered = ""
    for marker in dict.fromkeys(_MARKER.findall(rendered)):
        if len(model.tokenize(marker)) != 1:
            yield marker


def from_headers(diagnosis: Diagnosis, acceptance: float | None = None) -> list[Cause]:
    """Causes that the file shows: everything that keeps it from drafting, and wrong norms.

    acceptance: of first drafts, None if nothing can be drafted.
    """
    found = (f for f in diagnosis.findings if f.severity is Severity.FAULT or f.code in _NORMS)
    return [Cause(f.code, f.text, {"acceptance": acceptance}, f.fix) for f in found]


def causes(
    model: Model, head: Model, diagnosis: Diagnosis, measured: Measured, usage: Usage
) -> list[Cause]:
    """The causes in the order to fix them; none if drafting pays as it is."""
    found = from_headers(diagnosis, measured.first)
    found += _of_vocabulary(head, measured)
    found += _of_head(model, head, diagnosis, measured, known=bool(found))
    found += _of_text(model, measured)
    found += _of_machine(model, measured, usage)
    return found


def _of_vocabulary(head: Model, measured: Measured) -> Iterator[Cause]:
    covered, whole = measured.covered, measured.whole
    lost = 0.0 if whole is None else whole - measured.first
    if lost <= _LOST and (covered is None or covered >= _COVERED):
        return
    without = "" if whole is None else f", {whole:.0%} over the whole vocabulary"
    list_ = (
        "the draft vocabulary was chosen by id when the file was loaded"
        if covered is None
        else f"the draft vocabulary has {covered:.0%} of the text's tokens"
    )
    yield Cause(
        "draft-vocabulary",
        f"{list_}; first drafts are accepted {measured.first:.0%}{without}",
        {"covered": covered, "acceptance": measured.first, "without_list": whole},
        f"mtp-gguf fastmtp add {quoted(head.path)} --corpus FILES --in-place",
    )


def _of_head(
    model: Model, head: Model, diagnosis: Diagnosis, measured: Measured, *, known: bool
) -> Iterator[Cause]:
    """A head whose types are too small, or that was trained for another trunk."""
    rate = measured.first if measured.whole is None else measured.whole
    low = next((f for f in diagnosis.findings if f.code == "head-precision"), None)
    if low is not None:
        types = ", ".join(head.head.types)
        yield Cause(
            "head-type",
            f"{low.text}; first drafts are accepted {rate:.0%}",
            {"acceptance": rate, "types": types},
            low.fix,
        )
    elif rate < POOR and not known:
        yield Cause(
            "other-fine-tune",
            f"first drafts are accepted {rate:.0%}, and the file shows no reason: the head was "
            "probably trained with another fine-tune of this model (these have 11 to 12 %, a "
            "model's own head 60 to 95 %)",
            {"acceptance": rate},
            f"mtp-gguf train-head {quoted(model.path)} --text FILES",
        )


def _of_text(model: Model, measured: Measured) -> Iterator[Cause]:
    """What the text that is asked for makes of drafting: template, temperature."""
    path = quoted(model.path)
    if measured.markers:
        names = ", ".join(measured.markers)
        yield Cause(
            "chat-template",
            f"the chat template writes {names}, not a single token of this vocabulary: it belongs "
            "to another model, which makes every answer unlike what the head was trained on",
            {"markers": names},
            f"mtp-gguf serve {path} -- --chat-template-file TEMPLATE.jinja",
        )
    if measured.first - measured.at_temperature > _LOST:
        yield Cause(
            "temperature",
            f"at temperature {measured.temperature:g} first drafts are accepted "
            f"{measured.at_temperature:.0%}, greedy {measured.first:.0%}; a lower temperature is "
            "faster, but it samples other, less varied text",
            {
                "temperature": measured.temperature,
                "acceptance": measured.at_temperature,
                "greedy": measured.first,
            },
            f"mtp-gguf serve {path} -- --temp {_cooler(measured.temperature)}",
        )


def _cooler(temperature: float) -> str:
    return f"{temperature / 2:.2g}"


def _of_machine(model: Model, measured: Measured, usage: Usage) -> Iterator[Cause]:
    """What the machine, and the way the model is run, make of drafting."""
    path = quoted(model.path)
    architecture = model.architecture
    experts = model.first.integer(f"{architecture}.expert_count") or 0
    on_cpu = not measured.gpus or not usage.gpu_layers
    pays = measured.drafting.depth > 0
    verify = measured.drafting.verify
    ratio = verify[1] / verify[0]
    figures: dict[str, Number] = {
        "batch_of_2": ratio,
        "gain": measured.gain,
        "best_depth": measured.drafting.depth,
    }
    if experts and on_cpu and not pays:
        yield Cause(
            "experts-on-cpu",
            f"each drafted token reads other experts ({experts} in each layer) from the CPU's "
            f"memory: a batch of 2 tokens takes {ratio:.2f} times the time of 1",
            figures | {"experts": experts},
            f"mtp-gguf serve {path} -ngl -1" if measured.gpus else f"mtp-gguf tune {path}",
        )
    elif not pays:
        yield Cause(
            "verification",
            f"a batch of 2 tokens takes {ratio:.2f} times the time of 1, which accepted drafts do "
            "not make up for here",
            figures,
            f"mtp-gguf tune {path}",
        )
    if len(measured.gpus) > 1:
        first = measured.gpus[0]
        yield Cause(
            "several-gpus",
            f"the model is spread over {len(measured.gpus)} GPUs ({', '.join(measured.gpus)}), "
            "which wait for each other in every draft and every verification",
            {"gpus": len(measured.gpus)},
            f"mtp-gguf serve {path} -ngl -1 -- --device {first} --split-mode none",
        )
    trained = model.first.integer(f"{architecture}.context_length") or 0
    if 0 < trained < usage.context:
        yield Cause(
            "context",
            f"a context of {usage.context} tokens is asked for, the model was trained with "
            f"{trained}: beyond it, predictions of trunk and head part",
            {"context": usage.context, "trained": trained},
            f"mtp-gguf serve {path} -c {trained}",
        )

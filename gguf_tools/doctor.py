"""Diagnoses whether a model can draft, how and at what cost; if not, why, and how to fix it.

This module examines GGUF files by their headers and a few small tensors. The part for checkpoints,
and the measurements that need one, are in `convert.doctor_checkpoint`.
"""

import math
import re
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from sys import byteorder

from .errors import FormatError, RequestError
from .files.format import ArrayRef, ValueType
from .files.loadable import load_faults
from .files.loader_rules import refusals
from .files.tensor_types import F32
from .heads.acceptance import Stored, read_stored
from .heads.draft_list import HIDDEN_IDS_KEY, list_faults, read_draft_list, required_ids
from .heads.drafters import Drafter
from .heads.drafters import misfits as misfits_of_drafter
from .heads.fastmtp import DraftInUse, DraftLayout, StoredDraftVocabulary, draft_in_use
from .heads.head_files import models_beside, trunks_beside
from .heads.head_values import HeadValues, head_values
from .heads.nextn import BLOCKS, CARRIED
from .hub.remote import download_command, is_remote
from .machine.shell import quoted
from .memory import DraftMemory, draft_memory
from .model import Model
from .vision import VisionTower, misfits

_HUB_URL = re.compile(r"https://huggingface\.co/([\w.-]+/[\w.-]+)/?")
# Bits per weight of IQ4_XS, the smallest type that did not hurt acceptance in tests of published
# heads.
_LEAST_BITS = 4.25
# Norm weights in a GGUF are the checkpoint's plus 1, so they lie around 1. No published or
# synthetic head has a negative weight after that; before it, a large share is negative.
_NEGATIVE_SHARE = 0.02

# In place of the original, in commands that are printed.
UNKNOWN_ORIGINAL = "ORIGINAL"

_NOT_CONVERTED = {name for name, block in BLOCKS.items() if not block.converted}
_HEADS_NOT_CONVERTED = {name for name, block in BLOCKS.items() if not block.in_checkpoints}

# Element types that llama.cpp accepts for the tokenizer's arrays (llama-vocab.cpp).
_TOKENIZER_ARRAYS = {
    "tokens": (ValueType.STRING,),
    "scores": (ValueType.F32, ValueType.I32),
    "token_type": (ValueType.I32,),
    "merges": (ValueType.STRING,),
}


class Severity(str, Enum):
    """How bad a finding is.

    A fault prevents drafting, a warning lowers the acceptance rate, a note is only information.
    """

    FAULT = "fault"
    WARNING = "warning"
    NOTE = "note"


@dataclass(frozen=True)
class Finding:
    """One finding. code: for scripts. fix: the command that fixes it, or empty."""

    code: str
    severity: Severity
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The result of examining a model.

    head: a short description of the head, None if there is none. in_use: what our runtime drafts
    over, None for the whole vocabulary. runs_with: commands that draft
    with it. memory: the memory that drafting takes, None if the model cannot draft. tower: the
    vision tower, of an mmproj file or of the one that was examined with the model. drafter: the
    one that is examined in place of a head. acceptance: what the file states of its own head; None
    if it states nothing, or if the head is in another file.
    """

    path: str
    head: str | None
    draft: StoredDraftVocabulary | None
    runs_with: tuple[str, ...]
    memory: DraftMemory | None
    findings: tuple[Finding, ...]
    tower: VisionTower | None = None
    drafter: Drafter | None = None
    in_use: DraftInUse | None = None
    acceptance: Stored | None = None

    @property
    def is_sound(self) -> bool:
        """Whether no fault was found."""
        return not any(f.severity is Severity.FAULT for f in self.findings)

    @property
    def can_draft(self) -> bool:
        """Whether the model has a head or drafter, and no fault that prevents drafting."""
        return self.head is not None or (self.drafter is not None and self.is_sound)


def diagnose(model: Model, separate: Model | None, context: int, depth: int) -> Diagnosis:
    """Examine a GGUF, whose head may be in a `separate` file.

    context, depth: tokens of context and tokens per draft, for the memory estimate.
    """
    if model.tower:
        return _tower_alone(model, model.tower)
    if separate is not None and separate.drafter:
        return _with_drafter(model, separate, separate.drafter)
    if model.drafter and separate is None:
        return _drafter_alone(model, model.drafter)
    head = separate or model
    findings = []
    draft = None
    if separate is not None:
        of_trunk = ("architecture", "blocks")
        findings = [f for f in _head_findings(model, model) if f.code in of_trunk]
        findings += _separate(model, separate)
    if not findings:
        findings = list(_head_findings(model, head))
    if not findings:
        findings = [*_load_findings(model, head), *_norms(head, model)]
        if not is_remote(str(head.path)) and not any(f.code == "not-finite" for f in findings):
            findings += value_findings(head)
        findings += [*_precision(head), *_tokens(head)]
        if head.head.kind.ours:
            draft, on_draft = _draft_vocabulary(head)
            findings += on_draft
    if not any(f.severity is Severity.FAULT for f in findings):
        findings += [*_unloadable(model), *_sidecar(model, separate), *_no_graph(head)]
    lacks_head = any(f.code in ("architecture", "no-head", "claimed-head") for f in findings)
    if lacks_head and not model.head.is_alone:
        text = "without a head, generate, chat and serve draft from the text where it repeats"
        findings.append(Finding("from-text", Severity.NOTE, text))
    findings = [replace(f, fix=runnable(f.fix, model, head)) for f in findings]
    sound = not any(f.severity is Severity.FAULT for f in findings)
    ours = sound and head.head.kind.ours
    types = ", ".join(f"{count} {kind}" for kind, count in head.head.types.items()) if sound else ""
    return Diagnosis(
        path=str(model.path),
        head=f"{head.head.blocks_text} ({types})" if sound else None,
        draft=draft,
        runs_with=tuple(_runs_with(model, head, draft)) if sound else (),
        memory=draft_memory(model, head, draft, context, depth) if ours else None,
        findings=tuple(sorted(findings, key=lambda f: list(Severity).index(f.severity))),
        in_use=draft_in_use(draft, model.vocabulary_size or 0) if ours else None,
        acceptance=read_stored(head, model if separate else None) if sound else None,
    )


def with_tower(diagnosis: Diagnosis, model: Model, file: Model) -> Diagnosis:
    """The diagnosis of `model` with what the mmproj `file` adds to it."""
    tower = file.tower
    fix = runnable(f"mtp-gguf convert {original_of(model)} --mmproj-only", model)
    if tower is None:
        texts = [f"{file.path}: expected an mmproj file, found architecture {file.architecture!r}"]
    else:
        width = model.first.integer(f"{model.architecture}.embedding_length")
        texts = [
            f"{file.path}: {t}" for t in (tower.faults or misfits(tower, model.architecture, width))
        ]
    found = tuple(Finding("mmproj", Severity.FAULT, text, fix) for text in texts)
    return replace(diagnosis, findings=(*found, *diagnosis.findings), tower=tower)


def _tower_alone(model: Model, tower: VisionTower) -> Diagnosis:
    fix = f"mtp-gguf convert {original_of(model)} --mmproj-only"
    faults = [Finding("mmproj", Severity.FAULT, text, fix) for text in tower.faults]
    note = f"doctor MODEL --mmproj {quoted(model.path)} says whether it fits a model"
    findings = (*faults, Finding("mmproj", Severity.NOTE, note))
    return Diagnosis(str(model.path), None, None, (), None, findings, tower)


def _with_drafter(model: Model, file: Model, drafter: Drafter) -> Diagnosis:
    """The diagnosis of a model and the drafter for it."""
    found = misfits_of_drafter(drafter, file.head, model.head)
    faults = tuple(Finding("does-not-fit", Severity.FAULT, f"{file.path}: {t}") for t in found)
    commands = () if faults else tuple(_runs_with_drafter(quoted(model.path), file, drafter))
    text = f"{quoted(file.path)} fits this model: the same width and tokenizer"
    note = () if faults else (Finding("drafter", Severity.NOTE, text),)
    return Diagnosis(
        str(model.path), None, None, commands, None, (*faults, *note), model.tower, drafter
    )


def _drafter_alone(file: Model, drafter: Drafter) -> Diagnosis:
    """The diagnosis of a drafter's file: what it is for, and which models beside it it fits."""
    faults = [Finding("drafter", Severity.FAULT, text) for text in drafter.faults]
    if faults:
        return Diagnosis(str(file.path), None, None, (), None, tuple(faults), None, drafter)
    fits = [] if is_remote(str(file.path)) else trunks_beside(file, drafter)
    text = (
        f"a drafter, for faster generation with the model that it was trained for: {drafter.text}"
    )
    if fits:
        text += f"; it fits {', '.join(path.name for path in fits)} beside it"
    note = Finding("drafter", Severity.NOTE, text, _try_with(file, fits))
    trunk = quoted(fits[0]) if fits else "TRUNK.gguf"
    commands = tuple(_runs_with_drafter(trunk, file, drafter))
    return Diagnosis(str(file.path), None, None, commands, None, (note,), None, drafter)


def _runs_with_drafter(trunk: str, file: Model, drafter: Drafter) -> Iterator[str]:
    name = quoted(file.path)
    yield f"llama-server -m {trunk} -md {name} --spec-type {drafter.spec_type}"
    yield f"mtp-gguf serve {trunk} --head {name}"


def original_of(model: Model) -> str:
    """The hub id of the original checkpoint, or UNKNOWN_ORIGINAL.

    For architectures whose checkpoints are not read here, the placeholder OTHER.gguf.

    `general.base_model` is the original only if the file names a quantizer. In other files it is
    the model that this one was fine-tuned from, which has a different head.
    """
    if model.architecture in _HEADS_NOT_CONVERTED:
        return "OTHER.gguf"
    url = None
    if "general.quantized_by" in model.first.keys:
        url = model.first.keys.get("general.base_model.0.repo_url")
    match = _HUB_URL.fullmatch(url) if isinstance(url, str) else None
    return match[1] if match else UNKNOWN_ORIGINAL


def _unloadable(model: Model) -> Iterator[Finding]:
    """Values that crash llama.cpp instead of being rejected by its loader."""
    fix = f"mtp-gguf convert {original_of(model)} --mtp-f16"
    for fault in load_faults(model):
        yield Finding("unloadable", Severity.FAULT, f"llama.cpp would crash: {fault}", fix)


def _separate(model: Model, head: Model) -> Iterator[Finding]:
    try:
        head.head.check_fit(model.head)
    except (RequestError, FormatError) as error:
        added = f"mtp-gguf graft {quoted(model.path)} --from {original_of(model)}"
        fix = added if model.head.is_known else ""  # no head is for others
        yield Finding("does-not-fit", Severity.FAULT, str(error), fix)


def _sidecar(model: Model, separate: Model | None) -> Iterator[Finding]:
    """Say what a head-only file is for, what it needs and which models beside it it fits."""
    head = separate or model
    if not head.head.is_alone:
        return
    name = quoted(head.path)
    if separate is not None:
        text = f"{name} fits this model: the same architecture, sizes, layers and tokenizer"
        yield Finding("sidecar", Severity.NOTE, text)
    else:
        fits = [] if is_remote(str(model.path)) else models_beside(model)
        yield Finding("sidecar", Severity.NOTE, _purpose(model, fits), _try_with(model, fits))
    if head.head.is_shared and head.head.kind.graph:
        trunk = "TRUNK.gguf" if separate is None else quoted(model.path)
        yield Finding(
            "shared-head",
            Severity.NOTE,
            "embedding, last norm and output are those of the trunk: mtp-gguf (serve, MTPLlama) "
            "and llama.cpp with #28243 load the file, other llama.cpp does not; in the model's "
            "own file the head loads everywhere",
            f"mtp-gguf graft {trunk} --from {name}",
        )


def _no_graph(head: Model) -> Iterator[Finding]:
    """Say that the pinned llama.cpp does not draft with the architecture."""
    if not head.head.kind.graph:
        loads = head.head.is_alone or head.head.kind.loads_whole
        whole = "" if loads else ", and cannot load a file that has both"
        yield Finding(
            "no-graph",
            Severity.NOTE,
            f"llama.cpp at the version of this package has no MTP graph of {head.architecture}"
            f"{whole}; a newer llama-server drafts with it (serve --llama-server FILE --head HEAD)",
        )


def _purpose(head: Model, fits: Sequence[Path]) -> str:
    """One sentence that says what a head-only file is for."""
    layers = head.head.trunk_layers
    width = head.first.integer(f"{head.architecture}.embedding_length")
    tokens = head.vocabulary_size
    name = head.first.scalar("general.name")
    text = (
        f"a sidecar: only the MTP head of a model{f' ({name})' if isinstance(name, str) else ''}, "
        f"for faster generation with it. It needs the {head.architecture} model that it was made "
        f"from, with {layers} layers, width {width}"
        + (f" and {tokens} tokens" if tokens is not None else "")
    )
    if fits:
        text += f"; it fits {', '.join(path.name for path in fits)} beside it"
    return text


def _try_with(head: Model, fits: Sequence[Path]) -> str:
    """The command that examines a head-only file together with its trunk."""
    trunk = quoted(fits[0]) if fits else "TRUNK.gguf"
    return f"mtp-gguf doctor {trunk} --head {quoted(head.path)}"


def _head_findings(model: Model, head: Model) -> Iterator[Finding]:
    """Faults that prevent using the head, each with the command that fixes it."""
    original = original_of(model)
    added = f"mtp-gguf graft {quoted(model.path)} --from {original}"
    trained = f"mtp-gguf train-head {quoted(model.path)} --text FILES"
    if model.head.carried_from:
        added = trained
    fixes = {
        "architecture": trained if model.architecture in CARRIED else "",
        "blocks": f"mtp-gguf convert {original} --mtp-f16",
        "no-head": added,
        "claimed-head": added,
        "hidden-head": regraft(head, str(head.path)),
        "block-count": regraft(head, str(head.path)),
        "recurrent-layers": regraft(head, str(head.path)),
        "layers": regraft(head, str(head.path)),
        "shared-tensors": f"mtp-gguf convert {original} --mtp-f16",
        "draft-vocabulary": _new_list(head),
    }
    for fault in head.head.faults:
        fix = fixes.get(fault.code, regraft(head, original))
        yield Finding(fault.code, Severity.FAULT, fault.text, fix)


def _load_findings(model: Model, head: Model) -> Iterator[Finding]:
    """What llama.cpp's loader would reject in the file, or in both files."""
    for file in (model,) if head is model else (model, head):
        for text in refusals(file.head):
            fix = f"mtp-gguf convert {original_of(file)} --mtp-f16"
            yield Finding("load", Severity.FAULT, text, fix)


def _norms(head: Model, trunk: Model) -> Iterator[Finding]:
    """Check that norm weights are the checkpoint's plus 1, as llama.cpp expects."""
    norms = {name: _values(head, name) for name in head.head.suffixes if _is_norm(head, name)}
    fix = regraft(head, original_of(head))
    for name, values in norms.items():
        if not all(map(math.isfinite, values)):
            yield Finding(
                "not-finite", Severity.FAULT, f"{name} has values that are not finite", fix
            )
            return
    if not head.head.kind.hybrid:
        return  # other families store norm weights as they are
    never = [n for n, v in norms.items() if sum(x < 0 for x in v) > _NEGATIVE_SHARE * len(v)]
    if never:
        yield Finding(
            "norm-not-raised",
            Severity.WARNING,
            f"{len(never)} norms of the head have negative weights (first {never[0]}): they look "
            "as if they were never raised by 1; doctor --from ORIGINAL measures it",
            fix,
        )
        return
    reference = _trunk_norm(trunk)
    low = min((min(v) for v in norms.values() if v), default=0.0)
    if low >= 1 and reference and sum(x < 1 for x in reference) > len(reference) / 20:
        yield Finding(
            "norm-raised-twice",
            Severity.WARNING,
            f"no norm weight of the head is below 1 (least {low:.3g}), but the trunk's are: they "
            "look as if they were raised by 1 twice; doctor --from ORIGINAL measures it",
            fix,
        )


def value_findings(head: Model) -> Iterator[Finding]:
    """Findings for a head whose tensors are not finite, or whose matrices are all zero."""
    return findings_of(head_values(head), regraft(head, original_of(head)))


def findings_of(values: HeadValues, fix: str) -> Iterator[Finding]:
    """Findings for the values of a head, of a GGUF or a checkpoint."""
    if values.not_finite:
        text = f"{_and_others(values.not_finite)} has values that are not finite"
        yield Finding("not-finite", Severity.FAULT, text, fix)
    if values.zero:
        whole = len(values.zero) == values.matrices
        which = "all matrices of the head are" if whole else f"{_and_others(values.zero)} is"
        yield Finding(
            "zero-head",
            Severity.FAULT if whole else Severity.WARNING,
            f"{which} zero, as before a training: drafts do not depend on the text",
            fix,
        )


def _and_others(names: Sequence[str]) -> str:
    """The first name, and how many follow."""
    return names[0] + (f" (and {len(names) - 1} others)" if len(names) > 1 else "")


def _precision(head: Model) -> Iterator[Finding]:
    low = [
        name
        for name in head.head.suffixes
        if (tensor := head.tensors[name]).type.is_quantized
        and 8 * tensor.type.block_bytes / tensor.type.block_length < _LEAST_BITS
    ]
    if low:
        kinds = sorted({head.tensors[name].type.name for name in low})
        yield Finding(
            "head-precision",
            Severity.WARNING,
            f"{len(low)} matrices of the head are {', '.join(kinds)}, below 4 bits, where drafts "
            "were found to be worse",
            f"{regraft(head, original_of(head))} --mtp-type Q8_0",
        )


def _tokens(head: Model) -> Iterator[Finding]:
    """Tokenizer arrays that contradict the embedding or each other; llama.cpp rejects the file."""
    fix = f"mtp-gguf convert {original_of(head)} --mtp-f16"
    tokens = head.first.keys.get("tokenizer.ggml.tokens")
    rows = head.vocabulary_size
    count = tokens.count if isinstance(tokens, ArrayRef) else 0
    if count and rows is not None and count != rows:
        text = f"the tokenizer has {count} tokens, but the embedding {rows} rows"
        yield Finding("tokenizer", Severity.FAULT, text, fix)
    for name, kinds in _TOKENIZER_ARRAYS.items():
        key = f"tokenizer.ggml.{name}"
        array = head.first.keys.get(key)
        if array is None:
            continue
        wanted = " or ".join(kind.name for kind in kinds)
        if not isinstance(array, ArrayRef) or array.type not in kinds:
            is_array = isinstance(array, ArrayRef)
            kind = array.type if isinstance(array, ArrayRef) else head.first.types[key]
            found = f"{'an array of ' if is_array else 'one '}{kind.name}"
            text = f"{key}: expected an array of {wanted}, found {found}"
            yield Finding("tokenizer", Severity.FAULT, text, fix)
        elif name != "merges" and array.count < count:
            text = f"{key}: expected an entry for each of {count} tokens, found {array.count}"
            yield Finding("tokenizer", Severity.FAULT, text, fix)


def _draft_vocabulary(head: Model) -> tuple[StoredDraftVocabulary | None, list[Finding]]:
    fix = _new_list(head)
    try:
        stored = read_draft_list(head)
    except FormatError as error:
        return None, [Finding("draft-vocabulary", Severity.FAULT, str(error), fix)]
    findings = []
    if stored is not None:
        layout = stored.header.layout
        if layout is DraftLayout.SIDECAR:
            fix = "mtp-gguf fastmtp add MODEL --layout sidecar --corpus FILES"
        for fault in list_faults(stored.ids, head.vocabulary_size or 0, required_ids(head)):
            text = f"the draft vocabulary is invalid: {fault}"
            findings.append(Finding("draft-vocabulary", Severity.FAULT, text, fix))
        if layout is not DraftLayout.IDS:
            findings.append(
                Finding(
                    "layout",
                    Severity.NOTE,
                    f"the draft vocabulary has rows of its own (layout {layout.value}): "
                    "stock llama.cpp cannot load the file",
                )
            )
        elif stored.header.coverage is None:
            text = "the draft vocabulary is not counted on text; a list from a corpus drafts better"
            findings.append(Finding("not-counted", Severity.NOTE, text, fix))
    if HIDDEN_IDS_KEY in head.first.keys:
        text = "the file has a draft vocabulary that is hidden and not used"
        findings.append(Finding("hidden-list", Severity.NOTE, text, f"{fix} --in-place"))
    return stored.header if stored else None, findings


def _runs_with(model: Model, head: Model, draft: StoredDraftVocabulary | None) -> Iterator[str]:
    """Commands that draft with the model: stock llama-server, `mtp-gguf serve`, and in process."""
    stock = draft is None or draft.layout is DraftLayout.IDS
    trunk = "TRUNK.gguf" if model.head.is_alone else quoted(model.path)
    separate = head is not model or model.head.is_alone
    files = f"-m {trunk}" + (f" -md {quoted(head.path)}" if separate else "")
    if not head.head.kind.graph:
        yield f"llama-server {files} --spec-type draft-mtp  (a newer llama.cpp)"
        return
    if stock:
        yield f"llama-server {files} --spec-type draft-mtp"
    option = f" --head {quoted(head.path)}" if separate else ""
    yield f"mtp-gguf serve {trunk}{option}" + ("" if stock else "  (patched server)")
    if not head.head.kind.ours:
        return
    if separate:
        path = "TRUNK.gguf" if model.head.is_alone else str(model.path)
        yield f"python: mtp_gguf.native.MTPLlama({path!r}, mtp_head={str(head.path)!r})"
    else:
        libraries = "" if stock else "  (libraries of mtp-gguf build-server, docs/server.md)"
        yield f"mtp-gguf generate {trunk} -p PROMPT{libraries}"


def _is_norm(model: Model, name: str) -> bool:
    tensor = model.tensors[name]
    return "norm" in name and len(tensor.shape) == 1 and tensor.type is F32


def _trunk_norm(model: Model) -> Sequence[float]:
    """A norm of the trunk's last layer, which shows the range of correct weights in this model."""
    name = f"blk.{model.head.trunk_layers - 1}.post_attention_norm.weight"
    return _values(model, name) if name in model.tensors and _is_norm(model, name) else ()


def _values(model: Model, name: str) -> Sequence[float]:
    values = array("f", model.read(name))
    if byteorder == "big":
        values.byteswap()
    return values


def regraft(head: Model, source: str) -> str:
    """The command that replaces the head of a file by that of another model."""
    return (
        f"mtp-gguf strip {quoted(head.path)} -o trunk.gguf && "
        f"mtp-gguf graft trunk.gguf --from {quoted(source)} -o fixed.gguf"
    )


def runnable(fix: str, *models: Model) -> str:
    """The command with remote files downloaded first, unless it reads remote files itself.

    Empty for a conversion of an architecture that `convert` does not know.
    """
    if fix.startswith("mtp-gguf convert") and models[0].architecture in _NOT_CONVERTED:
        return ""
    if not fix or fix.startswith(("mtp-gguf graft", "mtp-gguf convert")):
        return fix
    for path in dict.fromkeys(str(model.path) for model in models):
        if is_remote(path) and quoted(path) in fix:
            local = quoted(path.rpartition("/")[2])
            fix = f"{download_command(path)} && {fix.replace(quoted(path), local)}"
    return fix


def _new_list(head: Model) -> str:
    return f"mtp-gguf fastmtp add {quoted(head.path)} --corpus FILES"

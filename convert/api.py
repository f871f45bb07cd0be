"""`mtp_gguf.convert(...)`: the conversion with all options of `mtp-gguf convert`."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from mtp_gguf.gguf_tools.errors import OptionError, RequestError
from mtp_gguf.gguf_tools.files.new_file import head_warnings
from mtp_gguf.gguf_tools.files.output import check_output
from mtp_gguf.gguf_tools.heads.acceptance import LEAST
from mtp_gguf.gguf_tools.heads.fastmtp import DraftLayout
from mtp_gguf.gguf_tools.imatrix import read_imatrix
from mtp_gguf.gguf_tools.machine.interrupted import leaves_nothing
from mtp_gguf.gguf_tools.machine.shell import quoted
from mtp_gguf.gguf_tools.machine.system import MAX_THREADS, CoreMeter
from mtp_gguf.gguf_tools.machine.text_files import whole_texts
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.gguf_tools.progress import QUIET, Progress

from .checkpoints.source_rows import SourceRows
from .conversion import Planned, is_gguf, planned
from .families.target_model import HeadChoice
from .heads.acceptance import AcceptanceCheck, is_measured, record_acceptance
from .heads.converted_head import head_in_type
from .heads.head_gate import HeadGate, gate_type, is_small, measurable, refuse
from .options import (
    BPW_RANGE,
    DEFAULT_LAYOUT,
    DEFAULT_QUANT,
    LEAST_KLD,
    PREFERENCES,
    DraftOptions,
    StrPath,
    check_range,
    gguf_output,
    head_type_named,
    listed,
)
from .pipeline import Outcome, run
from .plans.head_choice import AUTO, choose_head
from .plans.mix import Choice, Knapsack, exact_overrides, read_recipe, recipe_lines, write_recipe
from .plans.plan import Plan, Request
from .plans.plan_mmproj import MMPROJ_TYPES, parse_mmproj_type
from .plans.precision import FILE_TYPES, parse_override, parse_tensor_type, unknown_name
from .plans.target_mix import Target, choose_types

if TYPE_CHECKING:
    from mtp_gguf.bench.head_speed import HeadSpeed


@dataclass(frozen=True, eq=False)
class Converted:
    """What a conversion plans and writes.

    plans: one for each precision, with all tensors. choice: the types chosen for a target, with
    the other choices; None without a target. heads: what was measured to choose the head's type.
    outcome: time and memory; None if nothing was written. warnings: sentences about what was
    written. acceptance: of each file that can draft, by its first shard, if it was to be measured.
    """

    plans: tuple[Plan, ...]
    choice: tuple[Choice, Knapsack] | None = None
    heads: "tuple[HeadSpeed, ...]" = ()
    outcome: Outcome | None = None
    warnings: tuple[str, ...] = ()
    acceptance: Mapping[Path, AcceptanceCheck] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[Path, int]:
        """The files and their sizes in bytes, the model's first shard first."""
        return {shard.path: shard.layout.size for plan in self.plans for shard in plan.shards}

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files, the model's first shard first."""
        return tuple(self.sizes)


def convert(
    model: StrPath,
    output: StrPath | None = None,
    *,
    quant: str = DEFAULT_QUANT,
    also: str | Sequence[str] = (),
    mtp_f16: bool = False,
    mtp_type: str | None = None,
    no_mtp: bool = False,
    head_only: bool = False,
    mtp_from: StrPath | None = None,
    tensor_type: str | Sequence[str] = (),
    target_size: int | None = None,
    target_bpw: float | None = None,
    target_kld: float | None = None,
    target_text: StrPath | Sequence[StrPath] = (),
    prefer: str | None = None,
    head_costs: StrPath | None = None,
    recipe: StrPath | None = None,
    imatrix: StrPath | None = None,
    fastmtp: int | bool | None = None,
    fastmtp_layout: DraftLayout | str = DEFAULT_LAYOUT,
    fastmtp_corpus: StrPath | Sequence[StrPath] = (),
    fastmtp_ids: StrPath | None = None,
    mmproj: str | None = None,
    mmproj_only: bool = False,
    sidecar: str | None = None,
    revision: str | None = None,
    tokenizer_pre: str | None = None,
    split_max_size: int | None = None,
    stream: bool | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    no_check: bool = False,
    least_acceptance: float = LEAST,
    force: bool = False,
    progress: Progress = QUIET,
    on_plan: Callable[[Converted], None] = lambda _: None,
) -> Converted:
    """Convert a checkpoint, or a GGUF in 16 or 32 bits, to one GGUF that includes its MTP head.

    The arguments are the options of `mtp-gguf convert`, whose help describes them.

    Args:
        model: A folder, OWNER/NAME on the hub, or a GGUF.
        output: A file, or an existing folder; None for the current folder.
        also: Further mixes, each written to a file of its own.
        sidecar: The mix of a further file with the head alone.
        mtp_from: The option --from: another model, whose head is taken.
        tensor_type: REGEX=TYPE, one or several.
        target_size, split_max_size: In bytes.
        target_text: Files of text to measure on, for a target or the head type "auto".
        head_costs: A file with the costs of drafts, for the head type "auto"; written if there is
            none.
        prefer: "quality", or "speed" for only types that have kernels on this CPU.
        fastmtp: Number of tokens; True for the default number.
        progress: Shows the progress; by default nothing is shown.
        on_plan: Called with the plans before anything is written.

    Raises:
        OptionError: Options contradict each other, or have impossible values.
        MtpGgufError: Something else prevents the conversion; its subclasses say what.

    Example:
        >>> made = mtp_gguf.convert("Qwen/Qwen3.5-4B", "out.gguf", mtp_type="Q8_0", fastmtp=True)
        >>> made.paths, made.warnings

    """
    model, mtp_from = str(model), None if mtp_from is None else str(mtp_from)
    output = None if output is None else gguf_output(str(output))
    recipe = None if recipe is None else Path(recipe)
    costs_file = None if head_costs is None else Path(head_costs)
    imatrix = None if imatrix is None else Path(imatrix)
    precisions = _precisions(quant, listed(also))
    head_name = head_type_named(mtp_f16, mtp_type)
    check_range("--threads", threads, 1, MAX_THREADS)
    check_range("--target-bpw", target_bpw, *BPW_RANGE)
    check_range("--target-kld", target_kld, LEAST_KLD)
    check_range("--target-size", target_size, 1)
    check_range("--split-max-size", split_max_size, 1)
    check_range("--least-acceptance", least_acceptance, 0, 1)
    draft = DraftOptions.of(fastmtp, fastmtp_corpus, fastmtp_ids)
    layout = _layout(fastmtp_layout)
    draft = replace(draft, layout=layout)
    if no_mtp and (head_only or mtp_from or head_name or draft.wanted):
        raise OptionError("--no-mtp cannot be combined with other options for the head")
    if layout is not DraftLayout.IDS and not draft.wanted:
        raise OptionError(f"--fastmtp-layout {layout.value} needs --fastmtp")
    head = HeadChoice.WITH_TRUNK
    if head_only or layout is DraftLayout.SIDECAR:
        head = HeadChoice.ALONE
    elif no_mtp:
        head = HeadChoice.NONE
    if sidecar is not None and (head is not HeadChoice.WITH_TRUNK or mmproj_only):
        raise OptionError(
            "--sidecar cannot be combined with --no-mtp, --head-only, --mmproj-only or "
            "--fastmtp-layout sidecar"
        )
    if head_name and head_name.upper() == AUTO and head is not HeadChoice.WITH_TRUNK:
        raise OptionError("--mtp-type auto needs the trunk in the same file")
    if sidecar is not None and is_gguf(model):
        raise OptionError(
            f"--sidecar needs a checkpoint; for a GGUF: mtp-gguf extract {quoted(model)}"
        )
    if mmproj_only:
        others = (head_only, no_mtp, mtp_from, draft.wanted, head_name, also, imatrix)
        if any((*others, tensor_type, split_max_size)):
            raise OptionError(
                "--mmproj-only cannot be combined with options for the language model"
            )
        head = HeadChoice.VISION
        mmproj = mmproj or MMPROJ_TYPES[0]
    auto = head_name is not None and head_name.upper() == AUTO
    try:
        head_type = parse_tensor_type(head_name, "--mtp-type") if head_name and not auto else None
        overrides = tuple(parse_override(text) for text in listed(tensor_type))
        tower_type = parse_mmproj_type(mmproj) if mmproj else None
    except RequestError as error:
        raise OptionError(str(error)) from None
    target = Target(target_size, target_bpw, target_kld)
    if [target_size, target_bpw, target_kld].count(None) < 2:
        raise OptionError("--target-size, --target-bpw and --target-kld contradict each other")
    if prefer and not target.wanted:
        raise OptionError("--prefer needs a target, such as --target-size")
    if target_text and not (target.wanted or auto):
        raise OptionError("--target-text needs a target, such as --target-size, or --mtp-type auto")
    if costs_file is not None and not auto:
        raise OptionError("--head-costs needs --mtp-type auto")
    if prefer not in (None, *PREFERENCES):
        raise OptionError(f"expected {' or '.join(PREFERENCES)}, found {prefer}", "--prefer")
    texts = [Path(path) for path in listed(target_text)]
    text = "".join(whole_texts(texts, "--target-text")) if texts else ""
    if (target.wanted or recipe) and (also or sidecar or head is HeadChoice.ALONE or mmproj_only):
        raise OptionError(
            "a target or --recipe cannot be combined with --also, --mmproj-only or a head alone"
        )
    request = Request(
        quant=precisions[0],
        also=precisions[1:],
        mmproj=tower_type,
        sidecar=_mix(sidecar, "--sidecar") if sidecar is not None else None,
        head=head,
        head_type=head_type,
        overrides=overrides,
        imatrix=read_imatrix(imatrix) if imatrix else None,
        draft=draft if draft.wanted else None,
        tokenizer_pre=tokenizer_pre,
        split_max_size=split_max_size,
        output=output,
        measured=is_measured(no_check=no_check),
    )
    heads: tuple[HeadSpeed, ...] = ()
    if auto:
        request, heads = choose_head(
            model, revision, mtp_from, request, stream, text, costs_file, threads, progress
        )
    choice = None
    if target.wanted:
        if recipe:
            check_output(recipe, [], overwrite)
        choice = choose_types(
            model,
            request,
            target,
            imatrix,
            text,
            threads,
            progress,
            with_kernels=prefer == PREFERENCES[1],
        )
        types = choice[0].types
        if recipe:
            write_recipe(recipe, choice[0])
    else:
        types = read_recipe(recipe) if recipe else {}
    request = replace(
        request, overrides=(*request.overrides, *exact_overrides(types)), recipe=recipe_lines(types)
    )
    with planned(model, revision, mtp_from, request, stream, progress) as conversion:
        result = Converted(conversion.plans, choice, heads)
        on_plan(result)
        if dry_run:
            return result
        sources = [*conversion.sources, *draft.files, *([imatrix] if imatrix else [])]
        for path in result.paths:
            check_output(path, sources, overwrite)
        with leaves_nothing(*result.paths, resumes=conversion.resumes):
            outcome = _run(conversion, threads, progress)
    first = result.paths[0]
    warnings = head_warnings(first)
    if head_type and head is HeadChoice.WITH_TRUNK and not no_check and len(result.paths) == 1:
        gate = _compared(first, mtp_from or model, revision, head_type.name, progress)
        if gate:
            refuse(gate, force=force, written=first)
            warnings = [*warnings, *gate.warnings()]
    checks = {
        plan.shards[0].path: record_acceptance(
            plan.shards[0].path, progress, least_acceptance, trunk=None if plan.has_trunk else first
        )
        for plan in result.plans
        if plan.is_measured
    }
    poor = [f"{path}: {check.warning}" for path, check in checks.items() if check.warning]
    return replace(result, outcome=outcome, warnings=(*warnings, *poor), acceptance=checks)


def _layout(layout: DraftLayout | str) -> DraftLayout:
    names = [each.value for each in DraftLayout]
    if layout not in names:
        raise OptionError(f"expected {', '.join(names)}, found {layout}", "--fastmtp-layout")
    return DraftLayout(layout)


def _compared(
    path: Path, source: str, revision: str | None, head_type: str, progress: Progress
) -> HeadGate | None:
    """Compare the head of a written file, if its type is small, with that of its source."""
    if not is_small(head_type) or is_gguf(source):
        return None
    with open_model(path) as written:
        if not measurable(written):
            return None
        convert_to = partial(head_in_type, written, source, revision, path, progress)
        return gate_type(path, None, head_type, convert_to, progress)


def _precisions(quant: str, also: Sequence[str]) -> tuple[str, ...]:
    """Return the names of the requested mixes, that of the first file first."""
    asked = [("--quant", quant), *(("--also", name) for name in also)]
    names = tuple(_mix(name, option) for option, name in asked)
    if twice := [name for name, count in Counter(names).items() if count > 1]:
        raise OptionError(
            f"expected each mix once, including that of --quant; found {twice[0]} again", "--also"
        )
    return names


def _mix(name: str, option: str) -> str:
    """Return the key of FILE_TYPES that an option names, in any case."""
    if name.upper() not in FILE_TYPES:
        raise OptionError(unknown_name(name, FILE_TYPES), option)
    return name.upper()


def _run(conversion: Planned, threads: int | None, progress: Progress) -> Outcome:
    """Write the files."""
    total = sum(plan.size for plan in conversion.plans)
    meter = CoreMeter()

    def busy() -> str:
        return f"{meter.cores} cores {meter.share():.0%} busy"

    rows = SourceRows(conversion.weights)
    with progress.count("convert", total, busy) as advance:
        return run(conversion.plans, rows, advance, threads, resumable=conversion.resumes)

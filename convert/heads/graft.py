"""`mtp_gguf.graft(...)`: adds a head to a GGUF, with all options of `mtp-gguf graft`."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from mtp_gguf.gguf_tools.doctor import original_of
from mtp_gguf.gguf_tools.errors import OptionError
from mtp_gguf.gguf_tools.files.format import Value
from mtp_gguf.gguf_tools.files.new_file import head_warnings, local_files, output_path, write_file
from mtp_gguf.gguf_tools.files.output import check_output
from mtp_gguf.gguf_tools.files.rewrite import OutputSpec, inserted
from mtp_gguf.gguf_tools.heads import transplant
from mtp_gguf.gguf_tools.heads.acceptance import LEAST, reserved
from mtp_gguf.gguf_tools.heads.draft_list import BEFORE_TOKENIZER
from mtp_gguf.gguf_tools.hub.resolve import names_gguf, open_any_model
from mtp_gguf.gguf_tools.machine.interrupted import leaves_nothing
from mtp_gguf.gguf_tools.model import Model
from mtp_gguf.gguf_tools.progress import QUIET, Progress

from ..options import (
    DraftOptions,
    StrPath,
    check_range,
    check_revision,
    gguf_output,
    head_type_named,
)
from .acceptance import AcceptanceCheck, is_measured, record_acceptance
from .converted_head import converted_head, head_in_type
from .gguf_draft import rank_for_gguf
from .head_gate import HeadGate, gate_donor, gate_type, is_small, measurable, refuse


@dataclass(frozen=True)
class Grafted:
    """The file that a graft wrote.

    compared: the head's acceptance rate with that of the head it was made from; None if not
    measured. acceptance: of the finished file; None if it was not to be measured. original: the
    model that the base was made from.
    """

    path: Path
    compared: HeadGate | None
    acceptance: AcceptanceCheck | None
    original: str

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences about the head."""
        found = [*head_warnings(self.path), *(self.compared.warnings() if self.compared else ())]
        poor = self.acceptance.warning if self.acceptance else None
        return (*found, *([poor] if poor else ()))


def graft(
    base: StrPath,
    source: StrPath,
    output: StrPath | None = None,
    *,
    mtp_f16: bool = False,
    mtp_type: str | None = None,
    fastmtp: int | bool | None = None,
    fastmtp_corpus: StrPath | Sequence[StrPath] = (),
    fastmtp_ids: StrPath | None = None,
    revision: str | None = None,
    overwrite: bool = False,
    no_check: bool = False,
    least_acceptance: float = LEAST,
    force: bool = False,
    progress: Progress = QUIET,
) -> Grafted:
    """Add the MTP head of `source` to a GGUF that has none.

    The arguments are the options of `mtp-gguf graft`, whose help describes them.

    Args:
        base: A GGUF, also on the hub: OWNER/NAME:QUANT.
        source: The option --from: the original (folder, OWNER/NAME), a GGUF, or an mtp- file.
        output: A file, or an existing folder; None for BASE-MTP.gguf.
        fastmtp: Number of tokens; True for the default number.
        progress: Shows the progress; by default nothing is shown.

    Raises:
        OptionError: Options contradict each other, or have impossible values.
        MtpGgufError: Something else prevents the graft; its subclasses say what.

    Example:
        >>> made = mtp_gguf.graft("Qwen3.5-9B-Q4_K_M.gguf", "Qwen/Qwen3.5-9B", "out.gguf")
        >>> made.path, made.warnings

    """
    base, source = str(base), str(source)
    output = None if output is None else gguf_output(str(output))
    check_range("--least-acceptance", least_acceptance, 0, 1)
    draft = DraftOptions.of(fastmtp, fastmtp_corpus, fastmtp_ids)
    head_type = head_type_named(mtp_f16, mtp_type)
    from_gguf = names_gguf(source)
    if from_gguf and (head_type or revision):
        raise OptionError(
            "--mtp-type, --mtp-f16 and --revision are for checkpoints; "
            "a GGUF's head is copied as it is"
        )
    if not from_gguf:
        check_revision(source, revision)
    with open_any_model(base) as opened:
        transplant.check_takes_a_head(opened)
        target = output_path(output, opened, "{}-MTP")
        sources = [*local_files(opened), *draft.files]
        check_output(target, sources, overwrite)
        with leaves_nothing(target), ExitStack() as stack:
            gate: HeadGate | None = None
            if from_gguf:
                donor = stack.enter_context(open_any_model(source))
                spec = transplant.graft(opened, donor, _keys(opened, donor, draft, progress))
                if not no_check and measurable(opened) and measurable(donor):
                    gate = gate_donor(opened.paths[0], donor.paths[0], progress)
                sources += local_files(donor)
            else:
                donor = stack.enter_context(
                    converted_head(opened, source, revision, head_type, draft, target, progress)
                )
                spec = transplant.graft(opened, donor)
                if not no_check and head_type and is_small(head_type) and measurable(opened):
                    convert = partial(head_in_type, opened, source, revision, target, progress)
                    files = opened.paths[0], donor.paths[0]
                    gate = gate_type(*files, head_type, convert, progress)
            refuse(gate, force=force)
            measured = is_measured(no_check=no_check) and opened.head.kind.ours
            if measured:
                metadata = inserted(spec.metadata, reserved(), BEFORE_TOKENIZER)
                spec = OutputSpec(metadata, spec.tensors)
            write_file("graft", spec, target, sources, overwrite, progress)
        original = original_of(opened)
    check = record_acceptance(target, progress, least_acceptance) if measured else None
    return Grafted(target, gate, check, original)


def _keys(
    base: Model, donor: Model, draft: DraftOptions, progress: Progress
) -> dict[str, Value] | None:
    """The keys of the requested draft vocabulary; None without one."""
    if not draft.wanted:
        return None
    ranked = rank_for_gguf(_tokenizer_of(base, donor, draft), draft)
    if ranked.warning:
        progress.say(f"note: {ranked.warning}")
    return ranked.metadata(with_ids=True)


def _tokenizer_of(base: Model, donor: Model, draft: DraftOptions) -> Model:
    """Return the model whose tokenizer counts a corpus: the base if local, else the donor."""
    if not draft.corpus or local_files(base):
        return base
    if local_files(donor):
        return donor
    raise OptionError(
        "--fastmtp-corpus needs a local file for its tokenizer, and both models are remote; "
        "graft first, then: mtp-gguf fastmtp add OUTPUT --corpus FILES --in-place"
    )

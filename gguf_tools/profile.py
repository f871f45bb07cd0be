"""model.mtp.toml: the best draft settings for a model on a machine, measured by `mtp-gguf tune`.

    format = 2
    [[profile]]            one for each kind of kernels, the newest first:
    [profile.model]        size, fingerprint                  of the file that was measured
    [profile.machine]      cpu, cores, kernels, device        that it was measured on
    [profile.settings]     depth, fastmtp_size, rollback, draft_threads
    [profile.measured]     on, versions, plain_tok_s, tok_s   the throughput of the settings
    [profile.costs]        verify_ms, draft_ms                initial costs for `depth = "auto"`
    [[profile.candidates]] the settings that were tried, and tok_s

The file is stored next to the model. `generate`, `serve` and MTPLlama read it; a profile applies
only to the model file, the machine and the kernels that it was measured with.
"""

import hashlib
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from .errors import FormatError
from .files.output import write_whole
from .hub.sources import FileSource
from .machine.system import KERNELS, Machine, this_machine
from .machine.toml_table import Table, read_table, toml_value
from .model import shard_paths, whole_name

FORMAT = 2
SUFFIX = ".mtp.toml"
AUTO: Literal["auto"] = "auto"
MAX_DEPTH = 16  # mtp.h: MTP_MAX_DEPTH
AUTO_MAX_DEPTH = 4  # for each drafted token, stock llama.cpp keeps a copy of the recurrent state
# Most tokens drafted from the text in one cycle: a batch of 15 with the token before them, up to
# which a token's bits do not depend on its batch (docs/verification.md).
LOOKUP_TOKENS = 14
# The origin of an accepted draft that came from the text. Those of the head are 1, 2, … by
# position; 0 is a token sampled from the trunk.
FROM_TEXT = -1
LARGEST_PROFILE = 1 << 18  # bytes; a few thousand are usual
ROLLBACKS = ("snapshot", "checkpoint")  # the modes that `tune` compares

_SAMPLES = 64  # per shard, of _SAMPLE_BYTES each: enough to distinguish fine-tunes
_SAMPLE_BYTES = 4096


@dataclass(frozen=True)
class DraftSettings:
    """How to draft.

    depth: tokens drafted in each cycle; 0 disables drafting, "auto" adapts to the text.
    fastmtp_size: tokens of the draft vocabulary to use; 0 for all, -1 for the whole vocabulary.
    rollback: how rejected drafts are rolled back. draft_threads: CPU threads of the head; 0 for as
    many as the trunk uses.
    """

    depth: int | Literal["auto"] = AUTO
    fastmtp_size: int = 0
    rollback: str = "snapshot"
    draft_threads: int = 0


@dataclass(frozen=True)
class Candidate:
    """Settings that were tried, and their throughput in tokens per second."""

    settings: DraftSettings
    tok_s: float


@dataclass(frozen=True)
class Costs:
    """Costs in ms: verify_ms[i] for a trunk batch of i + 1 tokens, draft_ms[i] for i + 1 drafts."""

    verify_ms: tuple[float, ...] = ()
    draft_ms: tuple[float, ...] = ()


@dataclass(frozen=True)
class ModelIdentity:
    """Identifies a model's files: their total size, and a digest of samples of their contents."""

    size: int
    fingerprint: str


@dataclass(frozen=True)
class Profile:
    """The result of `tune`. on: the date, as 2026-01-31. versions: of the software it used."""

    model: ModelIdentity
    machine: Machine
    settings: DraftSettings
    on: str
    versions: str
    plain_tok_s: float
    tok_s: float
    costs: Costs = Costs()
    candidates: tuple[Candidate, ...] = ()


def profile_path(model: Path) -> Path:
    """The path of a model's profile, next to the model; a split model has one for all shards."""
    return model.with_name(Path(whole_name(model)).stem + SUFFIX)


def identify(model: Path) -> ModelIdentity:
    """The identity of a model's files, from their sizes and samples; takes milliseconds."""
    digest = hashlib.sha256()
    total = 0
    for path in shard_paths(model):
        with closing(FileSource(path)) as source:
            size = source.size
            total += size
            digest.update(size.to_bytes(8, "little"))
            step = max(_SAMPLE_BYTES, size // _SAMPLES)
            for offset in range(0, size, step):
                digest.update(source.read(offset, min(_SAMPLE_BYTES, size - offset)))
    return ModelIdentity(total, digest.hexdigest())


def find_profile(
    model: Path, kernels: str, device: str | None = "CPU"
) -> tuple[Profile | None, str | None]:
    """The profile that applies to a model on this machine, and a note if one was ignored.

    kernels, device: what the model will run with (see Machine); the device is not compared if it
    is None. (None, None) if there is no profile. FormatError if it cannot be read.
    """
    path = profile_path(model)
    if not path.exists():
        return None, None
    profiles = read_profiles(path)
    profile = next((p for p in profiles if p.machine.kernels == kernels), None)
    if profile is None:
        measured = " and ".join(p.machine.kernels for p in profiles)
        return None, (
            f"{path.name} is ignored, it was measured with {measured} kernels instead of "
            f"{kernels}; `mtp-gguf tune {model.name}` on such libraries (MTP_GGUF_LIBS) adds a "
            "profile for them"
        )
    machine = this_machine(kernels, profile.machine.device if device is None else device)
    if difference := profile.machine.differs_in(machine):
        why = f"it was measured on another machine: {difference}"
    elif profile.model != identify(model):
        why = "it was measured with another file"
    elif impossible := impossible_speed(
        profile.settings.depth, profile.tok_s / profile.plain_tok_s
    ):
        why = f"other programs disturbed its measurement: {impossible}"
    else:
        return profile, None
    return None, f"{path.name} is ignored, {why}; `mtp-gguf tune {model.name}` makes a new one"


def impossible_speed(depth: int | str, times: float) -> str | None:
    """A sentence if a depth cannot be `times` as fast as no drafting; None if it can.

    A cycle takes at least as long as a token without drafts and yields a token more than drafted.
    Depth 0 is no drafting itself, so any ratio is noise.
    """
    most = 1 + (depth if isinstance(depth, int) else max(AUTO_MAX_DEPTH, LOOKUP_TOKENS))
    if depth == 0 or times <= most:
        return None
    return (
        f"depth {depth} was measured at {times:.2f} times the speed of no drafting, and at most "
        f"{most} times is possible"
    )


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile in place of the one for the same kernels, atomically.

    Those for other kernels stay if they are of the same model file. A file that cannot be read is
    replaced.
    """
    profiles = [profile]
    with suppress(FormatError):
        profiles += [
            other
            for other in read_profiles(path)
            if other.model == profile.model and other.machine.kernels != profile.machine.kernels
        ]
    write_whole(path, _render(profiles).encode())


def read_profiles(path: Path) -> list[Profile]:
    """Read the profiles of a file, one for each kind of kernels.

    FormatError, naming the field, if anything is not as `tune` writes it.
    """
    root = read_table(path, LARGEST_PROFILE, "delete it or tune anew")
    found = root.integer("format", 0, 2**31)
    if found != FORMAT:
        raise FormatError(f"{path}: format: expected {FORMAT}, found {found}; tune anew")
    profiles = [_profile(table) for table in root.tables("profile")]
    root.done()
    kernels = [profile.machine.kernels for profile in profiles]
    if not kernels or len({*kernels}) != len(kernels):
        raise FormatError(
            f"{path}: profile: expected one for each kind of kernels, found {kernels}; tune anew"
        )
    return profiles


def _profile(root: Table) -> Profile:
    model, machine = root.table("model"), root.table("machine")
    measured, costs = root.table("measured"), root.table("costs")
    profile = Profile(
        ModelIdentity(model.integer("size", 0, 2**63), model.text("fingerprint")),
        read_machine(machine),
        _settings(root.table("settings")),
        measured.text("on"),
        measured.text("versions"),
        measured.number("plain_tok_s"),
        measured.number("tok_s"),
        Costs(*(costs.numbers(f.name, MAX_DEPTH + 1) for f in fields(Costs))),
        tuple(_candidate(table) for table in root.tables("candidates")),
    )
    root.done(model, machine, measured, costs)
    return profile


def read_machine(table: Table) -> Machine:
    """The machine that something was measured on; FormatError names a field that is wrong."""
    return Machine(
        table.text("cpu"),
        table.integer("cores", 1, 2**20),
        table.choice("kernels", KERNELS),
        table.text("device"),
    )


def _settings(table: Table, *, last: bool = True) -> DraftSettings:
    depth = table.integer_or(AUTO, "depth", 0, MAX_DEPTH + 1)
    settings = DraftSettings(
        AUTO if depth == AUTO else int(depth),
        table.integer("fastmtp_size", -1, 2**31),
        table.choice("rollback", ROLLBACKS),
        table.integer("draft_threads", 0, 2**16),
    )
    if last:
        table.done()
    return settings


def _candidate(table: Table) -> Candidate:
    candidate = Candidate(_settings(table, last=False), table.number("tok_s"))
    table.done()
    return candidate


def _render(profiles: Sequence[Profile]) -> str:
    lines = [
        "# Made by `mtp-gguf tune`; applies to this model file on this machine only.",
        f"format = {FORMAT}",
    ]
    for profile in profiles:
        lines += _profile_lines(profile)
    return "\n".join(lines) + "\n"


def _profile_lines(profile: Profile) -> list[str]:
    measured = {
        "on": profile.on,
        "versions": profile.versions,
        "plain_tok_s": profile.plain_tok_s,
        "tok_s": profile.tok_s,
    }
    sections: list[tuple[str, dict[str, Any]]] = [
        ("[[profile]]", {}),
        ("[profile.model]", asdict(profile.model)),
        ("[profile.machine]", asdict(profile.machine)),
        ("[profile.settings]", asdict(profile.settings)),
        ("[profile.measured]", measured),
        ("[profile.costs]", {f.name: getattr(profile.costs, f.name) for f in fields(Costs)}),
    ]
    sections += [
        ("[[profile.candidates]]", {**asdict(tried.settings), "tok_s": tried.tok_s})
        for tried in profile.candidates
    ]
    lines = []
    for heading, values in sections:
        lines += ["", heading, *(f"{key} = {toml_value(value)}" for key, value in values.items())]
    return lines

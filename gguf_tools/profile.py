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
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from .errors import FormatError
from .model import shard_paths, whole_name
from .output import OutputFile
from .sources import FileSource
from .system import KERNELS, Machine, this_machine

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

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
        source = FileSource(path)
        try:
            size = source.size
            total += size
            digest.update(size.to_bytes(8, "little"))
            step = max(_SAMPLE_BYTES, size // _SAMPLES)
            for offset in range(0, size, step):
                digest.update(source.read(offset, min(_SAMPLE_BYTES, size - offset)))
        finally:
            source.close()
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
    text = _render(profiles).encode()
    with OutputFile(path, len(text)) as out:
        out.write(0, text)
        out.commit()


def read_profiles(path: Path) -> list[Profile]:
    """Read the profiles of a file, one for each kind of kernels.

    FormatError, naming the field, if anything is not as `tune` writes it.
    """
    source = FileSource(path)
    try:
        if source.size > LARGEST_PROFILE:
            raise FormatError(
                f"{path}: expected at most {LARGEST_PROFILE} bytes, found {source.size}"
            )
        raw = source.read(0, source.size)
    finally:
        source.close()
    try:
        root = _Table(path, "", tomllib.loads(raw.decode("utf-8")))
    except (ValueError, RecursionError) as error:  # TOML's and Unicode's errors too
        raise FormatError(
            f"{path}: expected TOML, found: {error}; delete it or tune anew"
        ) from None
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


def _profile(root: "_Table") -> Profile:
    model, machine = root.table("model"), root.table("machine")
    measured, costs = root.table("measured"), root.table("costs")
    profile = Profile(
        ModelIdentity(model.integer("size", 0, 2**63), model.text("fingerprint")),
        Machine(
            machine.text("cpu"),
            machine.integer("cores", 1, 2**20),
            machine.choice("kernels", KERNELS),
            machine.text("device"),
        ),
        _settings(root.table("settings")),
        measured.text("on"),
        measured.text("versions"),
        measured.number("plain_tok_s"),
        measured.number("tok_s"),
        Costs(costs.numbers("verify_ms"), costs.numbers("draft_ms")),
        tuple(_candidate(table) for table in root.tables("candidates")),
    )
    root.done(model, machine, measured, costs)
    return profile


def _settings(table: "_Table", *, last: bool = True) -> DraftSettings:
    settings = DraftSettings(
        table.depth("depth"),
        table.integer("fastmtp_size", -1, 2**31),
        table.choice("rollback", ROLLBACKS),
        table.integer("draft_threads", 0, 2**16),
    )
    if last:
        table.done()
    return settings


def _candidate(table: "_Table") -> Candidate:
    candidate = Candidate(_settings(table, last=False), table.number("tok_s"))
    table.done()
    return candidate


class _Table:
    """One table of the file: each field is read once, by type; `done` reports unknown fields."""

    def __init__(self, path: Path, name: str, values: dict[str, Any]) -> None:
        self._path = path
        self._name = name
        self._left = dict(values)

    def _take(self, key: str, expected: str) -> Any:
        if key not in self._left:
            raise FormatError(
                f"{self._path}: {self._name}{key}: expected {expected}, found nothing"
            )
        return self._left.pop(key)

    def _wrong(self, key: str, expected: str, found: object) -> FormatError:
        return FormatError(f"{self._path}: {self._name}{key}: expected {expected}, found {found!r}")

    def table(self, key: str) -> "_Table":
        value = self._take(key, "a table")
        if not isinstance(value, dict):
            raise self._wrong(key, "a table", value)
        return _Table(self._path, f"{self._name}{key}.", value)

    def tables(self, key: str) -> "list[_Table]":
        if key not in self._left:
            return []
        value = self._take(key, "tables")
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise self._wrong(key, "tables", value)
        return [
            _Table(self._path, f"{self._name}{key}[{i}].", item) for i, item in enumerate(value)
        ]

    def text(self, key: str) -> str:
        value = self._take(key, "text")
        if not isinstance(value, str) or not value or len(value) > 1000 or not value.isprintable():
            raise self._wrong(key, "printable text", value)
        return value

    def choice(self, key: str, choices: tuple[str, ...]) -> str:
        value = self.text(key)
        if value not in choices:
            raise self._wrong(key, f"one of {', '.join(choices)}", value)
        return value

    def integer(self, key: str, low: int, high: int) -> int:
        expected = f"a number from {low} to {high - 1}"
        value = self._take(key, expected)
        if type(value) is not int or not low <= value < high:
            raise self._wrong(key, expected, value)
        return value

    def depth(self, key: str) -> int | Literal["auto"]:
        expected = f'0 to {MAX_DEPTH} or "auto"'
        value = self._take(key, expected)
        if value == AUTO:
            return AUTO
        if type(value) is not int or not 0 <= value <= MAX_DEPTH:
            raise self._wrong(key, expected, value)
        return value

    def number(self, key: str) -> float:
        value = self._take(key, "a positive number")
        if type(value) not in (int, float) or not 0 < value < 1e12:
            raise self._wrong(key, "a positive number", value)
        return float(value)

    def numbers(self, key: str) -> tuple[float, ...]:
        expected = f"at most {MAX_DEPTH + 1} positive numbers"
        value = self._take(key, expected)
        if not isinstance(value, list) or len(value) > MAX_DEPTH + 1:
            raise self._wrong(key, expected, value)
        if not all(type(item) in (int, float) and 0 < item < 1e12 for item in value):
            raise self._wrong(key, expected, value)
        return tuple(map(float, value))

    def done(self, *others: "_Table") -> None:
        """FormatError for an unknown field, so that a typo is not silently ignored."""
        for table in (self, *others):
            for key in table._left:
                raise FormatError(f"{self._path}: {table._name}{key}: no such field; delete it")


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
        lines += ["", heading, *(f"{key} = {_value(value)}" for key, value in values.items())]
    return lines


def _value(value: object) -> str:
    """A value as TOML. All strings are printable text, for which JSON and TOML are the same."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f"{value:.6g}" if isinstance(value, float) else str(value)

"""Interleaved measurement of several settings, so that a slow minute affects all of them alike."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from mtp_gguf.native.checkpoint import Checkpoint
from mtp_gguf.native.session import Depth

from .generation import Generation, generate
from .model import BenchModel, Setting
from .result import ALL, TextResult
from .stats import rotated, summarize


@dataclass(frozen=True)
class Variant:
    """One of the settings that are compared. fastmtp_size: rows asked for, 0 for the file's own.

    name: the depth in results, where that is more than a depth.
    """

    setting: Setting
    depth: Depth
    fastmtp_size: int = 0
    name: str = ""


class InterleavedRuns:
    """Rounds in which every variant generates all texts, each round starting with another variant.

    Each run has a context of the kind that MTPLlama would create for the variant. An interrupted
    run leaves no result; completed runs are kept.
    """

    def __init__(
        self,
        model: BenchModel,
        prompts: Mapping[str, Sequence[Sequence[int]]],
        tokens: int,
        variants: Mapping[Hashable, Variant],
        prefix: Checkpoint | None = None,
    ) -> None:
        """Prepare rounds; `round` runs them.

        Args:
            prompts: token ids by kind of text.
            tokens: number of tokens of each answer.
            variants: by a key of the caller's choice.
            prefix: context that comes before every prompt.

        """
        self._model = model
        self._prompts = prompts
        self._tokens = tokens
        self._variants = dict(variants)
        self._prefix = prefix
        self._rows: dict[Hashable, int] = {}
        self.runs: dict[Hashable, list[dict[str, list[Generation]]]] = {k: [] for k in variants}
        self._rounds = 0

    def round(self, step: Callable[[Hashable], None] = lambda _: None) -> None:
        """Run every variant once. step: called with the key of each variant after its run."""
        for key in rotated(list(self._variants), self._rounds):
            variant = self._variants[key]
            run: dict[str, list[Generation]] = {}
            with self._model.session(variant.setting) as session:
                self._rows[key] = session.head.n_draft_vocab if session.head else 0
                for kind, prompts in self._prompts.items():
                    run[kind] = [
                        generate(
                            self._model, session, prompt, self._tokens, variant.depth, self._prefix
                        )
                        for prompt in prompts
                    ]
            self.runs[key].append(run)
            step(key)
        self._rounds += 1

    def tokens(self, key: Hashable) -> Counter[int]:
        """Number of occurrences of each token in the first run of a variant."""
        return Counter(
            token
            for run in self.runs[key][:1]
            for texts in run.values()
            for text in texts
            for token in text.tokens
        )

    def speeds(self, key: Hashable) -> list[float]:
        """Tokens per second of a variant over all texts, by round."""
        return [
            _RoundTotals([text for texts in run.values() for text in texts]).tok_s
            for run in self.runs[key]
        ]

    def results(self) -> list[TextResult]:
        """One result per kind and one over all kinds, for each variant that has run."""
        out = []
        context = self._prefix.length if self._prefix else 0
        for key, runs in self.runs.items():
            if not runs:
                continue
            variant = self._variants[key]
            depth = variant.name or variant.depth or 0
            by_kind = {kind: [run[kind] for run in runs] for kind in self._prompts}
            by_kind[ALL] = [[text for texts in run.values() for text in texts] for run in runs]
            out += [
                text_result(kind, context, variant.fastmtp_size, self._rows[key], depth, rounds)
                for kind, rounds in by_kind.items()
            ]
        return out


def text_result(
    kind: str,
    context: int,
    size: int,
    rows: int,
    depth: int | str,
    rounds: Sequence[Sequence[Generation]],
) -> TextResult:
    """The totals of some texts: speed as statistics over the rounds, times as their medians."""
    texts = [text for round_ in rounds for text in round_]
    deepest = max((len(text.stats.drafted) for text in texts), default=0)
    drafted = [sum(_at(text.stats.drafted, i) for text in texts) for i in range(deepest)]
    accepted = [sum(_at(text.stats.accepted, i) for text in texts) for i in range(deepest)]
    cycles = sum(text.stats.cycles for text in texts)
    generated = sum(text.stats.tokens for text in texts)
    totals = [_RoundTotals(round_) for round_ in rounds]
    return TextResult(
        kind,
        context,
        size,
        rows,
        depth,
        sum(len(text.tokens) for text in rounds[0]),
        summarize([t.tok_s for t in totals]),
        generated / max(1, cycles),
        tuple(a / d for a, d in zip(accepted, drafted, strict=True) if d),
        median(t.draft_ms for t in totals),
        median(t.verify_ms for t in totals),
        median(t.rollback_ms for t in totals),
        median(t.rest_ms for t in totals),
        median(t.limit_tok_s for t in totals),
        sum(text.stats.text_accepted for text in texts) / max(1, generated),
    )


class _RoundTotals:
    """The sums over the texts of one round. Milliseconds are per cycle."""

    def __init__(self, texts: Sequence[Generation]) -> None:
        cycles = max(1, sum(text.stats.cycles for text in texts))
        generated = sum(text.stats.tokens for text in texts)
        seconds = sum(text.seconds for text in texts)
        verify = sum(text.stats.verify_ms for text in texts)
        draft = sum(text.stats.draft_ms for text in texts)
        rollback = sum(text.stats.rollback_ms for text in texts)
        # The first token of a text comes with the prompt; the time is that of the others.
        self.tok_s = sum(len(text.tokens) - 1 for text in texts) / max(1e-9, seconds)
        self.draft_ms = draft / cycles
        self.verify_ms = verify / cycles
        self.rollback_ms = rollback / cycles
        self.rest_ms = max(0.0, seconds * 1e3 - verify - draft - rollback) / cycles
        self.limit_tok_s = generated * 1e3 / verify if verify else 0.0


def _at(values: Sequence[int], i: int) -> int:
    return values[i] if i < len(values) else 0

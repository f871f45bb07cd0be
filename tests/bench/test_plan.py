"""The plan that fits measurements into a budget, with invented tasks and an invented clock."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import typer

from mtp_gguf.bench.estimate import Estimate, probe
from mtp_gguf.bench.model import BenchModel, Setting
from mtp_gguf.bench.options import BenchOptions
from mtp_gguf.bench.plan import FULL, Amount, Task, make_plan
from mtp_gguf.bench.tasks import make_tasks
from mtp_gguf.cli.options import parse_budget
from mtp_gguf.native.session import Session
from mtp_gguf.server.find import LlamaServer


def task(key: str, seconds: float, *, needed: bool = False) -> Task:
    """Takes so many seconds for 64 tokens, one prompt and three rounds."""
    return Task(
        key, key, "", lambda a: seconds * a.prompts * a.tokens * a.rounds / (64 * 3), needed
    )


TASKS = [task("a", 10, needed=True), task("b", 20), task("c", 40), task("d", 5, needed=True)]


@pytest.mark.parametrize(
    ("budget", "amount", "kept"),
    [
        (None, FULL, "abcd"),
        (450, FULL, "abcd"),
        (449, Amount(2, 128, 3), "abcd"),
        (150, Amount(1, 128, 3), "abcd"),
        (113, Amount(1, 96, 3), "abcd"),
        (75, Amount(1, 64, 3), "abcd"),
        (74, Amount(1, 64, 3), "abd"),  # all with less text would be 50 s: parts go first
        (34, Amount(1, 64, 3), "ad"),
        (55, Amount(1, 64, 3), "acd"[0] + "b" + "d"),  # b comes before c
        (14, Amount(1, 48, 2), "ad"),
        (1, Amount(1, 24, 1), "ad"),  # what is needed is measured whatever it takes
    ],
)
def test_fits(budget: float | None, amount: Amount, kept: str) -> None:
    plan = make_plan(TASKS, budget)
    assert plan.amount == amount
    assert "".join(str(w.key) for w in plan.planned) == kept
    assert {str(w.key) for w in plan.skipped} == set("abcd") - set(kept)
    assert plan.whole == 450
    if budget is not None and budget != 1:
        assert plan.seconds <= budget


def test_what_is_asked_for_is_not_chosen() -> None:
    plan = make_plan(TASKS, 75, tokens=128, rounds=2)
    assert plan.amount == Amount(1, 128, 2)
    assert plan.whole == 600 * 128 / 128 * 2 / 3 / 4 * 3
    assert make_plan(TASKS, 1000, prompts=1).amount == Amount(1, 128, 3)


def test_a_plan_follows_the_time_left() -> None:
    plan = make_plan(TASKS, 75)
    assert plan.adjust({"a"}, 65).planned == plan.planned
    trimmed = plan.adjust({"a"}, 50)
    assert "".join(str(w.key) for w in trimmed.planned) == "abd"
    assert "".join(str(w.key) for w in trimmed.skipped) == "c"
    assert trimmed.adjust({"a"}, 65).planned == plan.planned, "time was won back"
    late = plan.adjust({"a", "b"}, -10)
    assert "".join(str(w.key) for w in late.planned) == "abd", (
        "what is done stays, and what is needed"
    )


def test_lines_name_what_belongs_together() -> None:
    tasks = [Task(i, "texts", f"depth {i}", lambda _: 2.0) for i in (0, 1)]
    plan = make_plan([*tasks, task("a", 10)], 5)
    assert plan.lines(plan.planned) == [("texts: depth 0, depth 1", 4.0)]
    assert plan.lines(plan.skipped) == [("a", 10.0)]


ESTIMATE = Estimate((20.0, 30.0, 40.0), (2.0, 4.0), prompt_ms=4.0, open_ms=100.0, acceptance=0.5)


def test_estimate() -> None:
    assert ESTIMATE.text_ms(0, 100) == 2000
    assert ESTIMATE.text_ms(1, 100) == pytest.approx(100 / 1.5 * 32)
    assert ESTIMATE.text_ms(2, 100) == pytest.approx(100 / 1.75 * 44)
    assert ESTIMATE.text_ms(6, 64) > ESTIMATE.text_ms(2, 64) * 0.8  # deeper than was measured


def test_a_cold_file_does_not_make_the_plan_long(
    dial: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What first touches the weights takes long, by a clock of its own, and is not counted."""
    now, cold = [0.0], {"decode", "open"}

    def slow_at_first(owner: type, name: str, what: str) -> None:
        real = getattr(owner, name)

        def method(self: Any, *args: Any, **named: Any) -> Any:
            now[0] += 1000.0 if what in cold else 0.25
            cold.discard(what)
            return real(self, *args, **named)

        monkeypatch.setattr(owner, name, method)

    slow_at_first(Session, "decode", "decode")
    slow_at_first(BenchModel, "_new_context", "open")
    with BenchModel(dial("tiny", hit=0.9), n_ctx=256, threads=1) as model:
        estimate = probe(model, Setting(4), model.tokenize("def f(x):")[:5], lambda: now[0])
        tokens = len(model.tokenize("def f(x):")[:5])
    assert not cold
    assert estimate.open_ms == 250.0
    assert estimate.prompt_ms == 250.0 / tokens
    assert (len(estimate.verify_ms), len(estimate.draft_ms)) == (5, 4)
    assert min(*estimate.verify_ms, *estimate.draft_ms) > 0
    assert 0.5 < estimate.acceptance < 1


def options(**changes: Any) -> BenchOptions:
    return BenchOptions(**{"kinds": ["code", "json"], "sizes": (1000, -1), **changes})


def test_tasks_are_ordered_by_importance() -> None:
    prompts = {"code": [[1] * 30] * 3, "json": [[1] * 50] * 3}
    tasks = make_tasks(options(contexts=(0, 4096)), ESTIMATE, prompts, 10**9)
    seconds = {w.key: w.seconds(Amount(1, 64, 3)) for w in tasks}
    # Three rounds of two prompts of 30 and 50 tokens at 4 ms, answers at 20 ms a token, a context.
    assert seconds["depth", 0] == pytest.approx(3 * (80 * 4 + 2 * 64 * 20 + 100) / 1e3)
    # Limits of the machine are measured after each round of costs; with a GPU there are none.
    on_gpu = {
        w.key: w.seconds(Amount(1, 64, 3))
        for w in make_tasks(options(gpu_layers=1), ESTIMATE, prompts, 10**9)
    }
    less = {key: seconds[key] - on_gpu[key] for key in on_gpu if seconds[key] != on_gpu[key]}
    assert less == pytest.approx({("costs",): 3 * 0.5, ("prefill",): 4 * 0.5})
    # A server is interleaved with our session and slower: more than twice the texts alone.
    wanted = options(servers=[LlamaServer(Path("s"), "v", True, *[False] * 8)])
    server = make_tasks(wanted, ESTIMATE, prompts, 10**9)
    taken = {w.key: w.seconds(Amount(1, 64, 3)) for w in server}["server", 0, 0]
    texts = 3 * (80 * 4 + 2 * 64 * 20) / 1e3
    assert 2 * texts < taken < 4 * texts + 5
    assert seconds["context", 4096] > 4096 * 4 / 1e3 + sum(
        s for k, s in seconds.items() if isinstance(k, tuple) and k[0] == "depth"
    )
    needed = {w.key for w in tasks if w.needed}
    assert {("depth", d) for d in (0, 1, 2, 3)} < needed
    assert ("context", 4096) in needed, "asked for by name"
    assert not {("depth", 4), ("depth", "auto"), ("size", 1000), ("prefill",)} & needed
    asked = make_tasks(options(depths_asked=True, sizes_asked=True), ESTIMATE, prompts, 10**9)
    assert {("depth", 6), ("size", -1)} < {w.key for w in asked if w.needed}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [(None, 300), ("90", 90), ("90s", 90), ("1.5m", 90), (" 5 M ", 300), ("2h", 7200)],
)
def test_budgets(text: str | None, seconds: float) -> None:
    assert parse_budget(text, full=False) == seconds


@pytest.mark.parametrize("text", ["", "0", "0m", "-1m", "1d", "m", "1e3", "169h", "٣m"])
def test_invalid_budgets_are_refused(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="expected a time such as"):
        parse_budget(text, full=False)


def test_everything_has_no_budget() -> None:
    assert parse_budget(None, full=True) is None
    with pytest.raises(typer.BadParameter, match="contradict"):
        parse_budget("5m", full=True)

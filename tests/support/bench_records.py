"""A benchmark result for the report: figures that are easy to find, and hostile text."""

from __future__ import annotations

from typing import Any

from mtp_gguf.bench.environment import Environment, MeasuredFile
from mtp_gguf.bench.plan import Amount
from mtp_gguf.bench.result import (
    Analysis,
    BenchResult,
    CycleCosts,
    PlannedPart,
    PrefillCosts,
    Sample,
    SampleToken,
    ServerResult,
    TextResult,
)
from mtp_gguf.bench.stats import Stats
from mtp_gguf.native.libraries.kernel_share import KernelShare

KINDS = ("code", "chat")
DEPTHS = (0, 1, 2, 3)
HOSTILE = "<script>alert(1)</script>&\"'"


def stats(value: float) -> Stats:
    return Stats(value, value * 0.97, value * 1.02, 5)


def text(kind: str, depth: int | str, tok_s: float, **changes: Any) -> TextResult:
    chain = depth if isinstance(depth, int) else 2
    fields: dict[str, Any] = {
        "kind": kind,
        "context": 0,
        "fastmtp_size": 0,
        "rows": 32768,
        "depth": depth,
        "tokens": 128,
        "tok_s": stats(tok_s),
        "tokens_per_cycle": 1 + 0.7 * chain,
        "acceptance": (0.81, 0.64, 0.47)[:chain],
        "draft_ms": 2.0 * chain,
        "verify_ms": 20.0 + 9 * chain,
        "rollback_ms": 0.1 if chain else 0.0,
        "rest_ms": 0.4,
        "limit_tok_s": tok_s * 1.2,
    }
    return TextResult(**{**fields, **changes})


def result() -> BenchResult:
    """A result with every part of the report, and hostile text wherever text can be."""
    speeds = dict(zip(DEPTHS, (48.0, 50.0, 61.0, 57.0), strict=True))
    shares = {"code": (0.91, 0.7, 0.5), "chat": (0.71, 0.6, 0.4), HOSTILE: (0.81, 0.64, 0.47)}
    texts = [
        text(kind, depth, tok_s, acceptance=shares.get(kind, (0.81, 0.64, 0.47))[:depth])
        for depth, tok_s in speeds.items()
        for kind in (*KINDS, HOSTILE, "all")
    ]
    texts += [text("all", "auto", 60.0)]
    texts += [text("all", depth, tok_s / 2, context=4096) for depth, tok_s in speeds.items()]
    tokens = (
        SampleToken("def", 0, None),
        SampleToken(" merge", 1, None),
        SampleToken("(left", 2, None),
        SampleToken("),\n", 3, None),
        SampleToken("right", 0, "wrong\n"),
        SampleToken("copied", -1, None),
        SampleToken(HOSTILE, 0, HOSTILE),
        SampleToken(HOSTILE, 1, None),
    )
    name = f"{HOSTILE}-with-a-name-that-is-longer-than-a-phone-is-wide-Q4_K_M.gguf"
    return BenchResult(
        state="done",
        environment=Environment(
            when="2026-11-21T12:00:00+00:00",
            cpu=HOSTILE,
            cores=2,
            device="CPU",
            threads=2,
            gpu_layers=0,
            kernels="stock",
            system="Linux x86_64",
            python="3.11",
            versions={"llama-cpp-python": "0.3.36"},
        ),
        model=MeasuredFile(
            name, 708048256, "fingerprint", KernelShare(None, HOSTILE, 0, {}), "ab" * 32
        ),
        amount=Amount(1, 64, 3),
        budget_s=300.0,
        whole_s=1400.0,
        seconds=290.0,
        plan=(
            PlannedPart(f"texts: depth 0, {HOSTILE}", 120.0, "done"),
            PlannedPart(f"llama-server: depth 3, {HOSTILE}", 40.0, "skipped"),
        ),
        cycles=tuple(
            CycleCosts(
                context,
                tuple(stats(20.0 + 9 * i) for i in range(9)),
                tuple(stats(2.0 * i) for i in range(1, 9)),
                stats(0.01),
            )
            for context in (16, 4096)
        ),
        prefill=PrefillCosts(512, stats(1800), stats(1810), stats(14)),
        texts=tuple(texts),
        sizes=(text("all", 2, 61.0), text("all", 2, 58.0, fastmtp_size=8192, rows=8192)),
        servers=(
            ServerResult("llama-server", HOSTILE, 2, stats(38.2), 0.7, stats(60.0), stats(1.57)),
            ServerResult(
                "llama-server (patched)", "v", 2, None, None, note=f"ended while loading: {HOSTILE}"
            ),
        ),
        coverage={1024: 0.81, 32768: 0.993},
        samples=(Sample(HOSTILE, 3, f"{HOSTILE}\n", tokens),),
        analysis=Analysis(
            best=2,
            best_drafting=2,
            plain_tok_s=48.0,
            tok_s=61.0,
            gain=1.27,
            limit_tok_s=73.2,
            share_reached=0.83,
            speedups={"verification": 1.31, "drafting": 1.12, "acceptance": 1.25},
            bottleneck="verification",
            sentence=f"the bottleneck is verification {HOSTILE}.",
        ),
    )

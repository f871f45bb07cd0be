"""A bench's JSON with numbers that are easy to find again in a page."""

from __future__ import annotations

from typing import Any

KINDS = ("code", "chat")
DEPTHS = (0, 1, 2, 3)
HOSTILE = "<script>alert(1)</script>&\"'"


def spread(value: float) -> dict[str, float]:
    return {"median": value, "low": value * 0.97, "high": value * 1.02, "n": 5}


def text(kind: str, depth: int | str, tok_s: float, **changes: Any) -> dict[str, Any]:
    chain = depth if isinstance(depth, int) else 2
    return {
        "kind": kind,
        "context": 0,
        "fastmtp_size": 0,
        "rows": 32768,
        "depth": depth,
        "tokens": 128,
        "tok_s": spread(tok_s),
        "tokens_per_cycle": 1 + 0.7 * chain,
        "acceptance": [0.81, 0.64, 0.47][:chain],
        "draft_ms": 2.0 * chain,
        "verify_ms": 20.0 + 9 * chain,
        "rollback_ms": 0.1 if chain else 0.0,
        "rest_ms": 0.4,
        "limit_tok_s": tok_s * 1.2,
        **changes,
    }


def record() -> dict[str, Any]:
    """A record with every part of the page, and hostile text wherever text can be."""
    speeds = dict(zip(DEPTHS, (48.0, 50.0, 61.0, 57.0), strict=True))
    texts = [text(k, d, s) for d, s in speeds.items() for k in (*KINDS, HOSTILE, "all")]
    texts += [text("all", "auto", 60.0)]
    texts += [text("all", d, s / 2, context=4096) for d, s in speeds.items()]
    tokens = [
        {"text": "def", "origin": 0, "rejected": None},
        {"text": " merge", "origin": 1, "rejected": None},
        {"text": "(left", "origin": 2, "rejected": None},
        {"text": "),\n", "origin": 3, "rejected": None},
        {"text": "right", "origin": 0, "rejected": "wrong\n"},
        {"text": HOSTILE, "origin": 0, "rejected": HOSTILE},
        {"text": HOSTILE, "origin": 1, "rejected": None},
    ]
    return {
        "format": 3,
        "state": "done",
        "budget_s": 300.0,
        "whole_s": 1400.0,
        "seconds": 290.0,
        "plan": [
            {"what": f"texts: depth 0, {HOSTILE}", "seconds": 120.0, "state": "done"},
            {"what": f"llama-server: depth 3, {HOSTILE}", "seconds": 40.0, "state": "left out"},
        ],
        "environment": {
            "when": "2026-11-21T12:00:00+00:00",
            "cpu": HOSTILE,
            "device": "CPU",
            "threads": 2,
            "kernels": "stock",
            "prompts": 1,
            "tokens": 64,
            "rounds": 3,
            "versions": {"llama-cpp-python": "0.3.36"},
        },
        "model": {
            "file": f"{HOSTILE}-with-a-name-that-is-longer-than-a-phone-is-wide-Q4_K_M.gguf",
            "size": 708048256,
            "sha256": "ab" * 32,
        },
        "cycles": [
            {
                "context": context,
                "verify": [spread(20.0 + 9 * i) for i in range(9)],
                "draft": [spread(2.0 * i) for i in range(1, 9)],
                "rollback": spread(0.01),
            }
            for context in (16, 4096)
        ],
        "prefill": {
            "tokens": 512,
            "plain": spread(1800),
            "trunk": spread(1810),
            "head": spread(14),
        },
        "texts": texts,
        "sizes": [
            text("all", 2, 61.0),
            text("all", 2, 58.0, fastmtp_size=8192, rows=8192),
        ],
        "servers": [
            {
                "name": "llama-server",
                "version": HOSTILE,
                "depth": 2,
                "tok_s": spread(38.2),
                "acceptance": 0.7,
                "ours": spread(60.0),
                "times": spread(1.57),
                "note": "",
            },
            {
                "name": "llama-server, ours",
                "version": "v",
                "depth": 2,
                "tok_s": None,
                "acceptance": None,
                "ours": None,
                "times": None,
                "note": f"ended while loading: {HOSTILE}",
            },
        ],
        "coverage": {"1024": 0.81, "32768": 0.993},
        "samples": [
            {"kind": HOSTILE, "depth": 3, "prompt": f"{HOSTILE}\n", "tokens": tokens},
        ],
        "verdict": {
            "best": 2,
            "best_drafting": 2,
            "plain_tok_s": 48.0,
            "tok_s": 61.0,
            "gain": 1.27,
            "limit_tok_s": 73.2,
            "share_reached": 0.83,
            "without": {"verification": 1.31, "drafting": 1.12, "acceptance": 1.25},
            "sentence": f"verification holds it back {HOSTILE}.",
        },
    }

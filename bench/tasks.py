"""Every measurement that a benchmark can make of a model, with its estimated duration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from mtp_gguf.gguf_tools.profile import AUTO

from .costs import PREFILL_TOKENS
from .estimate import Estimate
from .limits import LIMITS_SECONDS
from .options import COST_DEPTH, BenchOptions
from .plan import Amount, Task

COSTS, SAMPLE, PREFILL, DIGEST = ("costs",), ("sample",), ("prefill",), ("digest",)
SAMPLE_TOKENS = 160

_ESSENTIAL_DEPTHS = (0, 1, 2, 3)  # a benchmark without them says little
_ESSENTIAL_SERVER_DEPTHS = (2, 0)  # the most informative depths of llama-server
_SERVER_START = 4.0  # seconds to load and warm up a server
_SERVER_SLOWER = 1.3  # time of a stock server over that of our session, as measured
_LATER_TOKEN = 1.2  # cost of a token in a long prompt over one in a short prompt
_DIGEST_BYTES = 1e9  # per second


def make_tasks(
    options: BenchOptions,
    estimate: Estimate,
    prompts: Mapping[str, Sequence[Sequence[int]]],
    size: int,
) -> list[Task]:
    """All tasks, most important first. prompts: token ids by kind. size: bytes of the file."""
    o = options
    limits = 0.0 if o.gpu_layers else LIMITS_SECONDS

    def chosen(amount: Amount) -> list[Sequence[int]]:
        return [p for texts in prompts.values() for p in texts[: amount.prompts]]

    def generating(depth: int | str, amount: Amount) -> float:
        """Seconds of one round of all texts."""
        texts = chosen(amount)
        ms = sum(map(len, texts)) * estimate.prompt_ms
        return (ms + len(texts) * estimate.text_ms(_as_number(depth), amount.tokens)) / 1e3

    def texts(depth: int | str, amount: Amount) -> float:
        return amount.rounds * (generating(depth, amount) + estimate.open_ms / 1e3)

    def costs(amount: Amount, tokens: int = 16) -> float:
        opening = COST_DEPTH * (estimate.open_ms + tokens * estimate.prompt_ms)
        return amount.rounds * (4 * estimate.round_of_cycles_ms() + opening) / 1e3

    def first_costs(amount: Amount) -> float:
        return costs(amount) + amount.rounds * limits

    def prefill(amount: Amount) -> float:
        return (amount.rounds + 1) * (2 * PREFILL_TOKENS * estimate.prompt_ms / 1e3 + limits)

    def sample(amount: Amount) -> float:
        return generating(2, Amount(1, min(amount.tokens, SAMPLE_TOKENS), 1))

    def server(depth: int, amount: Amount) -> float:
        both = (_SERVER_SLOWER + 1) * generating(depth, amount)  # the server and our own session
        return _SERVER_START + estimate.open_ms / 1e3 + amount.rounds * both

    def context(tokens: int, amount: Amount) -> float:
        once = tokens * estimate.prompt_ms * _LATER_TOKEN / 1e3
        return once + costs(amount) + sum(texts(d, amount) for d in o.depths)

    def depth_task(depth: int | str) -> Task:
        label = depth if isinstance(depth, str) else f"depth {depth}"
        needed = o.depths_asked or depth in _ESSENTIAL_DEPTHS or not o.drafts
        return Task(("depth", depth), "texts", label, partial(texts, depth), needed)

    def server_tasks(depths: Sequence[int]) -> list[Task]:
        return [
            Task(
                ("server", i, depth),
                server_name(o, i),
                f"depth {depth}",
                partial(server, depth),
                needed=o.servers_asked,
            )
            for depth in depths
            for i, found in enumerate(o.servers)
            if depth in o.server_depths and (found.drafts or not depth)
        ]

    essential: list[int | str] = [d for d in o.depths if d in (*_ESSENTIAL_DEPTHS, AUTO)]
    named = [d for d in o.depths if isinstance(d, str) and d != AUTO]
    others: list[int | str] = [
        *named,
        *sorted(d for d in o.depths if isinstance(d, int) and d not in essential),
    ]
    other_server_depths = [d for d in o.server_depths if d not in _ESSENTIAL_SERVER_DEPTHS]
    return [
        Task(
            COSTS,
            "costs of a cycle",
            f"chains of 0 to {COST_DEPTH} drafts"
            if o.drafts
            else f"batches of 1 to {COST_DEPTH + 1} tokens",
            first_costs,
            needed=True,
        ),
        *map(depth_task, essential),
        Task(SAMPLE, "texts token by token", "", sample, needed=True),
        Task(
            PREFILL,
            f"a prompt of {PREFILL_TOKENS}",
            "with and without the head" if o.drafts else "",
            prefill,
        ),
        *(
            # Longer contexts are measured only if the user names them, hence never skipped.
            Task(("context", n), "longer contexts", f"{n} tokens", partial(context, n), needed=True)
            for n in o.contexts[1:]
        ),
        *map(depth_task, others[:1]),
        *server_tasks(_ESSENTIAL_SERVER_DEPTHS),
        *map(depth_task, others[1:]),
        *(
            Task(
                ("size", rows),
                "draft vocabularies",
                f"{rows:,} rows" if rows > 0 else "whole vocabulary",
                # The file's own size is interleaved with the others, hence the second term.
                lambda amount: texts(2, amount) * (1 + 1 / len(o.sizes)),
                needed=o.sizes_asked,
            )
            for rows in o.sizes
        ),
        *server_tasks(other_server_depths),
        Task(DIGEST, "sha256 of the file", "", lambda _: size / _DIGEST_BYTES, needed=True),
    ]


def server_name(options: BenchOptions, index: int) -> str:
    """The name of a server in results: `(patched)` if it knows FastMTP; numbered if not unique."""
    names = ["llama-server (patched)" if s.fastmtp else "llama-server" for s in options.servers]
    same = names[: index + 1].count(names[index])
    return names[index] if names.count(names[index]) == 1 else f"{names[index]} #{same}"


def _as_number(depth: int | str) -> int:
    """A fixed depth with about the same cost; "auto" lies in the middle."""
    return 2 if isinstance(depth, str) else depth

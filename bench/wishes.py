"""All that a bench could measure of a model, and about how long each part takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

from mtp_gguf.gguf_tools.profile import AUTO

from .costs import PREFILL_TOKENS
from .options import COST_DEPTH, BenchOptions
from .pace import Pace
from .plan import Amount, Wish

COSTS, SAMPLE, PREFILL, DIGEST = ("costs",), ("sample",), ("prefill",), ("digest",)
SAMPLE_TOKENS = 160

_FIRST = (0, 1, 2, 3)  # depths without which a bench says little
_FIRST_OF_SERVER = (2, 0)  # depths that tell most of a llama-server
_SERVER_START = 4.0  # seconds: loading, a warm-up of its own
_SERVER_SLOWER = 1.3  # than our own session, seen with a stock one
_LATER_TOKEN = 1.2  # price of a token in a long prompt over that of one in a short one
_DIGEST_BYTES = 1e9  # a second


def make_wishes(
    options: BenchOptions, pace: Pace, prompts: Mapping[str, Sequence[Sequence[int]]], size: int
) -> list[Wish]:
    """What matters most first. prompts: ids by kind. size: bytes of the file."""
    o = options

    def chosen(amount: Amount) -> list[Sequence[int]]:
        return [p for texts in prompts.values() for p in texts[: amount.prompts]]

    def writing(depth: int | str, amount: Amount) -> float:
        """Seconds of one round of all texts."""
        texts = chosen(amount)
        ms = sum(map(len, texts)) * pace.prompt_ms
        return (ms + len(texts) * pace.text_ms(_guess(depth), amount.tokens)) / 1e3

    def turns(depth: int | str, amount: Amount) -> float:
        return amount.rounds * (writing(depth, amount) + pace.open_ms / 1e3)

    def costs(amount: Amount, tokens: int = 16) -> float:
        opening = COST_DEPTH * (pace.open_ms + tokens * pace.prompt_ms)
        return amount.rounds * (4 * pace.round_of_cycles_ms() + opening) / 1e3

    def prefill(amount: Amount) -> float:
        return (amount.rounds + 1) * 2 * PREFILL_TOKENS * pace.prompt_ms / 1e3

    def sample(amount: Amount) -> float:
        shown = min(amount.tokens, SAMPLE_TOKENS)
        return writing(2, Amount(1, shown, 1))

    def server(depth: int, amount: Amount) -> float:
        both = (_SERVER_SLOWER + 1) * writing(depth, amount)  # in turn with our own session
        return _SERVER_START + pace.open_ms / 1e3 + amount.rounds * both

    def context(tokens: int, amount: Amount) -> float:
        once = tokens * pace.prompt_ms * _LATER_TOKEN / 1e3
        return once + costs(amount) + sum(turns(d, amount) for d in o.depths)

    def depth_wish(depth: int | str) -> Wish:
        said = depth if isinstance(depth, str) else f"depth {depth}"
        needed = o.depths_asked or depth in _FIRST
        return Wish(("depth", depth), "texts", said, partial(turns, depth), needed)

    def server_wishes(depths: Sequence[int]) -> list[Wish]:
        return [
            Wish(
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

    first = [d for d in o.depths if d in (*_FIRST, AUTO)]
    others = sorted(int(d) for d in o.depths if d not in first)
    rest = [d for d in o.server_depths if d not in _FIRST_OF_SERVER]
    wishes = [
        Wish(COSTS, "costs of a cycle", f"chains of 0 to {COST_DEPTH} drafts", costs, needed=True),
        *map(depth_wish, first),
        Wish(SAMPLE, "texts token by token", "", sample, needed=True),
        Wish(PREFILL, f"a prompt of {PREFILL_TOKENS}", "with and without the head", prefill),
        *(
            # Nobody gets these without asking.
            Wish(("context", n), "longer contexts", f"{n} tokens", partial(context, n), needed=True)
            for n in o.contexts[1:]
        ),
        *map(depth_wish, others[:1]),
        *server_wishes(_FIRST_OF_SERVER),
        *map(depth_wish, others[1:]),
        *(
            Wish(
                ("size", rows),
                "draft vocabularies",
                f"{rows:,} rows" if rows > 0 else "no list" if rows else "all of the list",
                # The file's own list takes part, so that all are measured in the same minutes.
                lambda amount: turns(2, amount) * (1 + 1 / len(o.sizes)),
                needed=o.sizes_asked,
            )
            for rows in o.sizes
        ),
        *server_wishes(rest),
    ]
    return [
        *wishes,
        Wish(DIGEST, "the file's sha256", "", lambda _: size / _DIGEST_BYTES, needed=True),
    ]


def server_name(options: BenchOptions, index: int) -> str:
    """How a server is called: ours has FastMTP; several of a kind are numbered."""
    names = ["llama-server, ours" if s.fastmtp else "llama-server" for s in options.servers]
    same = names[: index + 1].count(names[index])
    return names[index] if names.count(names[index]) == 1 else f"{names[index]} ({same})"


def _guess(depth: int | str) -> int:
    """A depth that costs about as much; "auto" is somewhere in the middle."""
    return 2 if isinstance(depth, str) else depth

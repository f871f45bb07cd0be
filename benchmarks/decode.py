"""Measure decoding speed by depth, and where each cycle's time goes.

    python benchmarks/decode.py MODEL.gguf [--depths 0,1,2,3] [--threads 2] [--server PATH]
        [--prompts KINDS]
    python benchmarks/decode.py --dial 4b --work FOLDER [...]

Depths are interleaved within one run, so that a slow minute affects all of them. The table shows
medians of the rounds and ratios to depth 0. The limit is the speed with free drafts: tokens per
cycle divided by the measured time of verification. With --server, llama-server's draft-mtp decodes
the same prompt of token ids at the same depths, interleaved with ours; the cost of its drafts is
its cycle minus our verification, which is the same work.

Meant for synthetic models (benchmarks/dial_model.py), whose acceptance rate is known, and which
continue a prompt of random tokens. For a real model, --prompts names kinds of the prompts of
`mtp-gguf bench`, such as code,chat: the first of each is answered, and speeds are those of all
answers together. --dial first builds such a model, with a Q4_K_M base, an F16 head and a FastMTP
vocabulary, and deletes the checkpoint that it is converted from. The 4B shape takes 10 GB of disk
and 15 GB of memory for a minute, afterwards 3 GB of disk, and 3 GB of memory for each depth and
side (with --one-at-a-time: for one).
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from dial_model import SHAPES, Hit, write_dial_model
from measuring import numbers, options, random_prompts

from mtp_gguf.bench.prompts import parse_sets, texts_of
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native import MTPLlama
from mtp_gguf.native.chat.generate import chat_writer
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.native.vocabulary import Vocabulary

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

PROMPT_TOKENS = 64


def converted(checkpoint: Path, file: Path, quant: str) -> Path:
    """Return `file`, converted from a checkpoint unless it exists."""
    if not file.exists():
        command = [sys.executable, "-m", "mtp_gguf", "convert", str(checkpoint), "-o", str(file)]
        command += ["--mtp-f16", "--fastmtp", "--quant", quant]
        environment = {**os.environ, "MTP_GGUF_ACCEPTANCE": "0"}  # takes longer than the rest
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    return file


def dial_files(shape: str, hit: Hit, work: Path, quants: Sequence[str]) -> list[Path]:
    """Return the GGUFs of the synthetic model of a shape; build those that `work` has not."""
    name = f"dial-{shape}-{'-'.join(map(str, hit)) if isinstance(hit, tuple) else hit}"
    ends = ["" if quant == "Q4_K_M" else f"-{quant}" for quant in quants]
    files = [work / f"{name}{end}.gguf" for end in ends]
    if all(file.exists() for file in files):
        return files
    checkpoint = work / name
    shutil.rmtree(checkpoint, ignore_errors=True)  # left by an interrupted run
    write_dial_model(checkpoint, shape, hit)
    try:
        return [converted(checkpoint, *pair) for pair in zip(files, quants, strict=True)]
    finally:
        shutil.rmtree(checkpoint)


def dial_file(shape: str, hit: Hit, work: Path) -> Path:
    """Return the Q4_K_M of the synthetic model of a shape; build it unless `work` has it."""
    return dial_files(shape, hit, work, ["Q4_K_M"])[0]


def kinds_of(text: str) -> list[str]:
    """Parse --prompts, for argparse."""
    try:
        return parse_sets(text)
    except RequestError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix("--prompts: ")) from None


def prompts_of(model: str | Path, kinds: Sequence[str]) -> list[list[int]]:
    """Return the first prompt of each of some kinds of `mtp-gguf bench`, as tokens of a model."""
    with open_model(Path(model)) as opened:
        template = opened.first.scalar("tokenizer.chat_template")
    write = chat_writer(template if isinstance(template, str) else None)
    with Vocabulary(str(model)) as vocabulary:
        return [vocabulary.encode(texts_of(kind, write)[0]).tolist() for kind in kinds]


def opened(model: str | Path, depth: Any, n_ctx: int, threads: int | None, **more: Any) -> MTPLlama:
    """Return a model that drafts at this depth, whatever its profile says."""
    return MTPLlama(
        str(model),
        depth=depth,
        n_ctx=n_ctx,
        n_threads=threads,
        n_threads_batch=threads,
        profile=False,
        **more,
    )


def generated(llm: MTPLlama, prompt: Sequence[int], n: int) -> tuple[list[int], float]:
    """Return the first token after a prompt and n more, and the seconds that those took."""
    llm.reset()
    stream = llm.generate(prompt, temp=0.0)
    tokens = [next(stream)]  # the prompt is read
    llm.session.reset_stats()
    began = time.perf_counter()
    tokens += itertools.islice(stream, n)
    seconds = time.perf_counter() - began
    stream.close()
    return tokens, seconds


def round_of(llm: MTPLlama, prompts: list[list[int]], n: int) -> dict[str, float]:
    """Return `one_round` of all prompts: tokens per second of all together, means of the others."""
    rounds = [one_round(llm, prompt, n) for prompt in prompts]
    found = {key: statistics.fmean(r[key] for r in rounds) for key in rounds[0]}
    for key in ("tok_s", "limit_tok_s"):
        found[key] = statistics.harmonic_mean(r[key] for r in rounds)
    return found


def one_round(llm: MTPLlama, prompt: list[int], n: int) -> dict[str, float]:
    """Return milliseconds per cycle and tokens per second of one generation, without its prompt."""
    tokens, seconds = generated(llm, prompt, n)
    did = llm.mtp_stats
    inside = did.draft_ms + did.verify_ms
    return {
        "tok_s": (len(tokens) - 1) / seconds,
        "tokens_per_cycle": did.tokens_per_cycle,
        "cycle_ms": seconds * 1e3 / did.cycles,
        "draft_ms": did.draft_ms / did.cycles,
        "verify_ms": did.verify_ms / did.cycles,
        "sample_ms": did.sample_ms / did.cycles,
        "rollback_ms": did.rollback_ms / did.cycles,
        "rest_share": 1 - inside / (seconds * 1e3),
        "limit_tok_s": did.tokens * 1e3 / did.verify_ms,
    }


def prefill_ms(llm: MTPLlama, tokens: list[int]) -> tuple[float, float]:
    """Return the milliseconds of trunk and head for a prompt."""
    llm.reset()
    llm.session.reset_stats()
    llm.eval(tokens)
    did = llm.mtp_stats
    return did.prefill_ms, did.prefill_head_ms


@contextmanager
def server(
    binary: str | Path, model: str | Path, depth: int, threads: int, *more: str
) -> Iterator[str]:
    """Run llama-server, with `more` options, on a free local port; yield its URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        str(binary),
        "-m",
        str(model),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "-np",
        "1",
    ]
    command += ["-t", str(threads), "-tb", str(threads), "-c", "1024", "--no-webui"]
    if depth:
        command += ["--spec-type", "draft-mtp", "--spec-draft-n-max", str(depth)]
    command += more  # the last occurrence of an option takes effect
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            if process.poll() is not None:
                raise RuntimeError(f"{binary} ended while loading")
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=1):
                    break
            except OSError:
                time.sleep(0.2)
        yield url
    finally:
        process.terminate()
        process.wait(30)


def request(
    url: str, prompt: Sequence[int] | str, n: int, **more: object
) -> urllib.request.Request:
    """Ask llama-server for a greedy completion of `n` tokens, unless `more` says otherwise.

    The repetition penalty that a file may set is turned off, since our session has none.
    """
    greedy = {"temperature": 0, "repeat_penalty": 1.0, "ignore_eos": True}
    body = {"prompt": prompt, "n_predict": n, **greedy, **more}
    kind = {"Content-Type": "application/json"}
    return urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), kind)


def complete(url: str, prompt: Sequence[int] | str, n: int, **more: object) -> dict[str, Any]:
    """What llama-server answers to `request`."""
    with urllib.request.urlopen(request(url, prompt, n, **more), timeout=3600) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def server_round(url: str, prompt: Sequence[int], n: int) -> float:
    """Return the tokens per second that llama-server reports for a completion."""
    timings: dict[str, float] = complete(url, prompt, n, cache_prompt=False)["timings"]
    return timings["predicted_per_second"]


def server_rounds(url: str, prompts: Sequence[Sequence[int]], n: int) -> float:
    """Return the tokens per second of all prompts together, one after the other."""
    return statistics.harmonic_mean([server_round(url, prompt, n) for prompt in prompts])


def together(url: str, prompts: Sequence[Sequence[int]], n: int) -> float:
    """Return the tokens per second of all clients, from first prompt to last token."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(prompts)) as pool:
        list(pool.map(lambda prompt: server_round(url, prompt, n), prompts))
    return len(prompts) * n / (time.perf_counter() - began)


def main() -> None:
    parser = options(
        __doc__,
        {"--threads": 2, "--gpu-layers": 0, "--tokens": 128, "--rounds": 5, "--fastmtp-size": 0},
    )
    parser.add_argument("model", nargs="?")
    parser.add_argument("--dial", choices=SHAPES, help="build a synthetic model of this shape")
    parser.add_argument("--hit", type=float, default=0.8, help="for --dial: acceptance rate")
    parser.add_argument("--work", type=Path, help="for --dial: folder for the file")
    parser.add_argument("--depths", type=numbers, default=[0, 1, 2, 3])
    parser.add_argument("--server", help="llama-server to compare with")
    parser.add_argument(
        "--prompts", type=kinds_of, help="kinds of the prompts of bench, for a real model"
    )
    parser.add_argument(
        "--one-at-a-time", action="store_true", help="keep one depth in memory at a time"
    )
    arguments = parser.parse_args()
    if arguments.dial:
        if arguments.model or not arguments.work:
            parser.error("--dial: expected --work FOLDER and no MODEL")
        arguments.model = str(dial_file(arguments.dial, arguments.hit, arguments.work))
    elif not arguments.model:
        parser.error("expected MODEL or --dial SHAPE --work FOLDER")
    depths = arguments.depths
    ours: dict[int, list[dict[str, float]]] = {}
    theirs: dict[int, list[float]] = {}
    prefill = (0.0, 0.0)
    for group in [[depth] for depth in depths] if arguments.one_at_a_time else [depths]:
        prefill = interleave(arguments, group, ours, theirs) or prefill
    results = {
        depth: {key: statistics.median(r[key] for r in rounds) for key in rounds[0]}
        for depth, rounds in ours.items()
    }
    server_speed = {depth: statistics.median(rounds) for depth, rounds in theirs.items()}
    report(arguments, results, server_speed, prefill)


def interleave(
    arguments: argparse.Namespace,
    depths: list[int],
    ours: dict[int, list[dict[str, float]]],
    theirs: dict[int, list[float]],
) -> tuple[float, float] | None:
    """Measure some depths; each round runs all of them on both sides, and the first warms up.

    If the largest of all depths is among these, returns the milliseconds of trunk and head for a
    prompt of 512 tokens at that depth.
    """
    n, threads = arguments.tokens, arguments.threads
    more = {"n_gpu_layers": arguments.gpu_layers, "fastmtp_size": arguments.fastmtp_size}
    with ExitStack() as stack:
        models: dict[int, MTPLlama] = {}
        urls: dict[int, str] = {}
        for depth in depths:
            llm = stack.enter_context(opened(arguments.model, depth, 1024, threads, **more))
            models[depth] = llm
            if arguments.server:
                urls[depth] = stack.enter_context(
                    server(arguments.server, arguments.model, depth, threads)
                )
        usable = min(20_000, llm.n_vocab() * 2 // 3)  # no padding, no control tokens
        prompts = random_prompts(1, PROMPT_TOKENS, usable)
        if arguments.prompts:
            prompts = prompts_of(arguments.model, arguments.prompts)
        for i in range(arguments.rounds + 1):
            for depth, llm in models.items():
                mine = round_of(llm, prompts, n)
                other = server_rounds(urls[depth], prompts, n) if urls else 0.0
                if i:
                    ours.setdefault(depth, []).append(mine)
                if i and urls:
                    theirs.setdefault(depth, []).append(other)
        deepest = max(arguments.depths)
        if deepest not in models:
            return None
        long_prompt = np.random.default_rng(2).integers(0, usable, 512).tolist()
        return prefill_ms(models[deepest], long_prompt)


def report(
    arguments: argparse.Namespace,
    results: dict[int, dict[str, float]],
    theirs: dict[int, float],
    prefill: tuple[float, float],
) -> None:
    """Print a line for each depth, the ratios, and one line of JSON."""
    trunk, head = prefill
    base = results.get(0, {}).get("tok_s")
    for depth, r in results.items():
        parts = f"draft {r['draft_ms']:.2f} + verify {r['verify_ms']:.2f} of {r['cycle_ms']:.2f} ms"
        ratio = f", {r['tok_s'] / base:.2f} x depth 0" if base else ""
        other = ""
        if depth in theirs:
            drafts = r["tokens_per_cycle"] * 1e3 / theirs[depth] - r["verify_ms"]
            other = f", llama-server {theirs[depth]:.1f} (drafts {drafts:.1f} ms)"
        print(
            f"depth {depth}: {r['tok_s']:.1f} tok/s{ratio}, {r['tokens_per_cycle']:.2f} tokens a "
            f"cycle, {parts}, rest {r['rest_share']:.1%} (sampling {r['sample_ms']:.2f} ms, "
            f"rollback {r['rollback_ms']:.2f} ms), limit {r['limit_tok_s']:.1f} tok/s, "
            f"reached {r['tok_s'] / r['limit_tok_s']:.0%}{other}"
        )
    drafting = {depth: r["tok_s"] for depth, r in results.items() if depth}
    best = max(drafting, key=lambda depth: drafting[depth], default=None)
    if best is not None:
        if base:
            print(f"best depth {best}: {drafting[best] / base:.2f} x no drafting")
        if rivals := {depth: speed for depth, speed in theirs.items() if depth}:
            other = max(rivals, key=lambda depth: rivals[depth])
            ratio = drafting[best] / rivals[other]
            print(f"best depth {best}: {ratio:.2f} x llama-server's best, at depth {other}")
    print(f"prompt of 512: trunk {trunk:.0f} ms, head {head:.1f} ms ({head / trunk:.1%})")
    record: dict[str, Any] = {
        "model": os.path.basename(arguments.model),
        "machine": platform.machine(),
        "threads": arguments.threads,
        "llama_cpp_python": llama_cpp.__version__,
        "results": results,
        "llama_server": theirs,
        "prefill_ms": {"trunk": trunk, "head": head},
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()

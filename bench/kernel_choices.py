"""Have the kernels measured that multiply the weights of a model, by decoding batches with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from time import perf_counter

from mtp_gguf.native.libraries.plugged_kernels import KernelChoice
from mtp_gguf.native.runtime import plugged_kernels

from .model import N_BATCH, BenchModel, Setting

# Tokens of a batch, one of each class of columns (native/kernels/src/lanes/lanes.h).
BATCHES = (1, 3, 4, 6, 8, 15, 31, 63, 128)
_MOST_SECONDS = 60.0
_QUIET_SECONDS = 5.0  # without a decision: what is left is too small to be measured


def measure_choices(
    path: Path, threads: int, report: Callable[[str], None] = lambda _: None
) -> list[KernelChoice]:
    """Decode batches of all sizes until each kind of product has its kernel.

    report: is told how many have. Returns what was measured with this number of threads, in order;
    `kernel` is None for products that are too small to tell candidates apart. While other programs
    need the CPUs, fewer threads compute some batches: sizes that were not seen with all of them
    are waited for, too. ModelRefusedError if llama.cpp cannot load the file.
    """
    with (
        BenchModel(path, n_ctx=N_BATCH, threads=threads) as model,
        model.session(Setting(0)) as session,
    ):
        began = decided = perf_counter()
        open_before = None
        while True:
            for count in BATCHES:
                if session.length() + count > N_BATCH:
                    session.remove(0)
                session.decode([(7 * i) % model.n_vocab for i in range(count)], all_logits=True)
            found = [c for c in plugged_kernels.choices() if c.threads == threads]
            undecided = sum(choice.kernel is None for choice in found)
            unseen = len(BATCHES) - len({choice.columns for choice in found})
            now = perf_counter()
            if (undecided, unseen) != open_before:
                open_before, decided = (undecided, unseen), now
                report(f"measuring kernels: {len(found) - undecided} of {len(found)} chosen")
            if (
                now - decided > (_QUIET_SECONDS if undecided or unseen else 1.0)
                or now - began > _MOST_SECONDS
            ):
                return sorted(found, key=lambda choice: astuple(choice)[:5])

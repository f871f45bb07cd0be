"""MTPLlama on a GPU: the CPU's text and acceptance, experts on the CPU, memory, devices that fail.

    pytest -m gpu

The draft graph, rollback, sequences and checkpoints on a GPU are in test_head.py, test_session.py
and test_checkpoint.py, whose tests of the CPU run there, too.
"""

from __future__ import annotations

import ctypes
import re
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from mtp_gguf.gguf_tools.doctor import diagnose
from mtp_gguf.gguf_tools.model import open_model
from mtp_gguf.native import Head, NativeError
from mtp_gguf.native._bindings import check, library
from mtp_gguf.native.head import SequenceTask
from mtp_gguf.native.libraries.offload import check_split, gpu_names, last_gpu
from mtp_gguf.native.session import Session
from support import near_ties, places
from support.generation import load, take
from support.models import Dial, Models
from support.native_trunk import Trunk, decode_rows, opened_session
from support.near_ties import Text, Work
from support.slots import opened_slots
from support.vulkan.layer import only_vulkan, run_with_faults

pytestmark = pytest.mark.gpu

WORK = Work((9, 40), 32, 256)
DIALS = {"dial-3v": "tiny-3v", "dial-moe": "tiny-moe"}  # their head is often right
DEPTHS: tuple[int | Literal["auto"], ...] = (0, 1, 2, 3, 4, "auto")
PROMPT = near_ties.prompt_of(20, 2)

# Half of a text's rows may move by so much, in standard deviations of a row's logits: a GPU's
# products add up in another order, in F16 in part. Seen on llvmpipe, the farthest row of a text:
# 0.03 (demo), 0.06 (random, dense) and 0.45 (random experts, where a router's near tie selects
# another one); a text parted where the first choice led by 0.02.
ROUNDING = 0.05


def file_of(name: str, models: Models, dial: Dial) -> Path:
    """F16 weights, which do not amplify rounding as random weights of a few bits do."""
    return dial(DIALS[name], quant="F16") if name in DIALS else models.gguf(name, "F16", "F16")


def write(path: Path, depth: int | Literal["auto"], **options: Any) -> tuple[list[Text], Any]:
    return near_ties.generate(path, WORK, depth=depth, logits=True, **options)


@pytest.mark.parametrize("name", ["demo", "dense-tied", "dense-3v", "moe-mixed", *DIALS])
def test_text_and_acceptance_are_the_cpus(models: Models, dial: Dial, name: str) -> None:
    path = file_of(name, models, dial)
    wanted, _ = write(path, 0)
    for depth in DEPTHS:
        texts, accepted = write(path, depth, n_gpu_layers=places.ALL)
        farthest, leads = near_ties.compare(wanted, texts, ROUNDING)
        print(f"{name}, depth {depth}: logits move up to {farthest:.4f}, texts part at {leads}")
        if depth == "auto" or leads:
            continue
        _, on_cpu = write(path, depth)
        print(f"  accepted {accepted}, on the CPU {on_cpu}")
        if name in DIALS:
            assert accepted == on_cpu
            assert depth == 0 or accepted[0] > 0
        else:  # a draft at a near tie may be another one
            assert np.allclose(accepted, on_cpu, atol=0.05)


@pytest.mark.parametrize("rollback", ["snapshot", "checkpoint", "two-phase", "host"])
def test_rollback_modes(models: Models, rollback: str) -> None:
    """On random weights, whose drafts are almost never right."""
    path = file_of("dense-3v", models, Dial(models))
    wanted, _ = write(path, 0)
    texts, _ = write(path, 3, n_gpu_layers=places.ALL, rollback=rollback)
    near_ties.compare(wanted, texts, ROUNDING)


def hidden_of(session: Session, tokens: list[int]) -> np.ndarray:
    session.want_hidden()
    session.decode(tokens, all_logits=True)
    return session.hidden(len(tokens))


def test_outputs_that_stay_on_the_device(dial: Dial) -> None:
    """Tokens chosen there, and logits and hidden states read later, are those of a plain decode."""
    path, tokens = dial("tiny"), list(PROMPT)
    with opened_session(path, "snapshot", 3) as (session, _):
        hidden = hidden_of(session, tokens)
    with places.use(places.place("gpu")):
        with closing(Trunk(path, 3)) as plain:
            rows = [(0, i, token) for i, token in enumerate(tokens)]
            assert decode_rows(plain.context, rows) == 0
            wanted = [plain.logits(row) for row in range(len(tokens))]
        with opened_session(path, "snapshot", 3) as (session, trunk):
            found = hidden_of(session, tokens)
            chosen = [session.argmax(row) for row in range(len(tokens))]
            assert chosen == [int(np.argmax(logits)) for logits in wanted]
            for row, logits in enumerate(wanted):
                assert np.array_equal(trunk.logits(row), logits)
            assert np.allclose(found, hidden, atol=ROUNDING * hidden.std())
            assert [session.argmax(row) for row in range(len(tokens))] == chosen
            with pytest.raises(NativeError, match=f"row {len(tokens)} of the last decode"):
                session.argmax(len(tokens))


def test_hidden_states_that_wait_on_the_device(models: Models) -> None:
    """Drafts are those from the same hidden states on the host, for every mixture of the two."""
    path, gpu = models.gguf("dense-3v", "F16", "F16"), places.require_gpu()
    counts, ends = [4, 2, 7], [4, 9, 6]
    draw = np.random.default_rng(8)
    with (
        places.use(places.place("gpu")),
        opened_slots(path, 3, [[5, 6, 7, 8]] * 3) as slots,
        Head(path, device=gpu, n_seq_max=3) as host,
    ):
        ids = [draw.integers(900, size=7).tolist() for _ in counts]
        slots.decode([(seq, 4, tokens) for seq, tokens in enumerate(ids)])
        assert slots.keep(7, counts) == [True] * 3
        slots.choose(0)  # waits for both
        hidden = [slots.hidden(21)[7 * seq :][:n] for seq, n in enumerate(counts)]
        for seq, rows in enumerate(hidden):
            found = np.empty_like(rows)
            pointer = found.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            handle = slots.head.handle
            check(library().mtp_head_get_hidden(handle, seq, len(rows), pointer, rows.size))
            assert np.array_equal(found, rows)
        for on_device in ([0, 1, 2], [2], [1, 2], [0, 1]):  # others replace what was kept
            for head in (host, slots.head):
                for seq in range(3):
                    head.rollback(0, seq)
            tasks = [
                SequenceTask(ids[seq][:n], hidden[seq], ends[seq], 3, seq)
                for seq, n in enumerate(counts)
            ]
            kept = [replace(t, hidden=None) if t.seq in on_device else t for t in tasks]
            for wanted, drafted in zip(
                host.draft_batch(tasks), slots.head.draft_batch(kept), strict=True
            ):
                assert drafted.tokens == wanted.tokens
                assert drafted.probabilities == pytest.approx(wanted.probabilities, rel=1e-3)


@pytest.mark.parametrize("unified", [False, True])
@pytest.mark.parametrize(
    "order",
    [
        [(0, 6), (1, 5), (0, 3), (1, 1), (1, 4)],
        [(0, 40), (1, 5), (0, 0), (0, 9), (1, 2), (0, 2)],
    ],
)
def test_what_several_sequences_see(
    models: Models, order: list[tuple[int, int]], unified: bool
) -> None:
    """Masks that the device computes, and those that are uploaded because cells are interleaved.

    order: sequences and how many tokens are decoded at once, or 0 to remove the sequence.
    Logits differ by rounding alone; a cell too many or too few moves them by a whole deviation.
    """
    path = models.gguf("dense-3v", "F16", "F16")
    walks: list[list[np.ndarray]] = []
    for place in ("cpu", "gpu"):
        draw = np.random.default_rng(6)
        with (
            places.use(places.place(place)),
            opened_session(path, "checkpoint", 0, 512, 2, unified) as (session, trunk),
        ):
            walks.append([])
            for seq, n in order:
                if n == 0:
                    session.remove(0, seq=seq)
                    continue
                session.decode(draw.integers(900, size=n).tolist(), seq=seq, all_logits=True)
                walks[-1].append(np.stack([trunk.logits(row) for row in range(n)]))
    for on_cpu, on_gpu in zip(*walks, strict=True):
        moved = np.abs(on_gpu - on_cpu).max(axis=1) / on_cpu.std(axis=1)
        assert moved.max() < 0.2, moved


@pytest.mark.parametrize("name", ["dial-3v", "dial-moe"])
def test_slots_write_the_cpus_texts(models: Models, dial: Dial, name: str) -> None:
    """Sequences in one batch, whose hidden states stay on the device."""
    prompts = [PROMPT[:n] for n in (4, 7, 5)]
    found = []
    for place in ("cpu", "gpu"):
        with (
            places.use(places.place(place)),
            opened_slots(file_of(name, models, dial), 3, prompts) as slots,
        ):
            for _ in range(6):
                slots.step()
            assert slots.kept == (0 if place == "cpu" else 6 * len(prompts))
            found.append((slots.texts, slots.accepted))
    assert found[0] == found[1]
    assert found[0][1] > 0


def test_rejection_sampling_draws_the_cpus_tokens(models: Models, dial: Dial) -> None:
    """From the largest logits alone, and from those tokens' weights in a rejected draft."""
    texts: list[list[list[int]]] = []
    for place in ("cpu", "gpu"):
        with (
            places.use(places.place(place)),
            opened_session(file_of("dial-3v", models, dial), "snapshot", 3) as (session, _),
        ):
            texts.append([])
            for seed in range(24):
                session.remove(0)
                session.set_sampling(3.0, top_k=6, seed=seed)
                session.decode(PROMPT)
                text = [PROMPT[-1]]
                while len(text) < 4:
                    text += session.step_sampled(text[-1])
                texts[-1].append(text[:4])
            assert 0 < session.stats().acceptance[0] < 1
    same = sum(a == b for a, b in zip(*texts, strict=True))
    assert same >= 20, (same, texts)  # rounding may select another token


def test_a_rejected_draft_is_replaced_by_the_cpus_token(dial: Dial) -> None:
    """It depends on the shares that the draft was drawn from, which the device sums up.

    Of a head that often agrees with the trunk, so that these shares are large.
    """
    path = dial("tiny", quant="F16", gain=0.15)
    replaced: list[dict[int, int]] = []
    for place in ("cpu", "gpu"):
        with (
            places.use(places.place(place)),
            opened_session(path, "snapshot", 1) as (session, _),
        ):
            replaced.append({})
            for seed in range(60):
                session.remove(0)
                session.decode([3, 1, 4, 1, 5])
                session.set_sampling(1.0, top_k=6, seed=seed)
                tokens = session.step_sampled(session.sample())
                if len(tokens) == 1:
                    replaced[-1][seed] = tokens[0]
    on_cpu, on_gpu = replaced
    both = on_cpu.keys() & on_gpu.keys()
    same = sum(on_cpu[seed] == on_gpu[seed] for seed in both)
    assert len(both) >= 15
    assert len(on_cpu.keys() ^ on_gpu.keys()) <= 3  # rounding may select another token
    assert same >= 0.9 * len(both), (same, len(both))


def test_the_time_of_a_verification_includes_the_wait(dial: Dial) -> None:
    """Without a head, too, which nothing else makes wait before the logits are read."""
    with (
        places.use(places.place("gpu")),
        closing(Trunk(dial("tiny"), 3)) as trunk,
        Session(trunk.context, None, max_depth=0, max_lookup=3) as session,
    ):
        session.decode(PROMPT)
        for cycle in range(12):
            if cycle == 4:
                session.reset_stats()
            session.step(3)
        assert session.stats().sample_ms < 0.5 * session.stats().verify_ms


# ------------------------------------------------------------------------ experts on the CPU


def buffers(log: str) -> dict[str, float]:
    """MiB of weights by the kind of buffer, as llama.cpp reports them."""
    found = re.findall(r"load_tensors: +(\w+) model buffer size = +([\d.]+) MiB", log)
    return {name: float(size) for name, size in found}


@pytest.mark.parametrize(
    "options",
    [{"n_cpu_moe": 99}, {"n_cpu_moe": 1}, {"tensor_overrides": {r"ffn_.*_exps": "CPU"}}],
    ids=["all", "first", "pattern"],
)
def test_experts_on_the_cpu(
    dial: Dial, capfd: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    """The text is the same, and the GPU holds less; the head stays there."""
    path, cycle = dial("tiny-moe"), dial.successors("tiny-moe")
    sizes = []
    for given in ({}, options):
        with load(path, depth=3, n_gpu_layers=-1, verbose=True, **given) as llm:
            tokens = take(llm, 24, PROMPT)
            assert [cycle[t] for t in tokens[:-1]] == tokens[1:]
            assert llm.mtp_stats.acceptance[0] > 0
            assert llm.head is not None
            assert llm.head.mapped_bytes == 0
        sizes.append(buffers(capfd.readouterr().err))
    everything, without = (size[places.require_gpu()] for size in sizes)
    assert without < (0.9 if options.get("n_cpu_moe") == 1 else 0.7) * everything


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 10_000])
@pytest.mark.parametrize("head", ["CPU", "GPU"])
def test_layers_on_both_sides(dial: Dial, layers: int, head: str) -> None:
    """Also with more layers than the model has, which are all."""
    device = places.require_gpu() if head == "GPU" else head
    path, cycle = dial("tiny-3v"), dial.successors("tiny-3v")
    with load(path, depth=3, n_gpu_layers=layers, mtp_device=device) as llm:
        tokens = take(llm, 16, PROMPT)
        assert [cycle[t] for t in tokens[:-1]] == tokens[1:]
        assert llm.mtp_stats.acceptance[0] > 0


# ---------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("layout", [None, "ids", "table"])
@pytest.mark.parametrize("spec", ["dense-tied", "dense-untied", "moe-mixed"])
def test_doctor_says_before_loading_what_the_head_takes(
    models: Models, spec: str, layout: str | None
) -> None:
    path = models.gguf(spec, "Q8_0", "F16", layout)
    with open_model(path) as opened:
        memory = diagnose(opened, None, 512, 3).memory
    assert memory is not None
    with Head(path, device=places.require_gpu(), n_ctx=512) as head:
        assert head.mapped_bytes == 0
        said = memory.head + memory.draft_rows + memory.whole_rows
        assert said <= head.weight_bytes < 1.02 * said + (64 << 10)  # each tensor is padded
        assert head.cache_bytes == memory.cache


@pytest.mark.parametrize(("name", "tied"), [("demo", True), ("dial-3v", False)])
def test_the_vocabulary_is_on_the_device_once(
    models: Models, dial: Dial, name: str, tied: bool
) -> None:
    """A head that drafts over all tokens reads the trunk's output, and embeddings that are there.

    Tied embeddings are; others are copied for the head, unless an option puts them there.
    """
    path, gpu = file_of(name, models, dial), places.require_gpu()
    with open_model(path) as opened:
        memory = diagnose(opened, None, 512, 3).memory
    assert memory is not None
    assert (memory.embedding_rows == 0) == tied
    wanted, accepted = write(path, 3)
    for overrides in (None, {"^token_embd": gpu}):
        options: dict[str, Any] = {"n_gpu_layers": places.ALL, "tensor_overrides": overrides}
        copied = memory.head + (0 if overrides else memory.embedding_rows)
        with load(path, n_ctx=512, **options) as llm:
            assert llm.head is not None
            assert copied <= llm.head.weight_bytes < 1.02 * copied + (64 << 10)
        texts, found = write(path, 3, **options)
        near_ties.compare(wanted, texts, ROUNDING)
        assert np.allclose(found, accepted, atol=0.05)


@only_vulkan
@pytest.mark.parametrize("share", [0.1, 0.9])
def test_too_little_memory(dial: Dial, share: float) -> None:
    """For the trunk, or for what comes after it."""
    path = dial("tiny")
    said = run_with_faults(path, "load", bytes=int(share * path.stat().st_size))
    assert "error: " in said
    assert re.search(r"does not fit|do not fit|failed to allocate|Failed to", said)


# ------------------------------------------------------------------------- devices that fail


@only_vulkan
@pytest.mark.parametrize("when", ["submit", "wait"])
def test_a_lost_device_is_reported_and_the_model_can_be_closed(dial: Dial, when: str) -> None:
    """With work that is still to be waited for, freeing the context would end the process."""
    said = run_with_faults(dial("tiny"), when)
    assert said.count("error: a device of ggml failed: ") == 2
    assert "DeviceLost; close the model and load it again" in said
    assert said.endswith("closed\n")


@only_vulkan
def test_copies_on_the_device_wait_for_what_they_copy(dial: Dial) -> None:
    """Hidden states are copied there before the host waits for them."""
    said = run_with_faults(dial("tiny"), "text", order=1)
    found = re.search(r"closed\n(\d+) of (\d+) copies too early\n$", said)
    assert found, said
    assert int(found[1]) == 0
    assert int(found[2]) > 20


@only_vulkan
def test_a_device_without_an_operation(models: Models) -> None:
    """As of a GPU whose shaders cannot read a tensor of that size."""
    path = models.gguf("moe-mixed", "Q8_0", "F16")
    said = run_with_faults(path, "head", range=400_000)
    assert re.search(r"error: \w+ cannot run the draft graph: it has no MUL_MAT_ID for f16; ", said)


def test_the_head_is_with_the_last_layer() -> None:
    """With several GPUs, which GGML_VK_VISIBLE_DEVICES=0,0 makes of one."""
    gpus = gpu_names()
    if len(gpus) < 2:
        pytest.skip("takes two GPUs")
    for options, device in (
        ({}, gpus[-1]),
        ({"tensor_split": [3.0, 1.0]}, gpus[1]),
        ({"tensor_split": [1, 0]}, gpus[0]),
        ({"split_mode": 0}, gpus[0]),
        ({"split_mode": 0, "main_gpu": 1}, gpus[1]),
        ({"split_mode": 0, "main_gpu": 1, "n_gpu_layers": 0}, "CPU"),
    ):
        given = {"n_gpu_layers": -1, **options}
        check_split(given)
        assert last_gpu(given) == device


def test_devices_are_checked_before_anything_is_loaded(dial: Dial) -> None:
    gpu = places.require_gpu()
    options: dict[str, Any]
    for options, text in (
        ({"mtp_device": "CUDA9"}, f"mtp_device: expected one of {gpu}.*, CPU, found 'CUDA9'"),
        ({"tensor_overrides": {"x": "y"}}, r"tensor_overrides\['x'\]: expected one of .*'y'"),
        ({"main_gpu": 9, "split_mode": 0}, r"main_gpu: expected 0 to \d \(.*\), found 9"),
        ({"tensor_split": [1] * 9}, r"tensor_split: expected \d shares or fewer, of .* 9"),
    ):
        with pytest.raises(NativeError, match=text):
            load(dial("tiny"), n_gpu_layers=-1, **options)

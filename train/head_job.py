"""The steps of training a head: collect, train, write, measure."""

import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.numpy import save

from mtp_gguf.bench.costs import cycle_costs
from mtp_gguf.bench.model import BenchModel, Setting
from mtp_gguf.convert.heads.converted_head import converted_head
from mtp_gguf.convert.heads.draft_vocabulary import DraftVocabulary, rank_by_counts
from mtp_gguf.convert.heads.head_checkpoint import checkpoint_head
from mtp_gguf.convert.options import DEFAULT_SIZE, DraftOptions
from mtp_gguf.convert.plans.precision import parse_tensor_type
from mtp_gguf.gguf_tools.errors import MtpGgufError, OutputError, RequestError, raising
from mtp_gguf.gguf_tools.files.format import Value
from mtp_gguf.gguf_tools.files.new_file import write_file
from mtp_gguf.gguf_tools.files.output import write_whole
from mtp_gguf.gguf_tools.files.rewrite import OutputSpec, TensorCopy, inserted, write
from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME, TensorType
from mtp_gguf.gguf_tools.heads.acceptance import Counts, reserved
from mtp_gguf.gguf_tools.heads.carrier import CARRIER, carry
from mtp_gguf.gguf_tools.heads.draft_list import (
    BEFORE_TOKENIZER,
    DraftList,
    list_faults,
    read_draft_list,
    required_ids,
)
from mtp_gguf.gguf_tools.heads.fastmtp import default_size
from mtp_gguf.gguf_tools.heads.nextn import CARRIED
from mtp_gguf.gguf_tools.heads.transplant import head_alone, with_head
from mtp_gguf.gguf_tools.hub.resolve import names_gguf, open_any_model
from mtp_gguf.gguf_tools.machine import os_files, process_memory, processors
from mtp_gguf.gguf_tools.machine.interrupted import Interrupted, leaves_nothing
from mtp_gguf.gguf_tools.machine.shell import quoted
from mtp_gguf.gguf_tools.machine.text import duration, human_bytes
from mtp_gguf.gguf_tools.model import Model, open_model
from mtp_gguf.gguf_tools.profile import identify
from mtp_gguf.gguf_tools.progress import Progress

from .block import Weights, fresh_weights, own_tables, read_weights
from .chain import read_divisors
from .chart import draw_training
from .collect import CollectSettings, Texts, bytes_needed, collect
from .config import BlockConfig
from .dataset import INDEX_NAME, LOCK_NAME, Sample, make_folder, open_data, remove_data, split_data
from .measure import measure_file
from .trainer import (
    CHECKPOINT_NAME,
    Evaluation,
    Outcome,
    State,
    Trainer,
    TrainSettings,
    check_device,
    default_device,
    memory_needed,
    precision_of,
    read_tables,
)
from .write_back import check_type, head_tensors, train_keys

_TRAINED_ROWS = 32768  # most tokens of the vocabulary to learn without a draft vocabulary
_MEASURED_ROWS = 1500  # positions from which the written file drafts
_COLLECTING = 0.4  # the largest share of --minutes for collecting
# PyTorch and what it keeps for products of many sizes (more than 1 GB in a long run), llama.cpp's
# context and buffers, Python.
_OVERHEAD = 2 << 30

_Draft: TypeAlias = DraftVocabulary | DraftList  # counted here, or the model's own


@dataclass(frozen=True)
class Start:
    """The head to start from: the model's own, another one's, or random weights."""

    head_from: str | None
    from_scratch: bool


_OWN_HEAD = Start(None, from_scratch=False)


@dataclass(frozen=True)
class Job:
    """What to do, as the options say; `fastmtp` may be DEFAULT_SIZE."""

    model: Path
    texts: Texts
    files: int
    target: Path
    start: Start
    head_type: str | None
    head_only: bool
    fastmtp: int | None
    minutes: float | None
    tokens: int
    length: int
    chat: bool
    steps: int
    epochs: float
    rate: float | None
    rank: int
    seed: int
    device: str | None
    threads: int | None
    gpu_layers: int
    work: Path | None
    measured: bool
    chart: Path | None
    progress: Progress

    @property
    def stores_acceptance(self) -> bool:
        """Whether keys are reserved for the acceptance of the written model."""
        return self.measured and not self.head_only and self.target.suffix == ".gguf"

    @property
    def folder(self) -> Path:
        """The folder for states and checkpoints."""
        return self.work or self.target.with_name(f"{self.target.name}.train")

    @property
    def has_checkpoint(self) -> bool:
        """Whether a training began in the folder, and drew its chart."""
        return (self.folder / CHECKPOINT_NAME).exists()

    @property
    def cores(self) -> int:
        """How many threads train and measure."""
        return self.threads or processors.computing_threads()

    @property
    def seconds(self) -> float:
        """The time budget."""
        return float("inf") if self.minutes is None else 60 * self.minutes


def run(job: Job) -> dict[str, Any]:
    """Train and write; return the fields for --json. An interrupted run can go on later."""
    threads = torch.get_num_threads()
    torch.set_num_threads(job.cores)
    try:
        check_device(job.device or default_device())
        with _alone(job), _carried(job) as carried:
            return _run(carried)
    finally:
        torch.set_num_threads(threads)


@contextmanager
def _alone(job: Job) -> Iterator[None]:
    """Keep other processes out of the job's folder; it is removed if nothing is left in it."""

    def occupied() -> None:
        raise OutputError(
            f"{job.folder}: another training uses this folder; wait until it has ended, or name "
            "another one with --work"
        )

    is_users = job.work is not None and job.work.exists()
    make_folder(job.folder)
    path = job.folder / LOCK_NAME
    try:
        with ExitStack() as stack:
            with raising(OutputError, f"{path}: cannot be written"):
                stack.enter_context(os_files.file_lock(path, occupied))
            try:
                yield
            finally:
                with suppress(PermissionError):  # Windows removes no open file
                    path.unlink()
    finally:
        with suppress(OSError):
            if sys.platform == "win32":
                path.unlink()
            if not is_users:
                job.folder.rmdir()  # unless something is in it


@contextmanager
def _carried(job: Job) -> Iterator[Job]:
    """The job with a model that can have a head: a carrier beside the states in place of others.

    A carrier without a head starts from random weights, because no other head is for it.
    """
    with open_model(job.model) as model:
        if model.architecture not in CARRIED:
            alone = job.start.head_from is None and model.head.is_known and model.head.carried_from
            scratch = bool(alone) and not model.head.names
            yield replace(job, start=Start(None, True)) if scratch else job
            return
        if job.head_only or job.start.head_from is not None:
            option = "--head-only" if job.head_only else "--head-from"
            raise RequestError(
                f"{option}: expected a model that can have a head, found architecture "
                f"{model.architecture}; first write one: mtp-gguf carry {quoted(job.model)}"
            )
        spec = carry(model)
        path = job.folder / f"carrier-{identify(job.model).fingerprint[:16]}.gguf"
        if not path.exists():
            job.progress.say(
                f"llama.cpp has no MTP head for {model.architecture}, so the output has the "
                f"architecture {CARRIER}, which computes the same"
            )
            make_folder(job.folder)
            write_file("carry", spec, path, model.paths, overwrite=False)
    try:
        yield replace(job, model=path, start=Start(None, True))
    finally:
        if not (job.folder / INDEX_NAME).exists():  # done, or nothing to go on from
            remove_data(job.folder, path.name)


def _run(job: Job) -> dict[str, Any]:
    began = time.monotonic()
    with open_model(job.model) as model:
        if job.target.suffix == ".safetensors" and not model.head.kind.hybrid:
            raise RequestError(
                f"{job.target}: expected a GGUF, because mtp.* tensors are for Qwen models; the "
                f"model is {model.head.architecture}"
            )
        check_type(_head_type(job, model))
        _check_list(job, model)
        configs = BlockConfig.all_of(model.head)
        if configs[0].form.chained:
            job = _of_chain(job, model.head.architecture, len(configs))
        with _weights(job, model) as weights:
            _check_resources(job, configs[0], weights, model)
            with _kept_when_interrupted(job.folder):
                samples = _collected(job, model, configs[0].width, began)
                train, held_out = split_data(samples)
                n_train, n_held_out = (sum(map(len, part)) for part in (train, held_out))
                job.progress.say(
                    f"{n_train} tokens to learn from, up to {job.epochs:g} times; {n_held_out} "
                    "others to measure with"
                )
                draft = _draft_vocabulary(job, model, train)
                before = _measured_start(job, model, weights, draft, held_out)
                settings = _settings(job, time.monotonic() - began)
                outcome = _trained(job, model, configs, weights, (train, held_out), draft, settings)
        with leaves_nothing(job.target):
            fields = _write(job, model, before, outcome, held_out, draft, samples)
    if job.work is None:
        remove_data(job.folder, CHECKPOINT_NAME)
    return fields


def _of_chain(job: Job, architecture: str, blocks: int) -> Job:
    """The job for a head of a block for each draft; RequestError for what such heads cannot do."""
    if job.start != _OWN_HEAD:
        option = "--from-scratch" if job.start.from_scratch else "--head-from"
        raise RequestError(
            f"{option}: expected a head of one block, found architecture {architecture}, whose "
            "heads have one for each draft; leave the option out to train the model's own"
        )
    return replace(job, steps=min(job.steps, blocks))


@contextmanager
def _kept_when_interrupted(folder: Path) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(
            f"what was done is in {folder}; the same command goes on from there"
        ) from None


# ------------------------------------------------------------------------------ the start


@contextmanager
def _weights(job: Job, model: Model) -> Iterator[Weights]:
    """The weights to start from; RequestError if this trunk cannot have a head."""
    _ = model.head.architecture  # RequestError for another one
    if model.head.is_alone:
        raise RequestError(f"{job.model}: expected a model with its trunk, found only a head")
    if job.start.from_scratch:
        yield fresh_weights(model, job.seed)
    elif job.start.head_from is None:
        if model.head.missing:
            raise RequestError(
                f"{job.model}: has no complete MTP head to train; pass --head-from MODEL to start "
                "from another one, or --from-scratch"
            )
        yield _checked(read_weights(model), str(job.model))
    else:
        with _donor(job, model, job.start.head_from) as donor:
            donor.head.check_complete()
            donor.head.check_fit(model.head)
            for name in own_tables(donor):
                raise RequestError(
                    f"{donor.path}: expected a head that shares the trunk's embedding and output, "
                    f"found one with its own ({name}); graft it, then train the model's own head"
                )
            yield _checked(read_weights(donor), job.start.head_from)


@contextmanager
def _donor(job: Job, base: Model, source: str) -> Iterator[Model]:
    """Open a GGUF, or convert the head of a checkpoint."""
    if names_gguf(source):
        with open_any_model(source) as donor:
            yield donor
        return
    with tempfile.TemporaryDirectory(prefix="mtp-gguf-") as folder:
        target = Path(folder) / "head.gguf"
        none = DraftOptions()
        with converted_head(base, source, None, "F32", none, target, job.progress) as donor:
            yield donor


def _checked(weights: Weights, name: str) -> Weights:
    for suffix, array in weights.items():
        if not np.isfinite(array).all():
            raise RequestError(f"{name}: {suffix}: expected finite weights, found NaN or infinity")
    return weights


def _check_resources(job: Job, config: BlockConfig, weights: Weights, model: Model) -> None:
    """RequestError if the context, memory or disk space will not do, by an estimate."""
    context = model.head.parameter("context_length")
    if isinstance(context, int) and job.length > context:
        raise RequestError(
            f"--length: expected up to {context} tokens, the model's context, found {job.length}"
        )
    n_vocab = model.vocabulary_size or 0
    size = sum(tensor.nbytes for tensor in model.tensors.values())
    training = memory_needed(
        config,
        weights,
        _settings(job, 0),
        min(n_vocab, _TRAINED_ROWS),
        min(n_vocab, job.tokens),
        len(_own_tables(job, model)),
    )
    needed = max(size, training) + _OVERHEAD
    free = process_memory.free_memory()
    if free < needed:
        raise RequestError(
            f"{job.model}: training its head takes about {human_bytes(needed)} of memory, and "
            f"{human_bytes(free)} are free; try --rank 16, or a smaller --tokens"
        )
    on_disk = bytes_needed(config.width, _collect_settings(job))
    parent = next(p for p in job.folder.absolute().parents if p.exists())
    if (disk := shutil.disk_usage(parent).free) < on_disk:
        raise RequestError(
            f"{job.folder}: the trunk's states of {job.tokens} tokens take up to "
            f"{human_bytes(on_disk)}, and {human_bytes(disk)} are free on its disk; pass a smaller "
            "--tokens, or another --work"
        )


# --------------------------------------------------------------------------- collecting


def _collect_settings(job: Job) -> CollectSettings:
    return CollectSettings(length=job.length, tokens=job.tokens, seed=job.seed, chat=job.chat)


def _collected(job: Job, model: Model, width: int, began: float) -> list[Sample]:
    with job.progress.share("collect") as show:
        found = collect(
            model.paths[0],
            job.folder,
            job.texts,
            _collect_settings(job),
            threads=job.threads,
            gpu_layers=job.gpu_layers,
            seconds=_COLLECTING * job.seconds - (time.monotonic() - began),
            progress=lambda done: show(done / job.tokens, f"{done} tokens of the trunk's states"),
        )
    samples = open_data(job.folder, width)
    if not samples:
        raise RequestError(f"{job.folder}: expected collected states, found {found} tokens")
    return samples


def _check_list(job: Job, model: Model) -> None:
    """RequestError if the model's own draft vocabulary is to be kept and is invalid."""
    present = read_draft_list(model) if job.fastmtp is None else None
    if present is None:
        return
    faults = list_faults(present.ids, model.vocabulary_size or 0, required_ids(model))
    if faults:
        raise RequestError(
            f"{job.model}: its draft vocabulary is invalid: {faults[0]}; pass --fastmtp to count "
            "another one"
        )


def _draft_vocabulary(job: Job, model: Model, train: list[Sample]) -> _Draft | None:
    """The draft vocabulary to train for; None for the whole vocabulary.

    It is the model's own, or with --fastmtp one that is counted on the training data, of
    the size of the model's own unless --fastmtp gives another.
    """
    n_vocab, required = model.vocabulary_size or 0, required_ids(model)
    present = read_draft_list(model)
    if job.fastmtp is None:
        return present
    size = job.fastmtp
    if size == DEFAULT_SIZE:
        size = default_size(n_vocab, len(required)) if present is None else len(present.ids)
    counts = _counts(train, n_vocab)
    source = f"counted on {counts.sum()} tokens of its training data"
    return rank_by_counts(counts, source, required, size)


def _counts(train: list[Sample], n_vocab: int) -> NDArray[np.int64]:
    counts = np.zeros(n_vocab, np.int64)
    for sample in train:
        counts += np.bincount(sample.tokens[sample.start + 1 :], minlength=n_vocab)[:n_vocab]
    return counts


def _learned_ids(model: Model, train: list[Sample], draft: _Draft | None) -> NDArray[Any]:
    """The tokens that the loss is over: the draft vocabulary, or the most frequent ones."""
    n_vocab = model.vocabulary_size or 0
    if draft is not None:
        return np.asarray(draft.ids, np.int64)
    return np.argsort(-_counts(train, n_vocab), kind="stable")[:_TRAINED_ROWS].astype(np.int64)


# ----------------------------------------------------------------------------- training


def _settings(job: Job, used: float) -> TrainSettings:
    device = job.device or default_device()
    return TrainSettings(
        steps=job.steps,
        epochs=job.epochs,
        rate=job.rate,
        rank=job.rank,
        seed=job.seed,
        device=device,
        precision=precision_of(device),
        seconds=max(job.seconds - used, 1.0),
    )


def _trained(
    job: Job,
    model: Model,
    configs: Sequence[BlockConfig],
    weights: Weights,
    data: tuple[list[Sample], list[Sample]],
    draft: _Draft | None,
    settings: TrainSettings,
) -> Outcome:
    train, held_out = data
    ids = _learned_ids(model, train, draft)
    own = bool(_own_tables(job, model))
    tables = read_tables(model, [*train, *held_out], ids, own=own)
    divisors = read_divisors(model)
    trainer = Trainer(configs, weights, tables, train, held_out, settings, job.folder, divisors)
    told = 1  # evaluations: the first one is before training
    with job.progress.share("train") as show:

        def progress(state: State) -> None:
            nonlocal told
            last = state.evaluations[-1]
            rates = " / ".join(f"{rate:.0%}" for rate in last.rates)
            if len(state.evaluations) > told:
                told = len(state.evaluations)
                job.progress.say(f"after {duration(last.seconds)}: accepts {rates}")
                _draw(job, state.evaluations)
            memory = human_bytes(process_memory.peak_memory())
            text = f"step {state.step}, loss {state.loss:.3f}, accepts {rates}, {memory} of memory"
            show(state.share, text)

        outcome = trainer.run(progress)
    _draw(job, outcome.history)
    return outcome


def _draw(job: Job, evaluations: Sequence[Evaluation]) -> None:
    """Draw the chart, if one was asked for. Hours of training do not end because it fails."""
    if job.chart is not None:
        try:
            draw_training(evaluations, job.chart)
        except OutputError as error:
            job.progress.say(f"warning: {error}")


# -------------------------------------------------------------------------- the results


def _output(
    job: Job, model: Model, weights: Weights, draft: _Draft | None, facts: Mapping[str, Any]
) -> OutputSpec:
    """The model with this head. facts: how the head was trained."""
    keys: dict[str, Value] = train_keys(facts)
    if draft is not None:
        keys |= draft.metadata(with_ids=True)
    tensors = head_tensors(weights, model.head.trunk_layers, _head_type(job, model))
    tensors += [TensorCopy.of(model, name) for name in _own_tables(job, model)]
    layers = max(model.head.usable_layers, 1)
    return with_head(model, tensors, keys, layers, model if model.head.layers == layers else None)


def _own_tables(job: Job, model: Model) -> dict[str, str]:
    """Those of `own_tables` if it is the model's own head that is trained."""
    return own_tables(model) if job.start == _OWN_HEAD else {}


def _measured(job: Job, path: Path, held_out: list[Sample]) -> Counts:
    return measure_file(path, held_out, job.steps, rows=_MEASURED_ROWS, threads=job.cores)


def _measured_start(
    job: Job, model: Model, weights: Weights, draft: _Draft | None, held_out: list[Sample]
) -> Counts | None:
    """The acceptance of the head that training starts from, in the output's type and vocabulary.

    None for random weights, and where no GGUF is written: the trainer measures that.
    """
    if job.start.from_scratch or job.target.suffix == ".safetensors":
        return None
    path = job.folder / "start.gguf"
    try:
        write(path, head_alone(_output(job, model, weights, draft, {}), model))
        return _measured(job, path, held_out)
    finally:
        path.unlink(missing_ok=True)


def _write(
    job: Job,
    model: Model,
    before: Counts | None,
    outcome: Outcome,
    held_out: list[Sample],
    draft: _Draft | None,
    samples: list[Sample],
) -> dict[str, Any]:
    """Write the output, measure it, and return the fields for --json.

    before: that of the head as it would have been written without training; None if unknown.
    """
    trained = None if job.start.from_scratch else outcome.before  # as `outcome.after` was measured
    facts: dict[str, Any] = {
        "source": _source(job),
        "tokens": sum(len(sample) for sample in samples),
        "start": _start(job),
        "steps": job.steps,
        "updates": outcome.step,
        "seed": job.seed,
        **({"acceptance_before": trained.rates} if trained else {}),
        "acceptance_after": outcome.after.rates,
    }
    after, speed = outcome.after, None
    if job.target.suffix == ".safetensors":
        before = trained
        _write_checkpoint(job.target, outcome.weights, facts)
    else:
        spec = _output(job, model, outcome.weights, draft, facts)
        if job.head_only:
            spec = head_alone(spec, model)
        if job.stores_acceptance:
            metadata = inserted(spec.metadata, reserved(), BEFORE_TOKENIZER)
            spec = OutputSpec(metadata, spec.tensors)
        with job.progress.count("train-head", spec.nbytes) as advance:
            write(job.target, spec, advance)
        after = _measured(job, job.target, held_out)
        speed = _predicted(job, before, after, held_out)
    return {
        "acceptance": {
            "before": before.rates if before else None,
            "after": after.rates,
            "history": [
                {**e._asdict(), "loss": None if e.step == 0 else e.loss} for e in outcome.history
            ],
        },
        "improved": outcome.step > 0,
        "best_step": outcome.step,
        "steps": outcome.steps,
        "tokens": outcome.tokens,
        "seconds": outcome.seconds,
        "stopped": outcome.stopped,
        "predicted_speedup": speed,
        "replaced_draft_vocabulary": _replaced(model, draft),
        "warnings": [draft.warning] if isinstance(draft, DraftVocabulary) and draft.warning else [],
    }


def _replaced(model: Model, draft: _Draft | None) -> int | None:
    """The number of tokens of the model's draft vocabulary if it was replaced, else None."""
    present = read_draft_list(model) if isinstance(draft, DraftVocabulary) else None
    return None if present is None else len(present.ids)


def _start(job: Job) -> str:
    """What training started from, without the folders of this machine."""
    if job.start.from_scratch:
        return "random weights"
    source = job.start.head_from
    if source is None:
        return "own head"
    return Path(source).name if Path(source).exists() else source


def _source(job: Job) -> str:
    kinds = ["text"] if job.texts.texts else []
    kinds += ["own answers to prompts"] if job.texts.prompts else []
    return f"{' and '.join(kinds)} of {job.files} file{'s' if job.files > 1 else ''}"


def _head_type(job: Job, model: Model) -> TensorType:
    """The type asked for, else that of most matrices of the model's head, else Q8_0."""
    if job.head_type:
        return parse_tensor_type(job.head_type, "--mtp-type")
    types = model.head.types if model.head.is_known and not model.head.faults else {}
    return BY_NAME[next(iter(types), "Q8_0")]


def _write_checkpoint(target: Path, weights: Weights, facts: dict[str, Any]) -> None:
    """Write mtp.* tensors in F32; the file appears once it is complete."""
    metadata = {"format": "pt", "mtp_gguf.train": json.dumps(facts)}
    write_whole(target, save(checkpoint_head(weights), metadata))


def _predicted(
    job: Job, before: Counts | None, after: Counts, held_out: list[Sample]
) -> dict[str, float] | None:
    """The speed relative to no drafting, from the costs of a few cycles; None if not measurable."""
    prompt = held_out[0].tokens[:64].tolist()
    head = job.target if job.head_only else None
    path = job.model if job.head_only else job.target
    try:
        with BenchModel(
            path, n_ctx=512, threads=job.cores, gpu_layers=job.gpu_layers, head=head
        ) as model:
            costs = cycle_costs(model, Setting(job.steps), prompt, blocks=1)
    except MtpGgufError:
        return None
    verify = [stats.median for stats in costs.verify]
    draft = [0.0, *(stats.median for stats in costs.draft)]

    def speed(found: Counts, depth: int) -> float:
        made = 1 + sum(found.rates[:depth])
        return made * verify[0] / (verify[depth] + draft[depth] + costs.rollback.median)

    depths = range(1, len(verify))
    best = max(depths, key=lambda depth: speed(after, depth), default=0)
    if not best:
        return None
    known = [speed(before, depth) for depth in depths] if before else []
    return {"depth": best, "after": speed(after, best), "before": max(known, default=0.0)}

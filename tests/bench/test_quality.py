"""`mtp-gguf quality`: figures against llama-perplexity's, stored logits, wrong inputs, the page.

PRINTED is what llama-perplexity of the pinned llama.cpp prints for the tiny models:

    llama-perplexity -m REFERENCE -f text.txt -c 64 -b 64 -t 1 --kl-divergence-base LOGITS
    llama-perplexity -m MODEL -c 64 -b 64 -t 1 --kl-divergence --kl-divergence-base LOGITS

With MTP_GGUF_LLAMA_TOOLS=FOLDER, a build of it, `pytest -m slow` runs the program.
"""

from __future__ import annotations

import errno
import json
import re
import resource
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mtp_gguf.bench import model
from mtp_gguf.bench.logit_file import LogitFile, first_row, pack, unpack
from mtp_gguf.bench.quality import Candidate, Divergence, Mean
from mtp_gguf.bench.report.quality_page import render_quality
from mtp_gguf.gguf_tools.errors import FormatError, OutputError
from support.commands import UNWRITABLE, invoke, refused, succeed
from support.models import Models

TEXT = Path(__file__).parents[1] / "goldens" / "imatrix" / "text.txt"
SIZE = 64
PRINTED = {
    "mean": 0.526546,
    "mean error": 0.012821,
    "maximum": 1.893385,
    "99.9 %": 1.755862,
    "median": 0.500647,
    "same top": 0.19355,
    "perplexity": 2007.074,
    "perplexity error": 101.71,
    "reference": 2025.275,
}
# Measured: 1e-3 of the value, from other kernels; the median of few tokens moves most. A window's
# first half, or tokens that are off by one, show as 0.1 and more.
TOLERANCE = 0.01
# Random weights leave near ties. Measured: three tokens of 372.
NEAR_TIES = 5 / 372


def flat(divergence: dict[str, Any]) -> dict[str, float]:
    """What `PRINTED` has, of a candidate's divergence in --json."""
    return {
        "mean": divergence["mean"]["value"],
        "mean error": divergence["mean"]["error"],
        "maximum": divergence["maximum"],
        "99.9 %": divergence["percentile_99_9"],
        "median": divergence["median"],
        "same top": divergence["same_top"]["value"],
        "perplexity": divergence["perplexity"]["value"],
        "perplexity error": divergence["perplexity"]["error"],
        "reference": divergence["reference_perplexity"]["value"],
    }


def quality(*words: object) -> dict[str, Any]:
    options = ("--text", TEXT, "-c", SIZE, "-t", 1, "--json")
    result = invoke("quality", *words, *options)
    assert result.exit_code == 0, result.output
    fields: dict[str, Any] = json.loads(result.stdout)
    return fields


def test_the_figures_are_those_of_llama_perplexity(models: Models, tmp_path: Path) -> None:
    logits = tmp_path / "logits"
    reference = models.gguf("dense-tied")
    fields = quality(
        models.gguf("dense-tied", "Q3_K_M", "F16"),
        reference,
        *("--reference", reference, "--kl-divergence-base", logits),
    )
    candidate, itself = fields["candidates"]
    found = flat(candidate["divergence"])
    assert abs(found.pop("same top") - PRINTED["same top"]) <= NEAR_TIES
    wanted = {name: PRINTED[name] for name in found}
    assert found == pytest.approx(wanted, rel=TOLERANCE)
    assert candidate["divergence"]["tokens"] == 12 * 31
    assert flat(itself["divergence"])["mean"] < 1e-5
    assert itself["divergence"]["same_top"]["value"] == 1
    drafting = candidate["drafting"]
    assert len(drafting["acceptance"]) == 3
    assert drafting["tokens_per_second"] >= drafting["plain"] > 0
    before = logits.stat().st_mtime_ns
    again = quality(reference, "--reference", reference, "--kl-divergence-base", logits)
    assert logits.stat().st_mtime_ns == before
    assert again["candidates"][0]["divergence"] == itself["divergence"]


def test_rows_keep_probabilities_above_the_negligible() -> None:
    logits = np.random.default_rng(1).normal(0, 4, (20, 33)).astype(np.float32)
    logits[3] = 0.5  # a scale of zero
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(axis=1, keepdims=True))
    found = unpack(pack(logits), 33)
    kept = exact > exact.max(axis=1, keepdims=True) - 16
    assert kept.mean() > 0.9
    assert np.abs(found - exact)[kept].max() < 16 / 65535


def test_an_interrupted_reference_goes_on(tmp_path: Path) -> None:
    windows = np.arange(40, dtype=np.int32).reshape(5, 8)
    rows = 8 - 1 - first_row(8)
    file = LogitFile(tmp_path / "logits", windows, 7)
    reads: list[int] = []

    def read(window: int) -> Any:
        if window == 3 and 3 not in reads:
            reads.append(3)
            raise KeyboardInterrupt
        reads.append(window)
        return np.full((rows, 7), window, np.float32) + np.arange(7, dtype=np.float32)

    assert not file.complete()
    with pytest.raises(KeyboardInterrupt):
        file.write(read, lambda _: None)
    assert not file.path.exists()
    partial = next(tmp_path.iterdir())
    with partial.open("ab") as cut:
        cut.write(b"half a window")
    file.write(read, lambda _: None)
    assert reads == [0, 1, 2, 3, 3, 4]
    assert file.complete()
    assert [p.name for p in tmp_path.iterdir()] == ["logits"]
    assert np.array_equal(unpack(file.window(4), 7), unpack(pack(read(4)), 7))
    with pytest.raises(FormatError, match="expected the logits of 5 windows of 8 tokens"):
        LogitFile(file.path, windows + 1, 7).complete()


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ("demo", ("expected the vocabulary of the reference", "compare files of one model")),
        ("moe-fused", ("general.architecture: expected qwen35,", "found qwen35moe")),
    ],
)
def test_a_reference_of_another_model(
    models: Models, tmp_path: Path, other: str, words: tuple[str, ...]
) -> None:
    reference, model = models.gguf("dense-tied"), models.gguf(other)
    options = ("--reference", reference, "--text", TEXT)
    refused(tmp_path, "quality", model, *options, words=words)


def test_the_page(tmp_path: Path) -> None:
    mean = Mean(0.01, 0.001)
    divergence = Divergence(mean, 0.005, 0.2, 0.4, Mean(0.95, 0.01), mean, mean, 999)
    candidates = [Candidate(f"<b>{i}</b>", 10**9 + i * 10**8, divergence, None) for i in range(3)]
    page = render_quality("<i>base</i>", 999, candidates)
    assert "<b>" not in page
    assert "<i>" not in page
    assert page.count("&lt;b&gt;2&lt;/b&gt;") >= 5
    assert not re.search(r"(?i)https?:|<script|\bsrc=", page)
    assert page.count('<circle class="f1"') == 6


@pytest.mark.slow
def test_the_program_agrees_and_reads_our_logits(
    models: Models, tmp_path: Path, llama_tools: Path
) -> None:
    reference, model = models.gguf("demo", "F16", "F16"), models.gguf("demo", "Q3_K_M", "F16")
    logits = tmp_path / "logits"
    fields = quality(model, "--reference", reference, "--kl-divergence-base", logits)
    words = (llama_tools / "llama-perplexity", "-m", model, "--kl-divergence", "-c", SIZE)
    options = ("-b", SIZE, "-t", 1, "--kl-divergence-base", logits)
    done = subprocess.run(
        [*map(str, (*words, *options))], capture_output=True, text=True, check=True
    )
    printed = dict(re.findall(r"^(.*?) +: +(\d+\.\d+)", done.stdout + done.stderr, re.MULTILINE))
    printed |= dict(re.findall(r"^(.* KLD): +(\d+\.\d+)", done.stdout + done.stderr, re.MULTILINE))
    found = flat(fields["candidates"][0]["divergence"])
    assert found["mean"] == pytest.approx(float(printed["Mean    KLD"]), rel=0.02)
    assert found["perplexity"] == pytest.approx(float(printed["Mean PPL(Q)"]), rel=TOLERANCE)
    assert found["reference"] == pytest.approx(float(printed["Mean PPL(base)"]), rel=1e-4)


def test_the_table(models: Models, tmp_path: Path) -> None:
    path = models.gguf("dense-tied")
    page = tmp_path / "q.html"
    text = succeed(
        *("quality", path, "--reference", path, "--text", TEXT, "-c", SIZE, "--chunks", 2),
        *("--kl-divergence-base", tmp_path / "l", "--no-drafting", "--html", page, "-t", 1),
    )
    assert "on 62 tokens" in text
    assert re.search(r"same top +100.00%", text)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


def compared(models: Models, *options: object) -> tuple[object, ...]:
    """The words of a command that keeps the reference's logits."""
    path = models.gguf("dense-tied")
    return ("quality", path, "--reference", path, "--text", TEXT, "-c", SIZE, *options)


@pytest.mark.skipif(not UNWRITABLE.is_dir(), reason="no /proc, in which not even root can write")
@pytest.mark.parametrize("option", ["--html", "--kl-divergence-base"])
def test_a_folder_that_cannot_be_written_is_told_at_once(
    option: str, models: Models, tmp_path: Path
) -> None:
    target = UNWRITABLE / "quality"
    words = compared(models, option, target)
    refused(tmp_path, *words, words=(f"{target}: cannot be written: ",))


def test_logits_that_exist_are_read_where_nothing_can_be_written(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = tmp_path / "logits"
    words = compared(models, "--chunks", 2, "--no-drafting", "--kl-divergence-base", logits)
    succeed(*words)

    def no_file(**_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", no_file)
    succeed(*words)


def test_logits_that_do_not_fit_the_disk(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is read; what an interrupted run wrote already counts."""
    logits = tmp_path / "logits"
    words = compared(models, "--chunks", 2, "--no-drafting", "--kl-divergence-base", logits)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=99_999))
    said = refused(tmp_path, *words, words=(f"{logits}: needs ", "and 99999 are free on its disk"))
    nbytes = int(said.split(" needs ")[1].split()[0])
    (tmp_path / "logits.partial").write_bytes(bytes(nbytes - 99_999))
    succeed(*words)
    assert logits.stat().st_size == nbytes


def test_a_disk_that_becomes_full_keeps_no_logits(tmp_path: Path) -> None:
    """A limit on file sizes stands for it."""
    windows = np.arange(40, dtype=np.int32).reshape(5, 8)
    file = LogitFile(tmp_path / "logits", windows, 7)
    rows = np.zeros((8 - 1 - first_row(8), 7), np.float32)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file.nbytes - 1, limits[1]))
    try:
        with pytest.raises(OutputError, match=f"logits: no space for its {file.nbytes} bytes: "):
            file.write(lambda _: rows, lambda _: None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("begun", [True, False])
def test_an_interrupt_names_the_logits_if_there_are_any(
    begun: bool, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(model, "BenchModel", interrupt)
    logits = tmp_path / "logits"
    if begun:
        (tmp_path / "logits.partial").touch()
    result = invoke(*compared(models, "--kl-divergence-base", logits))
    assert result.exit_code == 130
    continues = f"the same command continues with the logits in {logits}"
    said = f"mtp-gguf: interrupted; {continues if begun else 'nothing was written'}"
    assert result.stderr.splitlines()[-1] == said

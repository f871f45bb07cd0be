"""bench and tune on tiny models whose text and acceptance are known; no time is tested."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.bench import tune as tuning
from mtp_gguf.bench.model import BenchModel, Setting
from mtp_gguf.bench.options import BenchOptions
from mtp_gguf.bench.prompts import SETS
from mtp_gguf.bench.report.page import render_report
from mtp_gguf.bench.run import Watcher, run_bench
from mtp_gguf.bench.search import Space
from mtp_gguf.bench.tune import TuneOptions, tune
from mtp_gguf.convert.families.target_model import HeadChoice
from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.machine import system
from mtp_gguf.gguf_tools.profile import AUTO_MAX_DEPTH, LOOKUP_TOKENS, profile_path, read_profiles
from mtp_gguf.native.errors import ModelRefusedError
from mtp_gguf.native.libraries.kernel_share import KernelShare
from mtp_gguf.native.libraries.replay import replays
from support.carried_models import write_model
from support.commands import invoke, succeed
from support.models import Models

TOKENS = 40


def options(**changes: Any) -> BenchOptions:
    small = {"kinds": ["code"], "depths": (0, 2, "auto"), "tokens": TOKENS, "rounds": 1}
    return BenchOptions(**{**small, "threads": 1, "prompts": 1, **changes})


def known_acceptance(dial: Any, tokens: list[int], hit: float, depth: int) -> tuple[float, ...]:
    """Share accepted by position, worked out from the tokens after which the head is wrong."""
    missed, cycle = dial.missed("tiny", hit), dial.successors("tiny")
    accepted, cycles, written, at = [0] * depth, 0, 1, tokens[0]
    while written < TOKENS:
        right = 0
        for position in range(depth):
            if missed[at]:
                break
            right, at = right + 1, cycle[at]
            accepted[position] += 1
        at = cycle[at]
        cycles, written = cycles + 1, written + right + 1
    return tuple(a / cycles for a in accepted)


def test_qwen3_next(dial: Any) -> None:
    """llama.cpp keeps no snapshots of its states, which have another layout than Qwen3.5's."""
    path = dial("tiny-next")
    texts = run_bench(path, options(tokens=12, depths=(0, 2))).to_json()["texts"]
    assert {t["depth"] for t in texts if t["kind"] == "all"} == {0, 2}
    task = TuneOptions(Space((1,)), None, ["edit"], tokens=8, rounds=1, threads=1)
    assert tune(path, task, _hush).profile is not None


@pytest.mark.sample(1)
@pytest.mark.parametrize("hit", [0.0, 0.7, 1.0])
def test_bench_measures_the_acceptance_rate_of_the_synthetic_model(dial: Any, hit: float) -> None:
    path, seen = dial("tiny", hit=hit), []
    result = run_bench(path, options(), Watcher(lambda share, _: seen.append(share)))
    record = json.loads(json.dumps(result.to_json()))
    by_depth = {t["depth"]: t for t in record["texts"] if t["kind"] == "all"}
    assert set(by_depth) == {0, 2, "auto"}
    assert by_depth[0]["tokens_per_cycle"] == 1
    sample = record["samples"][0]
    assert sample["depth"] == 2
    first = _first_token(dial, path)
    want = known_acceptance(dial, [first], hit, 2)
    assert by_depth[2]["acceptance"] == pytest.approx(want)
    assert by_depth[2]["tokens_per_cycle"] == pytest.approx(1 + sum(want))
    for t in by_depth.values():
        # Drafts for nothing: a cycle would take its verification alone; one round, so exactly.
        assert t["limit_tok_s"] == pytest.approx(t["tokens_per_cycle"] * 1e3 / t["verify_ms"])
        assert t["draft_ms"] > 0 or not t["acceptance"]
    # The source of each token is known; no draft is accepted after a wrong one.
    origins = [token["origin"] for token in sample["tokens"]]
    assert origins[0] == 0
    assert len(origins) == TOKENS
    if hit == 0:
        assert set(origins) == {0}
        assert all(token["rejected"] for token in sample["tokens"][1:])
    if hit == 1:
        assert origins[1:7] == [1, 2, 0, 1, 2, 0]
        assert not any(token["rejected"] for token in sample["tokens"])
    # Everything was measured, shares of progress only grew, and the report takes it.
    costs = record["cycles"][0]
    assert (len(costs["verify"]), len(costs["draft"])) == (9, 8)
    assert all(c["n"] == 3 and c["median"] > 0 for c in [*costs["verify"], *costs["draft"]])
    assert record["analysis"]["best_drafting"] == 2
    assert seen == sorted(seen)
    assert seen[-1] <= 1
    assert "Time of a cycle" in render_report(result)
    assert record["state"] == "done"
    assert {part["state"] for part in record["plan"]} == {"done"}


def test_special_tokens_have_their_names(models: Models) -> None:
    with BenchModel(models.gguf("demo", "Q4_K_M", "F16"), n_ctx=64, threads=1) as model:
        [end] = model.tokenize("<|im_end|>")
        assert model.piece(end) == b"<|im_end|>"


def _first_token(dial: Any, path: Path) -> int:
    """What follows the first prompt of `code`: the cycle's, after the prompt's last token."""
    with BenchModel(path, n_ctx=256, threads=1) as model:
        last = model.tokenize(SETS["code"][0])[-1]
    successor: int = dial.successors("tiny")[last]
    return successor


@pytest.mark.thorough
def test_contexts_sizes_and_coverage(dial: Any) -> None:
    """On a file with a draft vocabulary of 300 and more tokens."""
    path = dial.models.gguf("dense-tied", layout="ids")
    wanted = options(depths=(0, 1), sizes=(64, -1), contexts=(0, 48), tokens=12)
    record = run_bench(path, wanted).to_json()
    assert {t["context"] for t in record["texts"]} == {0, 48}
    assert {t["fastmtp_size"] for t in record["texts"]} == {0}
    rows = {t["fastmtp_size"]: t["rows"] for t in record["sizes"]}
    assert set(rows) == {0, 64, -1}
    assert rows[64] == 64
    assert rows[-1] == 1024
    assert 300 <= rows[0] < 1024
    assert {t["depth"] for t in record["sizes"]} == {1}
    coverage = record["coverage"]
    assert max(coverage) == rows[0]
    assert list(coverage.values()) == sorted(coverage.values())
    assert 0 <= min(coverage.values()) <= max(coverage.values()) <= 1
    with pytest.raises(RequestError, match=r"a prompt of mine has .* tokens, expected 1 to"):
        run_bench(path, options(own={"mine": "word " * 4000}))


def test_drafts_from_the_text_are_rows_of_their_own(dial: Any) -> None:
    """Lookup alone has no head, both together has: the same texts, the share from the text."""
    path = dial("tiny", hit=0.9)
    wanted = options(kinds=("code", "edit"), depths=(0, 1, "lookup", "auto+lookup"), tokens=12)
    record = run_bench(path, wanted).to_json()
    texts = {t["depth"]: t for t in record["texts"] if t["kind"] == "all"}
    assert list(texts) == [0, 1, "lookup", "auto+lookup"]
    assert texts["lookup"]["rows"] == 0 < texts["auto+lookup"]["rows"]
    assert texts["lookup"]["acceptance"] == ()
    assert texts[1]["text_share"] == 0 <= texts["auto+lookup"]["text_share"] <= 1
    assert record["analysis"]["best_drafting"] == 1  # a number, which the report's charts need
    assert {sample["kind"] for sample in record["samples"]} == {"code", "edit"}


def test_tune_measures_auto_as_it_runs(dial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With drafts from the text where they are the default; fixed depths have none."""
    seen = set()
    session = BenchModel.session

    def recorded(model: BenchModel, setting: Setting) -> Any:
        seen.add((setting.max_depth, setting.lookup))
        return session(model, setting)

    monkeypatch.setattr(BenchModel, "session", recorded)
    task = TuneOptions(Space((1, 2)), None, ["edit"], tokens=12, rounds=1, threads=1)
    assert tune(dial("tiny", hit=0.9), task, _hush).profile is not None
    assert {(0, 0), (1, 0), (2, 0)} < seen
    looking_up = {setting for setting in seen if setting[1] > 0}
    assert looking_up == ({(AUTO_MAX_DEPTH, LOOKUP_TOKENS)} if replays("qwen35", 0) else set())


def test_tune_measures_writes_and_is_used(dial: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dial("tiny", hit=0.9)
    space = Space((1, 2), rollbacks=("snapshot", "checkpoint"), draft_threads=(0,))
    tuned = tune(path, TuneOptions(space, None, ["code"], tokens=12, rounds=1, threads=1), _hush)
    profile, found = tuned.profile, tuned.search
    assert profile is not None
    assert tuned.skipped == ()
    assert {c.settings.rollback for c in found.tried} == {"snapshot", "checkpoint"}
    assert {c.settings.depth for c in found.tried} == {0, 1, 2, "auto"}
    assert len(profile.costs.verify_ms) == 5
    assert len(profile.costs.draft_ms) == 4

    command = ["tune", path, "--max-depth", "2", "-n", "8", "--rounds", "1", "-t", "1"]
    written = profile_path(path)
    monkeypatch.setattr(tuning, "warnings_of", lambda *_: ("depth 2 was measured at 9.99 times",))
    for options in ([], ["--json"]):
        done = invoke(*command, *options)
        assert done.exit_code == 0, done.output
        assert not written.exists()
        assert "depth 2 was measured at 9.99 times" in (done.stdout if options else done.stderr)
    assert json.loads(done.stdout)["profile"] is None
    monkeypatch.setattr(tuning, "warnings_of", lambda *_: ())  # the machine may be busy
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    assert done.stdout.endswith(f"written: {written}\n")
    (kept,) = read_profiles(written)
    assert kept.settings in [c.settings for c in kept.candidates]
    plain = next(c.tok_s for c in kept.candidates if c.settings.depth == 0)
    shown = re.search(r"^ *(\S+) tok/s +(\S+) x  ", done.stdout, re.MULTILINE)
    assert shown
    assert float(shown[2]) == pytest.approx(float(shown[1]) / plain, abs=0.02)

    # What the profile says is what generate does, unless the command line says otherwise.
    text = written.read_text(encoding="utf-8")
    before, _, after = text.partition("[profile.measured]")
    settings = (
        "[profile.settings]\ndepth = 2\nfastmtp_size = 0\n"
        'rollback = "checkpoint"\ndraft_threads = 1\n\n'
    )
    before = before[: before.index("[profile.settings]")] + settings
    written.write_text(f"{before}[profile.measured]{after}", encoding="utf-8")
    command = ["generate", path, "-p", "def f", "-n", "8", "--ctx", "256", "-t", "1", "--json"]
    done = invoke(*command)
    assert json.loads(done.stdout)["depth"] == 2, done.stderr
    assert json.loads(invoke(*command, "--depth", "1").stdout)["depth"] == 1
    assert json.loads(invoke(*command, "--no-profile").stdout)["depth"] == "auto"
    monkeypatch.setattr(system, "_cpu_name", lambda: "Another")
    elsewhere = invoke(*command)
    assert json.loads(elsewhere.stdout)["depth"] == "auto"
    assert "is ignored, it was measured on another machine: cpu 'Another'" in elsewhere.stderr
    written.write_text(text.replace("format = 2", "format = 9"), encoding="utf-8")
    broken = invoke(*command)
    assert broken.exit_code == 1
    assert "format: expected 2, found 9" in broken.stderr
    written.unlink()


def _hush(share: float, text: str) -> None:
    assert 0 <= share <= 1
    assert text


def test_bench_command(dial: Any, tmp_path: Path) -> None:
    path = dial("tiny", hit=0.9)
    prompt = tmp_path / "mine.txt"
    prompt.write_text("aha", encoding="utf-8")
    out = tmp_path / "results"
    command = ["bench", path, "--no-server", "--prompts", "json", "--depths", "0,1", "-n", "6"]
    command += ["--rounds", "1", "-t", "1", "--prompt-file", prompt, "-o", out]
    done = invoke(*command)
    assert done.exit_code == 0, done.output
    assert {p.name for p in out.iterdir()} == {"bench.json", "report.html"}
    record = json.loads((out / "bench.json").read_text(encoding="utf-8"))
    assert {t["kind"] for t in record["texts"]} == {"json", "mine.txt", "all"}
    assert "with free drafts, depth 1 would reach" in done.stdout
    assert f"\nkernels: {KernelShare(**record['model']['kernels']).text}\n" in done.stdout
    again = invoke(*command)
    assert again.exit_code == 1
    assert "bench.json: exists; pass --overwrite" in again.stderr


@pytest.mark.parametrize("architecture", ["qwen2", "qwen35"])
def test_a_model_without_a_head(dial: Any, tmp_path: Path, architecture: str) -> None:
    """It drafts from its text; qwen35's has recurrent states."""
    path, out = tmp_path / "model.gguf", tmp_path / "results"
    if architecture == "qwen2":
        write_model(path, architecture)
    else:
        succeed("strip", dial("tiny", hit=0.9), "-o", path)
    command = ["bench", path, "--prompts", "code,edit", "-n", "6", "--rounds", "1", "-t", "1"]
    done = invoke(*command, "--no-server", "-o", out)
    assert done.exit_code == 0, done.output
    assert "drafting only from the text\n" in done.stderr
    record = json.loads((out / "bench.json").read_text(encoding="utf-8"))
    assert {t["depth"] for t in record["texts"]} == {0, "lookup"}
    (costs,) = record["cycles"]
    assert (len(costs["verify"]), costs["draft"]) == (9, [])
    assert {batch["n"] for batch in costs["verify"]} == {3}  # as cycles of a round
    assert "Cost of each batch" in (out / "report.html").read_text(encoding="utf-8")
    assert record["prefill"]["plain"]["median"] > 0
    assert record["prefill"]["head"] is None
    assert {part["state"] for part in record["plan"]} == {"done"}
    assert {sample["depth"] for sample in record["samples"]} == {"lookup"}
    report = (out / "report.html").read_text(encoding="utf-8")
    pair = next(p for p in record["pairs"] if p["kind"] == "all")
    sentence = f"rafts from the text are {pair['ratio']:.2f} times as fast as no drafting, from "
    assert f"\nd{sentence}" in done.stdout
    assert f">D{sentence}" in report
    assert "Generated with lookup alone." in report
    for options, wrong in ((["--depths", "0,auto"], "auto"), (["--depths", "2,lookup"], "2")):
        done = invoke(*command, *options)
        assert done.exit_code == 1
        assert done.stderr.endswith(f"; --depths: expected 0 or lookup, found {wrong}\n")
    done = invoke(*command, "--fastmtp-sizes", "64")
    assert done.exit_code == 1
    assert done.stderr.endswith("; leave --fastmtp-sizes out\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompts", "code,poems"], "--prompts: expected some of code, chat, .* found 'poems'"),
        (["--prompts", ","], "--prompts: expected some of .* found none"),
        (
            ["--depths", "0,17"],
            "--depths: expected 0 to 16, auto, lookup or auto.lookup, found '17'",
        ),
        (["--depths", "-1"], "--depths: expected 0 to 16, auto, lookup or auto.lookup, found '-1'"),
        (["--ctx", "4kk"], "--ctx: expected numbers of tokens such as 0,4k; found '4kk'"),
        (["--ctx", "9999999k"], "--ctx: expected numbers"),
        (["--fastmtp-sizes", "0"], "--fastmtp-sizes: expected numbers or -1, found '0'"),
        (["--budget", "soon"], "--budget: expected a time such as 90s, 5m or 1h; found 'soon'"),
        (["--budget", "0"], "--budget: expected a time"),
        (["--budget", "-5m"], "--budget: expected a time"),
        (["--budget", "9999h"], "--budget: expected a time"),
        (["-o", "/dev/null"], "expected a folder, found a file"),
        (["--prompt-file", "/nowhere"], "/nowhere: cannot be read"),
        (["-o", "/nowhere/at/all"], "expected its folder to exist"),
        (["--llama-server", "/nowhere/server"], "expected a program, found none"),
    ],
)
def test_bad_arguments_of_bench(dial: Any, arguments: list[str], message: str) -> None:
    done = invoke("bench", dial("tiny", hit=0.9), *arguments)
    is_usage = not message.startswith(("expected", "/"))
    assert done.exit_code == (2 if is_usage else 1)
    said = " ".join(done.stderr.replace("│", " ").split())
    assert re.search(message.replace(": ", ": (?:.*: )?", 1) if is_usage else message, said)


@pytest.mark.parametrize("command", ["bench", "tune"])
def test_files_that_are_no_gguf(command: str, tmp_path: Path) -> None:
    for content in (None, b"no GGUF", b"GGUF" + b"\xff" * 40):
        path = tmp_path / "m.gguf"
        if content is not None:
            path.write_bytes(content)
        done = invoke(command, path)
        assert done.exit_code == 1
        assert len(done.stderr.strip().splitlines()) == 1
        assert done.stderr.startswith("mtp-gguf: ")


def test_a_head_alone_is_refused(dial: Any) -> None:
    """llama.cpp would load it as a model and crash."""
    with pytest.raises(ModelRefusedError, match="found only an MTP head"):
        run_bench(dial.models.gguf("dense-tied", choice=HeadChoice.ALONE), options())

"""The effects of the options of `mtp-gguf convert` on the file and on its output."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.machine.processors import usable_cores
from support.checkpoints import SMALL, SPECS, TINY, Spec
from support.commands import held, invoke, succeed
from support.conversions import converted
from support.gguf_files import differing, loads, tensors_of, value_of
from support.models import Models

BARE = replace(SMALL, name="bare", mtp=False)
MIXTURE = replace(TINY, name="mixture", experts=4)
NESTED = replace(SMALL, name="nested", nested=True)
HEAD = "blk.2."


@pytest.fixture(scope="module")
def plain(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The tensors of the small model at Q4_K_M with a head of F16."""
    output = tmp_path_factory.mktemp("plain") / "plain.gguf"
    return converted(models.checkpoint(SMALL), output, "--mtp-f16")


def types(model: Path, output: Path, *options: object) -> dict[str, str]:
    """The type of each tensor of a conversion, which overwrites."""
    tensors = converted(model, output, "--overwrite", *options)
    return {name: t.tensor_type.name for name, t in tensors.items()}


def named(models: Models, spec: Spec, parent: Path, name: str = "model") -> Path:
    """A copy of a checkpoint in a folder of the given name, from which the model has its own."""
    parent.mkdir(exist_ok=True)
    return models.copy(spec, parent).rename(parent / name)


class TestTensorType:
    @pytest.mark.parametrize("quant", ["Q4_K_M", "F16", "BF16", "F32"])
    def test_first_match_wins(self, quant: str, models: Models, tmp_path: Path) -> None:
        """Over later ones, over the mix, and over the type of the head."""
        model, output = models.checkpoint(SMALL), tmp_path / "x.gguf"
        base = types(model, output, "--quant", quant, "--mtp-f16")
        wide, narrow = ["--tensor-type", "ffn_=Q8_0"], ["--tensor-type", "ffn_down=q5_k"]
        for order, down in (([*wide, *narrow], "Q8_0"), ([*narrow, *wide], "Q5_K")):
            found = types(model, output, "--quant", quant, "--mtp-f16", *order)
            changed = {name: kind for name, kind in found.items() if kind != base[name]}
            assert {f"{HEAD}ffn_up.weight", "blk.0.ffn_gate.weight"} <= changed.keys()
            assert changed[f"{HEAD}ffn_down.weight"] == changed["blk.1.ffn_down.weight"] == down
            assert all("ffn_" in name and "norm" not in name for name in changed)
            assert {k for n, k in changed.items() if "ffn_down" not in n} == {"Q8_0"}

    def test_the_head_alone(self, models: Models, tmp_path: Path) -> None:
        options = "--mtp-type", "Q8_0", "--tensor-type", r"blk\.2\.nextn\.eh_proj=BF16"
        found = types(models.checkpoint(SMALL), tmp_path / "x.gguf", *options)
        matrices = {n: k for n, k in found.items() if n.startswith(HEAD) and "norm" not in n}
        assert matrices.pop(f"{HEAD}nextn.eh_proj.weight") == "BF16"
        assert {*matrices.values()} == {"Q8_0"}

    def test_leaves_norms_in_f32(self, models: Models, tmp_path: Path) -> None:
        for quant in ("F16", "Q4_K_M"):
            options = "--quant", quant, "--tensor-type", ".*=Q8_0"
            found = types(models.checkpoint(SMALL), tmp_path / "x.gguf", *options)
            kept = {n for n, k in found.items() if k == "F32"}
            assert all("norm" in n or "ssm_" in n for n in kept)
            assert {*found.values()} == {"F32", "Q8_0"}

    @pytest.mark.parametrize(
        ("pattern", "kind"),
        [
            (r"ffn_(?=up)", "Q6_K"),
            (r"(?<=blk\.1\.)ffn_up", "Q6_K"),  # what std::regex does not know
            (r"(?i)FFN_UP", "Q6_K"),
            (r"^ffn_up", None),
            (r"^output\.weight", None),  # and not attn_output.weight, in whose name it is
            (r"blk.1.ffn_up.weight", "Q6_K"),
        ],
    )
    def test_pattern_is_pythons(
        self, pattern: str, kind: str | None, models: Models, tmp_path: Path
    ) -> None:
        options = "--tensor-type", f"{pattern}=Q6_K"
        found = types(models.checkpoint(SMALL), tmp_path / "x.gguf", *options)
        assert found["blk.1.ffn_up.weight"] == (kind or "Q4_K")
        changed = [name for name, k in found.items() if "ffn_up" not in name and k == "Q6_K"]
        plain = types(models.checkpoint(SMALL), tmp_path / "x.gguf")
        assert changed == [n for n, k in plain.items() if "ffn_up" not in n and k == "Q6_K"]

    def test_for_every_tensor_of_a_deep_model(self, models: Models, tmp_path: Path) -> None:
        """llama.cpp is given a name for each; more of them than its log has lines."""
        model = models.checkpoint(SPECS["moe-unfused"])
        found = types(model, tmp_path / "x.gguf", "--tensor-type", "weight=Q8_0")
        assert {*found.values()} == {"F32", "Q8_0"}

    def test_that_matches_nothing_is_noted(self, models: Models, tmp_path: Path) -> None:
        options = "--tensor-type", "ffn_dwon=Q8_0", "--tensor-type", "ffn_up=Q8_0"
        result = invoke("convert", models.checkpoint(SMALL), "-o", tmp_path / "x.gguf", *options)
        assert "note: --tensor-type ffn_dwon=Q8_0: matches no tensor\n" in result.stdout
        assert result.stdout.count("matches no tensor") == 1


class TestHead:
    @pytest.mark.parametrize("quant", ["F16", "BF16", "F32"])
    def test_of_an_unquantized_base_has_its_type(
        self, quant: str, models: Models, tmp_path: Path
    ) -> None:
        """So the file can be converted further; of several files each has its own."""
        source, also = tmp_path / f"x-{quant}.gguf", tmp_path / "x-Q4_K_M.gguf"
        found = types(models.checkpoint(SMALL), source, "--quant", quant, "--also", "Q4_K_M")
        assert {k for n, k in found.items() if n.startswith(HEAD)} == {quant, "F32"}
        written = tensors_of(also)
        assert {written[n].tensor_type.name for n in found if n.startswith(HEAD)} == {"Q8_0", "F32"}
        again = converted(source, tmp_path / "again.gguf")
        if quant != "F16":  # which rounds the weights
            assert not differing(written, again)

    @pytest.mark.sample(5)
    @pytest.mark.parametrize("kind", ["F16", "BF16", "F32", "Q8_0", "q6_k", "Q4_K", "IQ4_NL"])
    @pytest.mark.parametrize("quant", ["F16", "Q4_K_M"])
    def test_type(self, quant: str, kind: str, models: Models, tmp_path: Path, plain: Any) -> None:
        options = "--quant", quant, "--mtp-type", kind
        found = types(models.checkpoint(SMALL), tmp_path / "x.gguf", *options)
        head = {n: k for n, k in found.items() if n.startswith(HEAD)}
        assert {k for n, k in head.items() if "norm" in n} == {"F32"}
        assert {k for n, k in head.items() if "norm" not in n} == {kind.upper()}
        if quant == "Q4_K_M":
            rest = {n: t.tensor_type.name for n, t in plain.items() if not n.startswith(HEAD)}
            assert {n: k for n, k in found.items() if not n.startswith(HEAD)} == rest

    def test_no_mtp(self, models: Models, tmp_path: Path) -> None:
        """The same as converting a model that never had a head."""
        output = tmp_path / "x.gguf"
        said = succeed("convert", models.checkpoint(SMALL), "-o", output, "--no-mtp")
        assert "15 source tensors skipped: MTP head (--no-mtp)" in said
        assert "cannot draft: the file has no MTP head" in said
        without = tensors_of(output)
        never = converted(models.checkpoint(BARE), tmp_path / "bare.gguf")
        assert not differing(without, never)
        assert value_of(output, "qwen35.block_count") == 2
        assert value_of(output, "qwen35.nextn_predict_layers") is None
        assert loads(output)

    def test_head_only(self, models: Models, tmp_path: Path, plain: dict[str, Any]) -> None:
        output = tmp_path / "x.gguf"
        head = converted(models.checkpoint(SMALL), output, "--head-only", "--mtp-f16")
        shared = {"token_embd.weight", "output_norm.weight", "output.weight"}
        assert {*head} == {n for n in plain if n.startswith(HEAD)} | shared
        own = {n: t for n, t in plain.items() if n.startswith(HEAD)}
        assert not differing({n: t for n, t in head.items() if n.startswith(HEAD)}, own)
        assert value_of(output, "qwen35.block_count") == 3
        assert value_of(output, "qwen35.nextn_predict_layers") == 1


class TestMtpFrom:
    @pytest.mark.parametrize(
        ("donor", "options"),
        [(spec, ("--mtp-f16", "--fastmtp", 100)) for spec in (SMALL, NESTED)]
        + [(SMALL, ("--mtp-f16", "--head-only"))],
        ids=["small", "nested", "alone"],
    )
    def test_equals_converting_with_the_head(
        self, donor: Spec, options: tuple[object, ...], models: Models, tmp_path: Path
    ) -> None:
        """Byte by byte, metadata included."""
        whole = named(models, SMALL, tmp_path / "a")
        converted(whole, tmp_path / "whole.gguf", *options)
        bare = named(models, BARE, tmp_path / "b")
        lender = models.checkpoint(donor)
        converted(bare, tmp_path / "lent.gguf", *options, "--mtp-from", lender)
        assert (tmp_path / "lent.gguf").read_bytes() == (tmp_path / "whole.gguf").read_bytes()

    def test_goes_before_the_own_head(self, models: Models, tmp_path: Path) -> None:
        model, other = models.checkpoint(SMALL), models.checkpoint(replace(SMALL, name="o", seed=5))
        own = converted(model, tmp_path / "own.gguf")
        lent = converted(model, tmp_path / "lent.gguf", "--mtp-from", other)
        theirs = converted(other, tmp_path / "theirs.gguf")
        changed = differing(own, lent)
        assert changed
        assert all(name.startswith(HEAD) for name in changed)
        assert not [name for name in differing(lent, theirs) if name.startswith(HEAD)]

    @pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="nothing counts open files")
    def test_closes_all_files(self, models: Models, tmp_path: Path) -> None:
        # not all shards have the head
        donor = models.checkpoint(replace(SMALL, name="pieces", shards=6))
        arguments = [models.checkpoint(BARE), "--mtp-from", donor, "--dry-run"]
        invoke("convert", *arguments)
        before = len(os.listdir("/proc/self/fd"))
        assert invoke("convert", *arguments).exit_code == 0
        broken = models.copy(replace(SMALL, name="wide", hidden=512), tmp_path)
        assert invoke("convert", models.checkpoint(BARE), "--mtp-from", broken).exit_code == 1
        (broken / "model-2.safetensors").write_bytes(b"x")
        assert invoke("convert", models.checkpoint(BARE), "--mtp-from", broken).exit_code == 1
        assert len(os.listdir("/proc/self/fd")) == before


class TestSplit:
    @pytest.fixture
    def shards(self, models: Models, tmp_path: Path) -> list[Path]:
        options = "--mtp-f16", "--split-max-size", "500K"
        succeed("convert", models.checkpoint(SMALL), "-o", tmp_path / "x.gguf", *options)
        return sorted(tmp_path.glob("*"))

    def test_hold_the_same_tensors(self, shards: list[Path], plain: dict[str, Any]) -> None:
        count = len(shards)
        assert count > 3
        assert [p.name for p in shards] == [
            f"x-{i:05}-of-{count:05}.gguf" for i in range(1, count + 1)
        ]
        tensors = [tensors_of(path) for path in shards]
        together = {name: t for part in tensors for name, t in part.items()}
        assert sum(map(len, tensors)) == len(plain)
        assert not differing(together, plain)
        assert [*together] == [*plain]
        sizes = [[int(t.n_bytes) for t in part.values()] for part in tensors]
        assert all(sum(part) <= 500_000 or len(part) == 1 for part in sizes)
        assert all(sum(part) + after[0] > 500_000 for part, after in pairwise(sizes))

    def test_have_upstreams_keys(self, shards: list[Path], plain: dict[str, Any]) -> None:
        for index, path in enumerate(shards):
            assert value_of(path, "split.no") == index
            assert value_of(path, "split.count") == len(shards)
            assert value_of(path, "split.tensors.count") == len(plain)
            assert (value_of(path, "general.architecture") == "qwen35") == (index == 0)

    def test_load_in_llama_cpp(self, shards: list[Path]) -> None:
        assert loads(shards[0])
        shards[1].unlink()
        assert not loads(shards[0])

    def test_of_a_model_that_fits_is_one_file(
        self, models: Models, tmp_path: Path, plain: dict[str, Any]
    ) -> None:
        options = "--mtp-f16", "--split-max-size", "1G"
        whole = converted(models.checkpoint(SMALL), tmp_path / "x.gguf", *options)
        assert not differing(whole, plain)
        assert value_of(tmp_path / "x.gguf", "split.count") is None

    def test_summary_names_all(self, models: Models, tmp_path: Path) -> None:
        options = "--split-max-size", "1M", "-o", tmp_path / "x.gguf"
        result = invoke("convert", models.checkpoint(SMALL), *options)
        paths = sorted(tmp_path.glob("*"))
        assert all(f"{path}: " in result.stdout for path in paths)
        assert f"next: mtp-gguf list-tensors {paths[0]} --mtp" in result.stdout


class TestDryRun:
    OPTIONS = (
        ("--mtp-f16", "--fastmtp", "100", "--fastmtp-layout", "table"),
        ("--quant", "F16", "--split-max-size", "400K"),
        ("--head-only", "--quant", "Q6_K"),
        ("--no-mtp", "--quant", "Q8_0"),
    )

    @pytest.mark.sample(4)
    @pytest.mark.parametrize("options", OPTIONS, ids=" ".join)
    @pytest.mark.parametrize("spec", [SMALL, MIXTURE, NESTED], ids=lambda spec: spec.name)
    def test_is_what_gets_written(
        self, spec: Spec, options: tuple[str, ...], models: Models, tmp_path: Path
    ) -> None:
        arguments = ["convert", models.checkpoint(spec), "-o", tmp_path / "x.gguf", *options]
        plan = invoke(*arguments, "--dry-run", "--json")
        assert plan.exit_code == 0, plan.output
        assert not held(tmp_path)
        planned = json.loads(plan.stdout)
        written = json.loads(invoke(*arguments, "--json").stdout)
        assert written.pop("seconds") > 0
        assert written.pop("peak_bytes") > 1 << 20
        assert written.pop("cpu_seconds") > 0
        assert written.pop("cores") == usable_cores()
        assert 0 < written.pop("utilisation") <= 1.05  # two clocks are read, one after the other
        assert written.pop("warnings") == []
        assert written.pop("acceptance") == {}  # not measured
        assert written == planned
        assert [f["path"] for f in planned["files"]] == [str(p) for p in sorted(tmp_path.glob("*"))]
        assert all(Path(f["path"]).stat().st_size == f["bytes"] for f in planned["files"])
        tensors = {
            name: (t.tensor_type.name, [int(n) for n in t.shape], int(t.n_bytes))
            for file in planned["files"]
            for name, t in tensors_of(Path(file["path"])).items()
        }
        assert tensors == {
            t["name"]: (t["type"], t["shape"], t["bytes"]) for t in planned["tensors"]
        }
        bits = 8 * sum(t["bytes"] for t in planned["tensors"] if t["name"] != "d2t")
        weights = sum(prod(t["shape"]) for t in planned["tensors"] if t["name"] != "d2t")
        assert planned["bits_per_weight"] == pytest.approx(bits / weights)

    def test_text(self, models: Models, tmp_path: Path) -> None:
        options = "--mtp-f16", "--fastmtp", "--dry-run", "-o", tmp_path / "x.gguf"
        text = invoke("convert", models.checkpoint(NESTED), *options).stdout
        plan = json.loads(invoke("convert", models.checkpoint(NESTED), *options, "--json").stdout)
        lines = text.splitlines()
        for line, tensor in zip(lines, plan["tensors"], strict=False):
            source = tensor["sources"][0]
            words = source, tensor["name"], tensor["type"], str(tensor["shape"])
            assert all(word in line for word in words)
        assert re.search(r"^base: 28 tensors, [\d.]+ [kM]B \(.*Q4_K.*\)$", text, re.M)
        assert re.search(r"^head: 15 tensors, [\d.]+ [kM]B \(8 F16, 7 F32\)$", text, re.M)
        assert f"{tmp_path / 'x.gguf'}: " in text
        assert not held(tmp_path)

    def test_does_not_mind_an_existing_output(self, models: Models, tmp_path: Path) -> None:
        (tmp_path / "x.gguf").write_text("precious")
        options = "-o", tmp_path / "x.gguf", "--dry-run"
        assert invoke("convert", models.checkpoint(SMALL), *options).exit_code == 0
        assert (tmp_path / "x.gguf").read_text() == "precious"


class TestSameBytes:
    @pytest.mark.parametrize("quant", ["Q4_K_M", "F16"])
    def test_with_any_number_of_threads(self, quant: str, models: Models, tmp_path: Path) -> None:
        files = []
        for threads in (1, 2, 16, 512):
            output = tmp_path / f"{threads}.gguf"
            converted(models.checkpoint(SMALL), output, "--quant", quant, "--threads", threads)
            files.append(output.read_bytes())
        assert files.count(files[0]) == len(files)


class TestName:
    def written(self, folder: Path, monkeypatch: pytest.MonkeyPatch, *options: object) -> list[str]:
        monkeypatch.chdir(folder)
        succeed("convert", *options)
        return sorted(held(folder))

    def test_a_bare_file_name_follows_the_naming_convention(
        self, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = named(models, SMALL, tmp_path / "a", "Tiny-3.5-2M-Instruct")
        here = tmp_path / "here"
        here.mkdir()
        names = self.written(here, monkeypatch, model)
        assert names == ["Tiny-3.5-2M-Instruct-Q4_K_M.gguf"]
        names = self.written(here, monkeypatch, model, "--head-only", "--quant", "Q8_0")
        assert names[1] == "mtp-Tiny-3.5-2M-Instruct-Q8_0.gguf"
        assert self.written(tmp_path, monkeypatch, model, "-o", here, "--overwrite")
        assert sorted(held(here)) == names

    def test_in_the_folder_of_the_checkpoint(
        self, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = named(models, TINY, tmp_path / "a")
        before = held(model)
        names = self.written(model, monkeypatch, ".")
        assert len(names) == len(before) + 1
        assert self.written(model, monkeypatch, ".", "--overwrite") == names

    @pytest.mark.parametrize(
        "name", ["../../escape", "/etc/escape", "a/b", "\\0", "...", "-o", "é x", "\\u202e"]
    )
    @pytest.mark.parametrize("key", ["name", "model_name", "basename", "finetune", "version"])
    def test_of_a_model_card_stays_in_the_folder(
        self, key: str, name: str, models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = named(models, TINY, tmp_path / "a")
        (model / "README.md").write_text(f'---\n{key}: "{name}"\n---\n', encoding="utf-8")
        here = tmp_path / "deep" / "er" / "here"
        here.mkdir(parents=True)
        monkeypatch.chdir(here)
        result = invoke("convert", model, "--quant", "F16", "--dry-run", "--json")
        if result.exit_code:  # a card may also be refused
            assert result.stderr.startswith("mtp-gguf: ")
            assert isinstance(result.exception, SystemExit)
            return
        (file,) = json.loads(result.stdout)["files"]
        assert re.fullmatch(r"[\wé][\wé.+-]*\.gguf", file["path"])


class TestReport:
    def test_summary(self, models: Models, tmp_path: Path) -> None:
        output = tmp_path / "it's here.gguf"
        options = "--mtp-f16", "--fastmtp", "100", "--fastmtp-layout", "table", "-o", output
        text = invoke("convert", models.checkpoint(SMALL), *options).stdout
        listed = tensors_of(output)
        size = output.stat().st_size
        head = sum(
            int(t.n_bytes)
            for n, t in listed.items()
            if n.startswith(HEAD) and "shared_head_h" not in n
        )
        assert re.search(rf"^head: 15 tensors, {head / 1e6:.3g} MB \(8 F16, 7 F32\)$", text, re.M)
        assert re.search(r"^base: 28 tensors, [\d.]+ [kM]B \(\d+ Q4_K, .*\)$", text, re.M)
        assert re.search(r"^draft vocabulary: 2 tensors, 52 kB \(1 F16, 1 I64\)$", text, re.M)
        assert "draft vocabulary: 100 tokens, by id (merge rank)\n" in text
        assert f"{output}: {size / 1e6:.3g} MB\n" in text
        bits = 8 * sum(int(t.n_bytes) for n, t in listed.items() if n != "d2t")
        weights = sum(int(t.n_elements) for n, t in listed.items() if n != "d2t")
        assert f"\n{bits / weights:.2f} bits per weight\n" in text
        cores = usable_cores()
        assert re.search(
            rf"^took \d+\.\d s, {cores} cores \d+% busy, peak memory [\d.]+ [MG]B$", text, re.M
        )
        assert "can draft: MTP head in block 2 (" in text
        assert "F16), FastMTP 100 tokens, layout table" in text
        quoted = str(output).replace("'", "'\"'\"'")
        assert text.endswith(f"next: mtp-gguf list-tensors '{quoted}' --mtp\n")

    def test_vision_tower_is_skipped_with_the_way_to_an_mmproj(
        self, models: Models, tmp_path: Path
    ) -> None:
        arguments = ["convert", models.checkpoint(NESTED), "-o", tmp_path / "x.gguf"]
        result = invoke(*arguments)
        assert "note: 8 source tensors skipped: vision tower" in result.stdout
        assert "--mmproj writes it into a file of its own" in result.stdout
        assert not [name for name in tensors_of(tmp_path / "x.gguf") if "visual" in name]
        plan = json.loads(invoke(*arguments, "--dry-run", "--json").stdout)
        assert len(plan["skipped"]) == 8

    @pytest.mark.parametrize(
        ("options", "note"),
        [
            (["--quant", "Q4_K_M", "--mtp-f16"], "not a multiple of 256 and fall back to"),
            (["--quant", "Q8_0", "--mtp-f16"], "not a multiple of 32 and fall back to F16"),
            (["--quant", "F16", "--mtp-type", "Q4_K"], "not a multiple of 256"),
            (["--quant", "F16", "--mtp-type", "Q8_0"], "not a multiple of 32"),
            (["--quant", "F16", "--tensor-type", "ffn_down=Q6_K"], "not a multiple of 256"),
            (["--quant", "BF16", "--mtp-type", "BF16"], ""),
        ],
        ids=str,
    )
    def test_fallback_of_rows_that_no_block_divides(
        self, options: list[str], note: str, models: Models, tmp_path: Path
    ) -> None:
        """dense-ragged has rows of 416 and 192, which 32 divides, and of 144, which it does not."""
        model = models.checkpoint(SPECS["dense-ragged"])
        text = invoke("convert", model, "-o", tmp_path / "x.gguf", *options).stdout
        assert note in text
        if not note:
            assert "fall back" not in text
            return
        block = int(note.split("multiple of ")[1].split(maxsplit=1)[0])
        match = re.search(
            rf"note: (\d+) tensors have rows that are not a multiple of {block} .* to (.*) "
            r"\(first: (\S+), rows of (\d+)\)",
            text,
        )
        assert match is not None
        tensors = tensors_of(tmp_path / "x.gguf")
        first = tensors[match[3]]
        assert int(first.shape[0]) == int(match[4])
        assert int(match[4]) % block
        assert first.tensor_type.name in match[2].split(", ")

    def test_no_fallback_is_claimed_where_all_rows_fit(
        self, models: Models, tmp_path: Path
    ) -> None:
        arguments = ["convert", models.checkpoint(SMALL), "-o", tmp_path / "x.gguf"]
        assert "fall back" not in invoke(*arguments).stdout

    def test_imatrix_without_some_tensors_is_noted(self, models: Models, tmp_path: Path) -> None:
        from support.upstream.imatrix import write_imatrix  # noqa: PLC0415

        imatrix = write_imatrix(tmp_path / "imatrix.gguf", SMALL)
        options = "--imatrix", imatrix, "-o", tmp_path / "x.gguf"
        text = invoke("convert", models.checkpoint(SMALL), *options).stdout
        assert re.search(r"note: the imatrix has nothing for \d+ quantized tensors", text)
        assert value_of(tmp_path / "x.gguf", "quantize.imatrix.file") == "imatrix.gguf"

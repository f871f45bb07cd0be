"""FastMTP draft vocabularies: which ids in which order, and the three layouts byte by byte."""

from __future__ import annotations

import json
import struct
from collections import Counter
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from tokenizers import Tokenizer

from mtp_gguf.convert.heads import draft_vocabulary
from mtp_gguf.gguf_tools.heads.fastmtp import default_size
from mtp_gguf.native.runtime import llama_cpp
from support.checkpoint_edits import edit_json, read_tensors, write_repeating
from support.checkpoints import ADDED_TOKENS, SMALL, TINY, TRAINING_TEXT, token_id
from support.commands import check_refusal, invoke
from support.conversions import converted, refused
from support.gguf_files import differing, loads, value_of
from support.models import Models

IDS_KEY = "mtp_gguf.fastmtp.token_ids"
SHORT_HEAD = "blk.2.nextn.shared_head_head.weight"
TIED = replace(SMALL, name="small-tied", tied=True)
# The added tokens are the last of the vocabulary; they come first in every list.
REQUIRED = [token_id(text) for text, _ in ADDED_TOKENS]


def planned(model: Path, *options: object) -> dict[str, Any]:
    """The plan of a conversion, as --json prints it."""
    result = invoke("convert", model, "--quant", "F16", "--dry-run", "--json", *options)
    assert result.exit_code == 0, result.output
    plan: dict[str, Any] = json.loads(result.stdout)
    return plan


def ids_of(model: Path, output: Path, *options: object) -> list[int]:
    """The list that a conversion stores."""
    converted(model, output, "--quant", "F16", "--overwrite", *options)
    ids: list[int] = value_of(output, IDS_KEY)
    return ids


class TestLayouts:
    def test_ids(self, models: Models, tmp_path: Path) -> None:
        """The list is one array of metadata, and no tensor knows of it."""
        model = models.checkpoint(SMALL)
        plain = converted(model, tmp_path / "plain.gguf")
        listed = converted(model, tmp_path / "listed.gguf", "--fastmtp", 100)
        assert not differing(plain, listed)
        assert [*plain] == [*listed]
        ids = [*REQUIRED, *range(100 - len(REQUIRED))]
        entry = struct.pack(f"<Q26sIIQ{len(ids)}I", 26, IDS_KEY.encode(), 9, 4, len(ids), *ids)
        assert (tmp_path / "listed.gguf").read_bytes().count(entry) == 1

    @pytest.mark.sample(3)
    @pytest.mark.parametrize("kind", ["F16", "BF16", "F32", "Q8_0", "Q4_K"])
    @pytest.mark.parametrize("spec", [SMALL, TIED], ids=lambda spec: spec.name)
    def test_table(self, spec: Any, kind: str, models: Models, tmp_path: Path) -> None:
        """Row r of the short head is row d2t[r] of the output, in the type of the head."""
        model = models.checkpoint(spec)
        options = "--quant", "Q6_K", "--mtp-type", kind
        plain = converted(model, tmp_path / "plain.gguf", *options)
        table = converted(
            model, tmp_path / "table.gguf", *options, "--fastmtp", 64, "--fastmtp-layout", "table"
        )
        assert differing(plain, table) == [SHORT_HEAD, "d2t"]
        ids = [*REQUIRED, *range(64 - len(REQUIRED))]
        assert table["d2t"].tensor_type == GGMLQuantizationType.I64
        assert table["d2t"].data.tobytes() == struct.pack("<64q", *ids)

        name = "output" if spec is SMALL else "token_embd"
        whole = converted(
            model, tmp_path / "whole.gguf", *options, "--tensor-type", f"^{name}={kind}"
        )[f"{name}.weight"]
        short = table[SHORT_HEAD]
        assert short.tensor_type.name == whole.tensor_type.name == kind
        assert [*short.shape] == [256, 64]
        assert short.data.tobytes() == np.ascontiguousarray(whole.data[ids]).tobytes()

    def test_table_against_the_source(self, models: Models, tmp_path: Path) -> None:
        """The same by other code: rows of the checkpoint, quantized by the gguf package."""
        model = models.checkpoint(SMALL)
        options = "--mtp-type", "Q8_0", "--fastmtp", 64, "--fastmtp-layout", "table"
        table = converted(model, tmp_path / "table.gguf", *options)
        rows = read_tensors(model / "model.safetensors")["lm_head.weight"]
        assert rows.dtype == ml_dtypes.bfloat16
        ids = table["d2t"].data
        expected = quantize(rows[ids].astype(np.float32), GGMLQuantizationType.Q8_0)
        assert table[SHORT_HEAD].data.tobytes() == expected.tobytes()

    @pytest.mark.parametrize("spec", [SMALL, TIED], ids=lambda spec: spec.name)
    def test_sidecar(self, spec: Any, models: Models, tmp_path: Path) -> None:
        """A head alone whose output has the rows of d2t and no others."""
        model = models.checkpoint(spec)
        options = "--quant", "F16"
        alone = converted(model, tmp_path / "alone.gguf", *options, "--head-only")
        sidecar = converted(
            model, tmp_path / "side.gguf", *options, "--fastmtp", 64, "--fastmtp-layout", "sidecar"
        )
        assert differing(alone, sidecar) == ["d2t", "output.weight"]
        assert not any(name.startswith(("blk.0.", "blk.1.")) for name in sidecar)
        ids = [*REQUIRED, *range(64 - len(REQUIRED))]
        assert sidecar["d2t"].data.tobytes() == struct.pack("<64q", *ids)
        whole = alone["output.weight" if spec is SMALL else "token_embd.weight"]
        short = sidecar["output.weight"]
        assert [*short.shape] == [256, 64]
        assert short.data.tobytes() == np.ascontiguousarray(whole.data[ids]).tobytes()

    @pytest.mark.parametrize("layout", ["table", "sidecar"])
    def test_says_what_stock_llama_cpp_cannot_load(
        self, layout: str, models: Models, tmp_path: Path
    ) -> None:
        model = models.checkpoint(TINY)
        options = "--quant", "F16", "--fastmtp", "--fastmtp-layout", layout
        result = invoke("convert", model, "-o", tmp_path / "x.gguf", *options)
        assert f"FastMTP 256 tokens, layout {layout}" in result.stdout
        assert "stock llama.cpp cannot load this layout" in result.stdout
        assert not loads(tmp_path / "x.gguf")

    def test_is_listed_as_a_part(self, models: Models) -> None:
        plan = planned(models.checkpoint(TINY), "--fastmtp", "--fastmtp-layout", "table")
        parts = {t["name"]: t["part"] for t in plan["tensors"]}
        own = [name for name, part in parts.items() if part == "draft vocabulary"]
        assert sorted(own) == [SHORT_HEAD, "d2t"]


@pytest.mark.parametrize("quant", ["F16", "Q4_K_M"])
def test_stock_llama_cpp_generates_from_the_ids_layout(
    quant: str, models: Models, tmp_path: Path
) -> None:
    output = tmp_path / "out.gguf"
    converted(models.checkpoint(SMALL), output, "--quant", quant, "--mtp-f16", "--fastmtp")
    llama = llama_cpp.Llama(str(output), n_ctx=64, n_threads=2, verbose=False)
    try:
        texts: list[Any] = [llama("The draft head", max_tokens=8, temperature=0) for _ in range(2)]
    finally:
        llama.close()
    first, again = (text["choices"][0]["text"] for text in texts)
    assert texts[0]["usage"]["completion_tokens"] == 8
    assert first == again


class TestSize:
    def test_default_of_a_small_vocabulary(self, models: Models) -> None:
        """A quarter of 1024."""
        assert planned(models.checkpoint(TINY), "--fastmtp")["draft_vocabulary"]["size"] == 256

    def test_default_of_a_large_vocabulary(self, tmp_path: Path) -> None:
        model = write_repeating(tmp_path / "wide", replace(TINY, vocab_size=140_000))
        (tmp_path / "corpus.txt").write_text(TRAINING_TEXT, encoding="utf-8")
        draft = planned(model, "--fastmtp-corpus", tmp_path / "corpus.txt")["draft_vocabulary"]
        assert draft["size"] == 32768
        assert [*draft["coverage"]] == ["8192", "16384", "32768", "65536"]
        smaller = planned(model, "--fastmtp", 5000, "--fastmtp-corpus", tmp_path / "corpus.txt")
        sizes = ["5000", "8192", "16384", "32768", "65536"]
        assert [*smaller["draft_vocabulary"]["coverage"]] == sizes

    def test_default_has_room_for_the_special_tokens(self) -> None:
        assert default_size(1024, 300) == 300
        assert default_size(248_320, 33) == 32768
        assert default_size(131_071, 33) == 32767

    @pytest.mark.parametrize("size", [26, 27, 1000, 1023])
    def test_given(self, size: int, models: Models, tmp_path: Path) -> None:
        ids = ids_of(models.checkpoint(TINY), tmp_path / "x.gguf", "--fastmtp", size)
        assert len(ids) == size
        assert len({*ids}) == size
        assert 0 <= min(ids) <= max(ids) < 1024

    @pytest.mark.parametrize("size", [1, 25, 1024, 10**12])
    def test_out_of_range(self, size: int, models: Models, tmp_path: Path) -> None:
        (tmp_path / "text").write_text("text")
        for more in ([], ["--fastmtp-corpus", tmp_path / "text"]):
            arguments = [models.checkpoint(TINY), "-o", tmp_path / "x.gguf", *more]
            words = "--fastmtp", "from 26 (the special tokens) to 1023", f"found {size}"
            refused([*arguments, "--fastmtp", size], *words, output=tmp_path)


class TestArguments:
    """`--fastmtp` may stand bare, before or after the model; `--fastmtp-corpus` takes several."""

    @pytest.fixture
    def corpora(self, tmp_path: Path) -> list[Path]:
        paths = [tmp_path / name for name in ("a.txt", "b.txt", "c.txt")]
        for path, text in zip(paths, ("aaa the", "bbb the", "ccc the"), strict=True):
            path.write_text(text)
        return paths

    def arguments(self, text: str, model: Path, corpora: list[Path]) -> list[object]:
        known: dict[str, object] = dict(zip("abc", corpora, strict=True))
        return [known.get(word, model if word == "MODEL" else word) for word in text.split()]

    @pytest.mark.parametrize(
        ("text", "size", "files"),
        [
            ("MODEL --fastmtp", 256, 0),
            ("--fastmtp MODEL", 256, 0),
            ("MODEL --fastmtp 300", 300, 0),
            ("--fastmtp 300 MODEL", 300, 0),
            ("--fastmtp=300 MODEL", 300, 0),
            ("--fastmtp --head-only MODEL", 256, 0),
            ("MODEL --fastmtp-corpus a", 256, 1),
            ("MODEL --fastmtp-corpus a b c", 256, 3),
            ("--fastmtp-corpus a b c MODEL", 256, 3),
            ("--fastmtp-corpus a b c --fastmtp MODEL", 256, 3),
            ("--fastmtp-corpus a b --fastmtp 300 MODEL", 300, 2),
            ("MODEL --fastmtp --fastmtp-corpus a --fastmtp-corpus b", 256, 2),
            ("--fastmtp-corpus=a MODEL", 256, 1),
        ],
    )
    def test_order(
        self, text: str, size: int, files: int, models: Models, corpora: list[Path]
    ) -> None:
        words = self.arguments(
            text.replace("=a", f"={corpora[0]}"), models.checkpoint(TINY), corpora
        )
        result = invoke("convert", *words, "--quant", "F16", "--dry-run", "--json")
        assert result.exit_code == 0, result.output
        draft = json.loads(result.stdout)["draft_vocabulary"]
        assert draft["size"] == size
        assert (f"of {files} file" in draft["source"]) == bool(files)

    def test_a_short_corpus_is_reported(self, models: Models, tmp_path: Path) -> None:
        """Also of a GGUF; with enough text there is no such note."""
        corpus = tmp_path / "corpus.txt"
        model = models.checkpoint(TINY)
        for source in (model, models.convert(TINY, "--quant", "F16")):
            for text, few in ((TRAINING_TEXT[:200], True), (TRAINING_TEXT * 9, False)):
                corpus.write_text(text, encoding="utf-8")
                found = planned(source, "--quant", "Q8_0", "--fastmtp-corpus", corpus)["notes"]
                said = [n for n in found if "tokens are too few to rank a draft vocabulary" in n]
                assert bool(said) == few

    def test_a_corpus_is_text(self, models: Models, tmp_path: Path) -> None:
        corpus = tmp_path / "paper.pdf"
        corpus.write_bytes(b"%PDF-1.7\n" + bytes(range(256)) * 20)
        result = invoke("convert", models.checkpoint(TINY), "--fastmtp-corpus", corpus, "--dry-run")
        words = f"--fastmtp-corpus: {corpus}: expected text in UTF-8, found binary data"
        check_refusal(result.exit_code, result.stderr, words)

    def test_a_missing_corpus_file_is_not_taken_for_the_model(
        self, models: Models, corpora: list[Path], tmp_path: Path
    ) -> None:
        words = ["--fastmtp-corpus", corpora[0], tmp_path / "missing.txt", models.checkpoint(TINY)]
        refused(words, "unexpected extra argument", output=tmp_path, code=2)


class TestRanking:
    def test_by_id(self, models: Models, tmp_path: Path) -> None:
        model = models.checkpoint(TINY)
        ids = ids_of(model, tmp_path / "x.gguf", "--fastmtp", 200)
        assert ids == [*REQUIRED, *range(200 - len(REQUIRED))]
        assert value_of(tmp_path / "x.gguf", "mtp_gguf.fastmtp.source") == "by id (merge rank)"
        assert value_of(tmp_path / "x.gguf", "mtp_gguf.fastmtp.coverage") is None
        result = invoke("convert", model, "--fastmtp", "--quant", "F16", "--dry-run")
        assert "--fastmtp-corpus FILES" in result.stdout

    @pytest.fixture
    def corpus(self, tmp_path: Path) -> list[Path]:
        """Two texts; the second has Windows line ends, bytes that are no UTF-8, special tokens."""
        paths = [tmp_path / "one.txt", tmp_path / "two.txt"]
        paths[0].write_text(TRAINING_TEXT * 3, encoding="utf-8")
        paths[1].write_bytes(b"the end\r\n\xff\xfe of <|im_end|><think>it\r\n" * 50)
        return paths

    def counted(self, model: Path, corpus: list[Path]) -> Counter[int]:
        """How often each token occurs, counted the plain way."""
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        counts: Counter[int] = Counter()
        for path in corpus:
            text = path.read_text(encoding="utf-8", errors="replace")
            counts.update(tokenizer.encode(text, add_special_tokens=False).ids)
        return counts

    def test_by_corpus(self, models: Models, corpus: list[Path], tmp_path: Path) -> None:
        model = models.checkpoint(TINY)
        options = "--fastmtp", 300, "--fastmtp-corpus", *corpus
        ids = ids_of(model, tmp_path / "x.gguf", *options)
        counts = self.counted(model, corpus)
        by_count = sorted(range(1024), key=lambda i: (-counts[i], i))
        expected = [*REQUIRED, *(i for i in by_count if i not in REQUIRED)][:300]
        assert ids == expected
        share = sum(counts[i] for i in ids) / counts.total()
        stored = value_of(tmp_path / "x.gguf", "mtp_gguf.fastmtp.coverage")
        assert stored == pytest.approx(share, rel=1e-6)
        source = value_of(tmp_path / "x.gguf", "mtp_gguf.fastmtp.source")
        assert source == f"counted on {counts.total()} tokens of 2 files"

    def test_coverage_by_size(
        self, models: Models, corpus: list[Path], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(draft_vocabulary, "COVERAGE_SIZES", (32, 64, 128, 512, 2048))
        model = models.checkpoint(TINY)
        options = "--fastmtp", 300, "--fastmtp-corpus", *corpus
        coverage = planned(model, *options)["draft_vocabulary"]["coverage"]
        counts = self.counted(model, corpus)
        by_count = sorted(range(1024), key=lambda i: (-counts[i], i))
        ranked = [*REQUIRED, *(i for i in by_count if i not in REQUIRED)]
        expected = {
            str(n): sum(counts[i] for i in ranked[:n]) / counts.total()
            for n in (32, 64, 128, 300, 512)
        }
        assert coverage == pytest.approx(expected)
        assert all(a < b for a, b in pairwise(coverage.values()))
        text = invoke("convert", model, *options, "--quant", "F16", "--dry-run").stdout
        shares = ", ".join(f"{n}: {share:.1%}" for n, share in expected.items())
        assert f"coverage of the corpus by size: {shares}" in text

    def test_a_corpus_longer_than_what_is_tokenized_at_once(
        self, models: Models, corpus: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Pieces end with lines, so that counts stay the same where no blank line is cut."""
        (tmp_path / "flat.txt").write_text(TRAINING_TEXT.replace("\n\n", "\n"), encoding="utf-8")
        model = models.checkpoint(TINY)
        options = "--fastmtp", 300, "--fastmtp-corpus", tmp_path / "flat.txt"
        whole = ids_of(model, tmp_path / "x.gguf", *options)
        monkeypatch.setattr(draft_vocabulary, "_CORPUS_CHUNK", 100)
        assert ids_of(model, tmp_path / "x.gguf", *options) == whole

    @pytest.mark.parametrize("by", ["id", "corpus", "list"])
    def test_every_prefix_has_the_special_tokens(
        self, by: str, models: Models, corpus: list[Path], tmp_path: Path
    ) -> None:
        model = models.copy(TINY, tmp_path)
        end = 7  # an end of turn that is no added token
        edit_json(model / "generation_config.json", lambda c: c.update(eos_token_id=[end, 995]))
        (tmp_path / "ids.txt").write_text("500 501 502 996 503")
        options: dict[str, list[object]] = {
            "id": ["--fastmtp", 100],
            "corpus": ["--fastmtp", 100, "--fastmtp-corpus", *corpus],
            "list": ["--fastmtp-ids", tmp_path / "ids.txt"],
        }
        ids = ids_of(model, tmp_path / "x.gguf", *options[by])
        needed = {*REQUIRED, end, 995}
        assert {*ids[: len(needed)]} == needed
        for text in ("<|im_end|>", "<think>", "</think>", "<tool_call>", "</tool_call>"):
            assert token_id(text) in ids[: len(needed)]

    def test_end_of_turn_of_a_nested_config(self, models: Models, tmp_path: Path) -> None:
        model = models.copy(replace(TINY, name="nested", nested=True), tmp_path)
        edit_json(model / "config.json", lambda c: c["text_config"].update(eos_token_id=7))
        ids = ids_of(model, tmp_path / "x.gguf", "--fastmtp", 100)
        assert ids[0] == 7


def refuse(
    option: str, path: Path, models: Models, *words: str, options: tuple[object, ...] = ()
) -> None:
    """A conversion that is given this file must fail, and name the option and the file."""
    folder = path.parent / "output"
    folder.mkdir(exist_ok=True)
    arguments = [models.checkpoint(TINY), "-o", folder / "x.gguf", option, path, *options]
    refused(arguments, option, path.name, *words, output=folder)


NPY = b"\x93NUMPY\x01\x00\x46\x00{'descr': '<i8', 'fortran_order': False, 'shape': ("


class TestIdsFile:
    GIVEN = (500, 3, 501, 996, 0, 1023)

    def write(self, path: Path, ids: Any) -> Path:
        if path.suffix == ".npy":
            np.save(path, ids)
        elif path.suffix == ".json":
            path.write_text(json.dumps(ids))
        else:
            path.write_text("\n".join(map(str, ids)))
        return path

    @pytest.mark.parametrize("name", ["ids.json", "ids.npy", "ids.txt", "ids"])
    def test_is_taken_as_it_stands(self, name: str, models: Models, tmp_path: Path) -> None:
        path = self.write(tmp_path / name, self.GIVEN)
        ids = ids_of(models.checkpoint(TINY), tmp_path / "x.gguf", "--fastmtp-ids", path)
        assert ids == [*REQUIRED, *(i for i in self.GIVEN if i not in REQUIRED)]
        assert value_of(tmp_path / "x.gguf", "mtp_gguf.fastmtp.source") == f"from {name}"

    @pytest.mark.parametrize("dtype", [np.int32, np.uint16, np.uint64, ">i8"])
    def test_npy_of_any_whole_type(self, dtype: Any, models: Models, tmp_path: Path) -> None:
        path = self.write(tmp_path / "ids.npy", np.array(self.GIVEN, dtype))
        ids = ids_of(models.checkpoint(TINY), tmp_path / "x.gguf", "--fastmtp-ids", path)
        assert ids[len(REQUIRED) :] == [i for i in self.GIVEN if i not in REQUIRED]

    def test_cut_to_the_size_asked_for(self, models: Models, tmp_path: Path) -> None:
        path = self.write(tmp_path / "ids.txt", [*range(100, 200)])
        options = "--fastmtp-ids", path, "--fastmtp", 60
        ids = ids_of(models.checkpoint(TINY), tmp_path / "x.gguf", *options)
        assert ids == [*REQUIRED, *range(100, 100 + 60 - len(REQUIRED))]

    def test_shorter_than_asked(self, models: Models, tmp_path: Path) -> None:
        path = self.write(tmp_path / "ids.txt", [1, 2, 3])
        options = ("--fastmtp", 60)
        refuse("--fastmtp-ids", path, models, "expected 60 ids", "found 29", options=options)

    @pytest.mark.parametrize(
        ("ids", "said"),
        [
            ([1, 1024], "0 to 1023 … found 1024"),
            ([1, -1], "0 to 1023 … found -1"),
            ([1, 10**30], "whole numbers"),
            ([1, 2, 3, 2, 2], "each id once … found 2 3 times"),
            ([], "found none"),
            (np.array([1, 1024]), "0 to 1023 … found 1024"),
            (np.array([-1]), "0 to 1023 … found -1"),
            (np.array([(1 << 64) - 1], np.uint64), f"0 to 1023 … found {(1 << 63) - 1}"),
            (np.array([5, 5]), "each id once"),
            (np.array([], np.int64), "found none"),
            (np.array([1.0, 2.0]), "whole numbers … float64"),
            (np.array([[1, 2]]), "whole numbers … 2 dimensions"),
            (np.array(3), "whole numbers … 0 dimensions"),
            (np.array(["1"]), "whole numbers … <U1"),
            (np.array([True]), "whole numbers … bool"),
            (np.array([{"a": 1}], object), "whole numbers … Object arrays cannot be loaded"),
        ],
        ids=str,
    )
    def test_invalid_ids(self, ids: Any, said: str, models: Models, tmp_path: Path) -> None:
        for name in ("ids.json", "ids.txt") if isinstance(ids, list) else ("ids.npy",):
            path = self.write(tmp_path / name, ids)
            refuse("--fastmtp-ids", path, models, *said.split(" … "))

    @pytest.mark.parametrize(
        ("name", "data"),
        [
            ("ids.npy", b""),
            ("ids.npy", b"\x93NUMPY"),
            ("ids.npy", b"PK\x03\x04"),
            ("ids.npy", b"cos\nsystem\n(S'false'\ntR."),  # a pickle that would run a command
            ("ids.npy", NPY + b"1000,)}" + b" " * 9 + b"\n"),
            ("ids.npy", NPY + b"9**17,)" + b"}" * 10),
            *(
                ("ids.txt", text.encode("latin-1"))
                for text in (
                    *("1 2 x", "1.5", "[1, 2.0]", '["a"]', "[true]", "[null]", "[1,", "{}"),
                    *("\xff", "[" * 10**5),
                )
            ),
        ],
        ids=lambda value: str(value)[:9],
    )
    def test_not_numbers(self, name: str, data: bytes, models: Models, tmp_path: Path) -> None:
        (tmp_path / name).write_bytes(data)
        refuse("--fastmtp-ids", tmp_path / name, models, "expected whole numbers")


@pytest.mark.parametrize("option", ["--fastmtp-ids", "--fastmtp-corpus"])
def test_files_that_cannot_be_read(option: str, models: Models, tmp_path: Path) -> None:
    refuse(option, tmp_path / "none.txt", models, "cannot be read", "No such file")
    (tmp_path / "folder").mkdir()
    refuse(option, tmp_path / "folder", models, "cannot be read", "directory")


def test_an_empty_corpus(models: Models, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    refuse("--fastmtp-corpus", tmp_path / "empty.txt", models, "no text in")

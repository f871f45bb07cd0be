"""Draft vocabularies of finished files equal those of conversions; in-place changes are safe."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.files.format import ArrayRef, Value, ValueType, open_gguf
from mtp_gguf.gguf_tools.heads.fastmtp import DraftLayout, StoredDraftVocabulary, draft_in_use
from support.checkpoints import DENSE, MOE, SPECS, Spec
from support.commands import held, refused, succeed
from support.gguf_files import edited, greedy_text, tensors_of, value_of
from support.models import Models

UNIFORM = ("--quant", "Q8_0")
IDS = "mtp_gguf.fastmtp.token_ids"
TEXT = "def is_prime(n: int) -> bool:\n    return all(n % i for i in range(2, n))  # naïve\n"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    path = tmp_path / "corpus.txt"
    path.write_text(TEXT * 40 + "<|im_start|>user 新しい<|im_end|>\n" * 10, encoding="utf-8")
    return path


@pytest.mark.parametrize("spec", [DENSE, MOE, SPECS["dense-tied"]], ids=str)
@pytest.mark.parametrize("ranking", ["id", "corpus", "list"])
def test_add_equals_converting(
    spec: Spec, ranking: str, models: Models, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "ids.txt").write_text("\n".join(map(str, range(90, 400, 3))))
    theirs: tuple[object, ...] = {
        "id": ("--fastmtp", 200),
        "corpus": ("--fastmtp", 200, "--fastmtp-corpus", corpus, corpus),
        "list": ("--fastmtp-ids", tmp_path / "ids.txt"),
    }[ranking]
    ours: tuple[object, ...] = {
        "id": ("-n", 200),
        "corpus": ("-n", 200, "--corpus", corpus, corpus),
        "list": ("--ids", tmp_path / "ids.txt"),
    }[ranking]
    whole, made = tmp_path / "whole.gguf", tmp_path / "made.gguf"
    succeed("convert", models.checkpoint(spec), "-o", whole, *theirs)
    succeed("fastmtp", "add", models.convert(spec), *ours, "-o", made)
    assert made.read_bytes() == whole.read_bytes()
    succeed("fastmtp", "remove", made, "-o", tmp_path / "plain.gguf")
    assert (tmp_path / "plain.gguf").read_bytes() == models.convert(spec).read_bytes()


@pytest.mark.sample(2)
@pytest.mark.parametrize("layout", ["table", "sidecar"])
@pytest.mark.parametrize("spec", [SPECS["dense-untied"], MOE, SPECS["dense-tied"]], ids=str)
def test_layouts_with_rows_equal_converting(
    layout: str, spec: Spec, models: Models, tmp_path: Path
) -> None:
    """If head and output have one type, copied rows equal rows quantized from the source."""
    options = ("--fastmtp", "200", "--fastmtp-layout", layout)
    whole = models.convert(spec, *UNIFORM, *options)
    made, plain = tmp_path / "made.gguf", models.convert(spec, *UNIFORM)
    succeed("fastmtp", "add", plain, "-n", 200, "--layout", layout, "-o", made)
    assert made.read_bytes() == whole.read_bytes()
    # From a head alone, too, and in place of another list.
    head = models.convert(spec, *UNIFORM, "--head-only", "--fastmtp", "100")
    if layout == "sidecar":
        arguments = (head, "-n", 200, "--layout", layout, "-o", made, "--overwrite")
        succeed("fastmtp", "add", *arguments)
        assert made.read_bytes() == whole.read_bytes()
        refused(tmp_path, "fastmtp", "add", whole, words=("200 rows of its draft vocabulary",))
        refused(tmp_path, "fastmtp", "remove", whole, words=("200 rows of its draft vocabulary",))
    else:
        succeed("fastmtp", "remove", whole, "-o", made, "--overwrite")
        assert made.read_bytes() == models.convert(spec, *UNIFORM).read_bytes()
        succeed("fastmtp", "add", whole, "-n", 100, "-o", made, "--overwrite")
        other = models.convert(spec, *UNIFORM, "--fastmtp", "100")
        assert made.read_bytes() == other.read_bytes()


def test_show(models: Models, corpus: Path, tmp_path: Path) -> None:
    made = tmp_path / "made.gguf"
    added = succeed("fastmtp", "add", models.convert(DENSE), "--corpus", corpus, "-o", made)
    assert "coverage of the corpus by size: 256: " in added
    shown = succeed("fastmtp", "show", made)
    assert "256 tokens, layout ids, counted on" in shown
    assert "first others:" in shown
    assert "fault" not in shown
    fields = json.loads(succeed("fastmtp", "show", made, "--json"))
    assert fields["ids"] == list(value_of(made, IDS))
    assert fields["faults"] == []
    listed = [int(line) for line in succeed("fastmtp", "show", made, "--ids").split()]
    assert listed == fields["ids"]
    table = models.convert(DENSE, *UNIFORM, "--fastmtp", "200", "--fastmtp-layout", "table")
    stored = json.loads(succeed("fastmtp", "show", table, "--json"))
    assert stored["layout"] == "table"
    assert stored["ids"] == tensors_of(table)["d2t"].data.tolist()
    refused(tmp_path, "fastmtp", "show", models.convert(DENSE), words=("has no draft vocabulary",))


def test_faults_are_named(models: Models, tmp_path: Path) -> None:
    """As by the doctor, whose tests have each fault."""

    ids = {IDS: Value(ValueType.U32, [0, 1, 2, 2, 1, 5, *range(898, 924)])}
    broken = edited(models.convert(DENSE), tmp_path / "broken.gguf", metadata=ids)
    shown = succeed("fastmtp", "show", broken)
    assert "2 of its ids are repetitions, first 1 (2 times)" in shown
    assert "mtp-gguf fastmtp add" in shown


def test_refusals(models: Models, corpus: Path, tmp_path: Path) -> None:
    trunk = models.convert(DENSE, *UNIFORM, "--no-mtp")
    whole = models.convert(DENSE, *UNIFORM)
    (tmp_path / "twice.json").write_text("[1, 2, 1]")
    (tmp_path / "empty.txt").write_text("")
    cases: list[tuple[tuple[object, ...], tuple[str, ...], int]] = [
        (("add", trunk), ("belongs to an MTP head", "mtp-gguf graft"), 1),
        (("remove", trunk), ("has no draft vocabulary",), 1),
        (("remove", whole, "--in-place"), ("has no draft vocabulary",), 1),
        (("add", whole, "-n", 3), ("the special tokens", "found 3"), 1),
        (("add", whole, "-n", 1024), ("below the vocabulary",), 1),
        (("add", whole, "--ids", tmp_path / "twice.json"), ("each id once",), 1),
        (("add", whole, "--corpus", tmp_path / "empty.txt"), ("no text",), 1),
        (("add", whole, "--corpus", tmp_path / "absent"), ("cannot be read",), 1),
        (("add", tmp_path / "absent.gguf"), ("cannot be opened",), 1),
        (("add", whole, "-n", 0), (), 2),
        (("add", whole, "--ids", corpus, "--corpus", corpus), ("contradict",), 2),
        (("add", whole, "--in-place", "-o", tmp_path / "x.gguf"), ("--in-place",), 2),
        (("add", whole, "--in-place", "--layout", "table"), ("--in-place",), 2),
    ]
    for arguments, words, code in cases:
        refused(tmp_path, "fastmtp", *arguments, words=words, code=code)


def copied(source: Path, target: Path) -> Path:
    target.write_bytes(source.read_bytes())
    return target


def test_a_list_of_the_same_length_is_changed_in_place(
    models: Models, corpus: Path, tmp_path: Path
) -> None:
    (tmp_path / "other.txt").write_text("x = 1\n" * 100)
    first, second = tmp_path / "first.gguf", tmp_path / "second.gguf"
    succeed("fastmtp", "add", models.convert(DENSE), "--corpus", corpus, "-o", first)
    succeed(
        "fastmtp", "add", models.convert(DENSE), "--corpus", tmp_path / "other.txt", "-o", second
    )
    made = copied(first, tmp_path / "made.gguf")
    inode, size = made.stat().st_ino, made.stat().st_size
    output = succeed("fastmtp", "add", made, "--corpus", tmp_path / "other.txt", "--in-place")
    assert "changed in place" in output
    assert (made.stat().st_ino, made.stat().st_size) == (inode, size)
    assert list(value_of(made, IDS)) == list(value_of(second, IDS))
    coverage = "mtp_gguf.fastmtp.coverage"
    assert value_of(made, coverage) == value_of(second, coverage)
    # Text on the source has the room of the old one: padded, or cut.
    source = "mtp_gguf.fastmtp.source"
    assert value_of(made, source).rstrip() in value_of(second, source)
    assert len(value_of(made, source)) == len(value_of(first, source))

    succeed("fastmtp", "remove", made, "--in-place")
    assert made.stat().st_ino == inode
    assert "full vocabulary" in succeed("list-tensors", made)
    assert value_of(made, IDS) is None
    succeed("fastmtp", "add", made, "--corpus", corpus, "--in-place")
    assert made.stat().st_ino == inode
    assert list(value_of(made, IDS)) == list(value_of(first, IDS))
    # Whatever the road, a new file has no trace of what was hidden.
    succeed("fastmtp", "remove", made, "--in-place")
    succeed("fastmtp", "add", made, "--corpus", corpus, "-o", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == first.read_bytes()


@pytest.mark.parametrize("size", [64, 300])
def test_a_list_of_another_length_makes_a_new_file_in_its_place(
    size: int, models: Models, tmp_path: Path
) -> None:
    made = copied(models.convert(DENSE, "--fastmtp", "256"), tmp_path / "made.gguf")
    made.chmod(0o640)
    inode = made.stat().st_ino
    output = succeed("fastmtp", "add", made, "-n", size, "--in-place")
    assert f"written anew: its list has 256 ids, the new one {size}" in output
    assert made.read_bytes() == models.convert(DENSE, "--fastmtp", str(size)).read_bytes()
    assert made.stat().st_ino != inode
    assert made.stat().st_mode & 0o777 == 0o640
    assert [p.name for p in tmp_path.iterdir()] == ["made.gguf"]


def test_only_the_first_shard_is_touched(models: Models, tmp_path: Path) -> None:
    first = models.convert(DENSE, "--split-max-size", "1M")
    for shard in first.parent.iterdir():
        copied(shard, tmp_path / shard.name)
    before = held(tmp_path)
    succeed("fastmtp", "add", tmp_path / first.name, "-n", 100, "--in-place")
    after = held(tmp_path)
    assert [name for name in after if after[name] != before[name]] == [first.name]
    shards = models.convert(DENSE, "--split-max-size", "1M", "--fastmtp", "100")
    assert after[first.name] == shards.read_bytes()


def test_links_are_left_alone(models: Models, tmp_path: Path) -> None:
    made = copied(models.convert(DENSE, "--fastmtp", "256"), tmp_path / "made.gguf")
    (tmp_path / "link.gguf").symlink_to(made)
    refused(
        tmp_path, "fastmtp", "add", tmp_path / "link.gguf", "--in-place", words=("found a link",)
    )
    (tmp_path / "link.gguf").unlink()
    (tmp_path / "hard.gguf").hardlink_to(made)
    before = made.read_bytes()
    output = succeed("fastmtp", "remove", tmp_path / "hard.gguf", "--in-place")
    assert "shared with another name" in output
    assert made.read_bytes() == before


def test_tables_are_not_changed_in_place(models: Models, tmp_path: Path) -> None:
    table = models.convert(DENSE, *UNIFORM, "--fastmtp", "200", "--fastmtp-layout", "table")
    made = copied(table, tmp_path / "made.gguf")
    for command in ("add", "remove"):
        refused(tmp_path, "fastmtp", command, made, "--in-place", words=("layout table",))


class PowerCut(BaseException):
    """Nothing runs after it."""


@pytest.mark.parametrize("command", ["add", "remove", "restore"])
def test_a_power_cut_at_any_write_leaves_a_readable_file(
    command: str, models: Models, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off every write after none, some or all of its bytes: an old list, none, or the new.

    Some: as far as into the list itself, if the write reaches it.
    """
    old, new = tmp_path / "old.gguf", tmp_path / "new.gguf"
    (tmp_path / "other.txt").write_text("x = 1\n" * 100)
    succeed("fastmtp", "add", models.convert(DENSE), "--corpus", corpus, "-o", old)
    succeed("fastmtp", "add", models.convert(DENSE), "--corpus", tmp_path / "other.txt", "-o", new)
    lists = [list(value_of(path, IDS)) for path in (old, new)]
    with open_gguf(old) as file:
        ref = file.keys[IDS]
        assert isinstance(ref, ArrayRef)
        inside = ref.offset + ref.length // 2 + 1
    if command == "restore":
        succeed("fastmtp", "remove", old, "--in-place")
    arguments: tuple[object, ...] = ("add", "--corpus", tmp_path / "other.txt")
    if command == "remove":
        arguments = ("remove",)
    write = os.pwrite
    seen = set()
    for stop in range(10):
        for written in (0, inside, 1 << 30):
            made = copied(old, tmp_path / "made.gguf")
            monkeypatch.setattr(os, "pwrite", cutting(write, stop, written))
            try:
                succeed("fastmtp", arguments[0], made, *arguments[1:], "--in-place")
                finished = True
            except PowerCut:
                finished = False
            finally:
                monkeypatch.setattr(os, "pwrite", write)
            with open_gguf(made) as file:
                found = file.array(IDS) if IDS in file.keys else None
            assert found in (*lists, None)
            assert made.read_bytes()[-1000:] == old.read_bytes()[-1000:]
            seen.add(("finished" if finished else "cut", None if found is None else tuple(found)))
        if finished:
            break
    assert finished
    expected = {None} if command == "remove" else {tuple(lists[1])}
    assert {ids for state, ids in seen if state == "finished"} == expected
    assert ("cut", None) in seen


def cutting(write: Callable[..., int], stop: int, written: int) -> Callable[..., int]:
    calls = 0

    def cut(fd: int, data: bytes, offset: int) -> int:
        nonlocal calls
        calls += 1
        if calls <= stop:
            return write(fd, data, offset)
        write(fd, bytes(data)[:written], offset)
        raise PowerCut

    return cut


def test_llama_cpp_writes_the_same_text(models: Models, tmp_path: Path) -> None:
    """With a list, and with one that is hidden."""
    made = copied(models.convert(DENSE, "--fastmtp", "256"), tmp_path / "made.gguf")
    text = greedy_text(models.convert(DENSE))
    assert greedy_text(made) == text
    succeed("fastmtp", "remove", made, "--in-place")
    assert greedy_text(made) == text


def test_a_tokenizer_of_another_size(models: Models, corpus: Path, tmp_path: Path) -> None:
    keys = {"tokens": ValueType.STRING, "token_type": ValueType.I32}
    names = {f"tokenizer.ggml.{key}": kind for key, kind in keys.items()}
    whole = models.convert(DENSE)
    shorter = {name: Value(kind, value_of(whole, name)[:1000]) for name, kind in names.items()}
    broken = edited(whole, tmp_path / "b.gguf", metadata=shorter)
    words = ("its tokenizer has 1000 tokens, its embedding 1024 rows",)
    target = tmp_path / "x.gguf"
    refused(tmp_path, "fastmtp", "add", broken, "--corpus", corpus, "-o", target, words=words)


def test_sizes_to_compare_with_what_is_drafted_over() -> None:
    """The whole vocabulary, if its rows are there, and more than a list that is made."""
    made = draft_in_use(None, 248_320)
    assert made
    assert (made.size, made.other_sizes) == (32_768, [65_536, 16_384, 8_192, -1])
    for layout, whole in ((DraftLayout.IDS, [-1]), (DraftLayout.TABLE, [])):
        stored = draft_in_use(StoredDraftVocabulary(layout, 1000, None, None), 248_320)
        assert stored
        assert (stored.size, stored.other_sizes) == (1000, [500, 250, *whole])
    assert draft_in_use(None, 32767) is None
    small = draft_in_use(None, 32768)
    assert small is not None
    assert (small.size, small.ring) == (8192, 2048 + 3072)

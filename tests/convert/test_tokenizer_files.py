"""Tokenizer files: settings left over from training, older files, roles of tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from support import checkpoint_edits
from support.checkpoint_edits import edit_json
from support.checkpoints import TINY
from support.conversions import converted, refuse
from support.gguf_files import loads, value_of
from support.models import Models

TOKENS = "tokenizer.ggml.tokens"
END = "<|endoftext|>"


def section(path: Path) -> dict[str, Any]:
    """The tokenizer's keys of a GGUF file."""
    from gguf import GGUFReader  # noqa: PLC0415

    fields = GGUFReader(path).fields
    return {key: f.contents() for key, f in fields.items() if key.startswith("tokenizer.")}


def add_tokens(folder: Path, *texts: str, **flags: bool) -> None:
    edit_json(
        folder / "tokenizer.json",
        lambda tokenizer: checkpoint_edits.add_tokens(tokenizer, *texts, **flags),
    )


class TestWhatTrainingLeft:
    """tokenizer.json keeps the settings of the last call; they are none of the vocabulary's."""

    @pytest.mark.sample(2)
    @pytest.mark.parametrize("setting", ["padding", "truncation", "both", "dropout"])
    def test_is_off(self, setting: str, models: Models, broken: Path) -> None:
        plain = models.checkpoint(TINY)
        path = str(broken / "tokenizer.json")
        tokenizer = Tokenizer.from_file(path)
        if setting in ("padding", "both"):
            end = tokenizer.token_to_id(END)
            tokenizer.enable_padding(length=64, pad_id=end, pad_token=END)
        if setting in ("truncation", "both"):
            tokenizer.enable_truncation(2)
        if setting == "dropout":
            tokenizer.model.dropout = 0.5
        tokenizer.save(path)
        corpus = broken / "corpus.txt"
        corpus.write_text("The draft head reads the hidden state.\n" * 200, encoding="utf-8")
        options = ("--quant", "F16", "--fastmtp", 200, "--fastmtp-corpus", corpus)
        for folder in (plain, broken):
            converted(folder, broken / f"{folder == plain}.gguf", *options)
        ours, theirs = broken / "False.gguf", broken / "True.gguf"
        assert section(ours) == section(theirs)
        for key in ("token_ids", "source", "coverage"):
            found = [value_of(path, f"mtp_gguf.fastmtp.{key}") for path in (ours, theirs)]
            assert found[0] == found[1] is not None


class TestTextsOfTheirOwn:
    """llama.cpp ends the process where two tokens read the same."""

    def test_a_name_of_an_unused_id(self, broken: Path, output: Path) -> None:
        add_tokens(broken, "[PAD1000]")
        refuse(
            broken,
            output,
            "tokenizer.json",
            "a different text for each token",
            "'[PAD1000]'",
            "922 and 1000",
        )

    def test_two_of_one_id(self, broken: Path, output: Path) -> None:
        def edit(tokenizer: dict[str, Any]) -> None:
            tokenizer["model"]["vocab"]['"'] = tokenizer["model"]["vocab"]["!"]

        edit_json(broken / "tokenizer.json", edit)
        refuse(broken, output, "tokenizer.json: expected one token for each id", "'!' and '\"'")

    def test_a_setting_that_sounds_like_a_token(self, broken: Path) -> None:
        """transformers adds the text of any other key that ends in `_token`."""
        plain = broken / "plain.gguf"
        converted(broken, plain, "--quant", "F16")

        roles = dict.fromkeys(("add_bos_token", "add_eos_token"), "text")
        edit_json(broken / "tokenizer_config.json", lambda settings: settings.update(roles))
        said = broken / "said.gguf"
        converted(broken, said, "--quant", "F16")
        assert value_of(said, TOKENS) == value_of(plain, TOKENS)

    def test_the_decoder_of_the_file_is_not_used(self, broken: Path) -> None:
        plain = broken / "plain.gguf"
        converted(broken, plain, "--quant", "F16")

        decoder = {"type": "Replace", "pattern": {"String": "t"}, "content": ""}
        edit_json(broken / "tokenizer.json", lambda tokenizer: tokenizer.update(decoder=decoder))
        other = broken / "other.gguf"
        converted(broken, other, "--quant", "F16")
        assert value_of(other, TOKENS) == value_of(plain, TOKENS)

    def test_two_that_decode_alike(self, broken: Path, output: Path) -> None:
        add_tokens(broken, "é")  # a symbol of byte-level BPE, which stands for half a character
        converted(broken, output / "one.gguf", "--quant", "F16")
        assert loads(output / "one.gguf")
        add_tokens(broken, "ñ")
        refuse(broken, output, "tokenizer.json", "a different text for each token", "165 and 173")

    def test_two_that_end_early(self, broken: Path, output: Path) -> None:
        add_tokens(broken, "same\0one", "same\0two")
        refuse(broken, output, "tokenizer.json", "a different text for each token", "'same'")


class TestSettings:
    """Refusals; test_saved_by_transformers.py holds roles and added tokens to upstream's."""

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            ({"eos_token": 5}, ("eos_token", "expected a token", "found 5")),
            ({"pad_token": {"text": "x"}}, ("pad_token", "expected a token")),
            ({"extra_special_tokens": 3}, ("extra_special_tokens", "expected a list")),
            ({"added_tokens_decoder": {"x": {}}}, ("added_tokens_decoder", "tokens by id")),
            ({"added_tokens_decoder": {"922": {"content": "a", "lstrip": 1}}}, ("922", "a token")),
            ({"added_tokens_decoder": {"950": "<late>"}}, ("'<late>'", "expected id 922", "950")),
        ],
    )
    def test_invalid_settings(
        self, settings: dict[str, Any], words: tuple[str, ...], broken: Path, output: Path
    ) -> None:
        edit_json(broken / "tokenizer_config.json", lambda c: c.update(settings))
        refuse(broken, output, "tokenizer_config.json", *words)

    @pytest.mark.parametrize("value", [-1, 1 << 40, True, "x", {}])
    def test_invalid_token_ids(self, value: object, broken: Path, output: Path) -> None:
        edit_json(broken / "config.json", lambda c: c.update(bos_token_id=value))
        refuse(broken, output, "config.json", "bos_token_id", "expected an id")


class TestVocabularyAndMerges:
    """vocab.json with merges.txt, the files from before tokenizer.json."""

    @pytest.fixture
    def older(self, broken: Path) -> Path:
        """The tiny checkpoint with the older pair of files, as `save_vocabulary` writes them."""
        tokenizer = Tokenizer.from_file(str(broken / "tokenizer.json"))
        tokenizer.model.save(str(broken))
        (broken / "tokenizer.json").unlink()
        return broken

    def test_are_the_same_tokenizer(self, models: Models, older: Path, output: Path) -> None:
        converted(models.checkpoint(TINY), output / "whole.gguf", "--quant", "F16")
        converted(older, output / "parts.gguf", "--quant", "F16")
        whole, parts = section(output / "whole.gguf"), section(output / "parts.gguf")
        # What a post-processor says is in tokenizer.json alone, roles are in config.json as well.
        for key in ("add_eos_token", "eos_token_id", "padding_token_id"):
            whole.pop(f"tokenizer.ggml.{key}", None)
            parts.pop(f"tokenizer.ggml.{key}", None)
        assert whole == parts
        assert loads(output / "parts.gguf")

    def test_added_tokens_of_older_files(self, models: Models, older: Path, output: Path) -> None:
        def move(settings: dict[str, Any]) -> None:
            added = settings.pop("added_tokens_decoder")
            texts = {token["content"]: int(number) for number, token in added.items()}
            (older / "added_tokens.json").write_text(json.dumps(texts), encoding="utf-8")

        edit_json(older / "tokenizer_config.json", move)
        roles = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<tool_call>"]}
        (older / "special_tokens_map.json").write_text(json.dumps(roles), encoding="utf-8")
        converted(models.checkpoint(TINY), output / "whole.gguf", "--quant", "F16")
        converted(older, output / "parts.gguf", "--quant", "F16")
        whole, parts = output / "whole.gguf", output / "parts.gguf"
        assert value_of(parts, TOKENS) == value_of(whole, TOKENS)
        at = value_of(whole, TOKENS).index("<tool_call>")
        assert value_of(parts, "tokenizer.ggml.token_type")[at] == 3

    def test_merges_of_their_own_file(self, models: Models, broken: Path, output: Path) -> None:
        """tokenizer.json without merges, next to merges.txt."""
        Tokenizer.from_file(str(broken / "tokenizer.json")).model.save(str(broken))
        edit_json(broken / "tokenizer.json", lambda t: t["model"].update(merges=[]))
        converted(models.checkpoint(TINY), output / "whole.gguf", "--quant", "F16")
        converted(broken, output / "parts.gguf", "--quant", "F16")
        assert section(output / "parts.gguf") == section(output / "whole.gguf")

    def test_without_merges(self, older: Path, output: Path) -> None:
        (older / "merges.txt").unlink()
        refuse(older, output, "merges.txt", "expected this file")

    @pytest.mark.parametrize(
        ("file", "text", "words"),
        [
            ("merges.txt", "#version: 0.2\na b\nthe end of it\n", ("line 3", "two tokens")),
            ("merges.txt", "#version: 0.2\nno such\n", ("vocab.json", "its merges")),
            ("vocab.json", '{"a": -1}', ("vocab.json", "'a'", "expected an id")),
            ("vocab.json", '{"a": "b"}', ("vocab.json", "'a'", "expected an id")),
            ("vocab.json", '{"a": true}', ("vocab.json", "'a'", "expected an id")),
            ("vocab.json", "[]", ("vocab.json", "JSON object")),
            ("added_tokens.json", '{"a": null}', ("added_tokens.json", "expected an id")),
        ],
    )
    def test_broken(
        self, file: str, text: str, words: tuple[str, ...], older: Path, output: Path
    ) -> None:
        edit_json(older / "tokenizer_config.json", lambda c: c.pop("added_tokens_decoder"))
        (older / file).write_text(text, encoding="utf-8")
        refuse(older, output, *words)

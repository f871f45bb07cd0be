"""The model card of a release."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from mtp_gguf.convert.plans.general import MODEL_CARD
from mtp_gguf.gguf_tools.heads.acceptance import CORPUS, CORPUS_VERSION, Acceptance
from mtp_gguf.gguf_tools.hub.remote import hub_model
from mtp_gguf.gguf_tools.model import ACCEPTANCE_PREFIX

from .release import Release

_TAGS = ("gguf", "llama.cpp", "mtp", "speculative-decoding")
# What a card says of the model itself, which holds for its GGUFs, too.
_KEPT = ("license", "license_name", "license_link", "language", "pipeline_tag")


def card_of(
    release: Release,
    repository: str,
    measured: Mapping[str, Any] | None = None,
    acceptance: Mapping[str, Any] | None = None,
    chart: str | None = None,
) -> ModelCard:
    """The card of `repository`: base model, licence and tags of the source, files, how to run.

    measured: as in the record; without it the card has no table of quality. acceptance: as in
    the record, by the files' names. chart: the file of its picture, if there is one.
    """
    fields = _source_fields(release.checkpoint.folder)
    copied = {name: fields[name] for name in _KEPT if fields.get(name)}
    tags = fields.get("tags")
    own = [tag for tag in tags if isinstance(tag, str)] if isinstance(tags, list) else []
    hub = hub_model(release.source)
    if hub:
        copied["base_model"] = hub.hub_id
        copied["base_model_relation"] = "quantized"
    data = ModelCardData(**copied, tags=[*dict.fromkeys((*own, *_TAGS))], library_name="gguf")
    text = (
        _text(release, repository) + _quality(measured or {}) + _acceptance(acceptance or {}, chart)
    )
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n{text}")


def _source_fields(folder: Path) -> dict[str, Any]:
    """The metadata of the source's own card; empty without a readable card."""
    path = folder / MODEL_CARD
    if not path.is_file():
        return {}
    try:
        fields: dict[str, Any] = vars(ModelCard.load(path, ignore_metadata_errors=True).data)
    except Exception:  # publishers write anything, and the library raises many types
        return {}
    return fields


def _quality(measured: Mapping[str, Any]) -> str:
    """A section with the measured table; empty without one."""
    if not measured:
        return ""
    heads = measured["heads"]
    rows = "\n".join(
        f"| {name} | {' | '.join(cells)} |" for name, cells in measured["rows"].items()
    )
    return f"""
## Quality

Compared with {measured["reference"]} on {measured["tokens"]} tokens of text, by `mtp-gguf
quality`: the Kullback-Leibler divergence (KLD) of the next token's distribution, how often the most
likely token is the same, perplexity, and the share of drafted tokens that are accepted, by position
in the draft.

| file | {" | ".join(heads)} |
| --- |{" --- |" * len(heads)}
{rows}
"""


def _acceptance(recorded: Mapping[str, Any], chart: str | None) -> str:
    """A section with the acceptance of each file, in a table and a picture; empty without files."""
    if not recorded:
        return ""
    files = {name: Acceptance.of(fields) for name, fields in recorded.items()}
    rows = "\n".join(
        f"| {name} | {found.greedy.text} | {found.sampled.text} | {found.greedy.drafted[0]} |"
        for name, found in files.items()
    )
    picture = (
        f"\n![Greedy acceptance by position, with intervals of 95 %]({chart})\n" if chart else ""
    )
    return f"""
## Acceptance

How often the model accepts what the head drafts, at positions 1 / 2 / 3 / 4 of a draft, on the
corpus {CORPUS} {CORPUS_VERSION} (text in eight languages, code, chat): greedy, and sampled at
temperature 1. A draft after a rejected one is rejected, so each number is the share of all drafts
of four tokens. The files state it in the keys `{ACCEPTANCE_PREFIX}*`, which `mtp-gguf list-tensors
FILE --mtp` shows.

| file | greedy | temperature 1 | drafts |
| --- | --- | --- | --- |
{rows}
{picture}"""


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.1f} MB"


def _text(release: Release, repository: str) -> str:
    hub = hub_model(release.source)
    origin = f"[{hub.hub_id}](https://huggingface.co/{hub.hub_id})" if hub else "a local checkpoint"
    rows = "\n".join(
        f"| {shard.path.name} | {plan.quant} | {_size(shard.layout.size)} |"
        for plan in release.plans
        for shard in plan.shards
    )
    first = release.models[0]
    others = ""
    if release.has_sidecar:
        others += (
            "\nThe mtp- file is the head alone, for a model file without one; llama-server takes "
            "it with `-md`.\n"
        )
    if release.has_tower:
        others += "\nThe mmproj file is the vision tower; llama-server takes it with `--mmproj`.\n"
    return f"""# {repository.rpartition("/")[2]}

GGUF files of {origin}, made with mtp-gguf.

| file | type | size |
| --- | --- | --- |
{rows}

The files include the model's multi-token prediction (MTP) head, which drafts tokens that the model
then verifies: the text is that of the model alone, and is there sooner. Versions of llama.cpp
without MTP ignore the head.
{others}
## Run

```
mtp-gguf serve {repository}:{first.quant}
llama-server -hf {repository}:{first.quant} --spec-type draft-mtp
```
"""

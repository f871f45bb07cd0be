"""Plans for a Hugging Face checkpoint: its family names the tensors, its tokenizer the tokens."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.gguf_tools.fastmtp import OUTPUT_TENSOR, SHORT_HEAD_SUFFIX, DraftLayout
from mtp_gguf.gguf_tools.format import Value, ValueType

from . import draft_vocabulary
from .checkpoint import Checkpoint
from .draft_vocabulary import DraftVocabulary
from .family import find_family
from .general import general_metadata
from .plan import Content, DraftRequest, Plan, Request, imatrix_metadata, plans_of
from .precision import FILE_TYPES
from .recipe import Recipe, Target
from .source_rows import SourceRows
from .tokenizer import special_ids, tokenizer_metadata
from .tokenizer_files import load_tokenizer


def make_plans(checkpoint: Checkpoint, request: Request) -> tuple[Plan, ...]:
    """Decide everything about a conversion; errors of any kind come from here, not later."""
    return plans_of(make_content(checkpoint, request), request)


def make_content(checkpoint: Checkpoint, request: Request) -> Content:
    """What the converted model will hold; CheckpointError when the checkpoint does not allow it."""
    family = find_family(checkpoint.config, checkpoint.folder / "config.json")
    blueprint = family.blueprint(checkpoint, request.head)
    rows = SourceRows(checkpoint)
    for target in blueprint.targets:
        rows.check(target)
    files = load_tokenizer(checkpoint.folder)
    required = special_ids(files, blueprint.n_vocab)
    draft, layout = None, None
    if request.draft:
        if not blueprint.n_mtp:
            raise RequestError("--fastmtp: the draft vocabulary belongs to an MTP head, found none")
        draft = _rank(request.draft, files.tokenizer, required, blueprint.n_vocab)
        layout = request.draft.layout
    targets = blueprint.targets
    id_map = None
    if draft is not None and layout is not None:
        targets, id_map = with_draft_rows(
            targets, blueprint.output, blueprint.n_trunk, draft, layout
        )
    general = general_metadata(
        checkpoint.folder, request.model_name, blueprint.targets, FILE_TYPES[request.quant]
    )
    metadata = {
        "general.architecture": Value(ValueType.STRING, blueprint.architecture),
        **general,
        **blueprint.hparams,
        **imatrix_metadata(request.imatrix),
        **(draft.metadata(layout is DraftLayout.IDS) if draft else {}),
        **tokenizer_metadata(files, blueprint.n_vocab, request.tokenizer_pre),
    }
    return Content(
        metadata=metadata,
        targets=targets,
        id_map=id_map,
        head_blocks=range(blueprint.n_trunk, blueprint.n_trunk + blueprint.n_mtp),
        layout=layout,
        draft=draft,
        skipped=blueprint.skipped,
    )


def with_draft_rows(
    targets: Sequence[Target],
    output: Target,
    n_trunk: int,
    draft: DraftVocabulary,
    layout: DraftLayout,
) -> tuple[tuple[Target, ...], NDArray[np.int64] | None]:
    """The targets, and the ids to write as a tensor, where the layout stores them.

    output: the target whose rows are the vocabulary.
    """
    if layout is DraftLayout.IDS:
        return tuple(targets), None
    table = layout is DraftLayout.TABLE
    name = f"blk.{n_trunk}.{SHORT_HEAD_SUFFIX}" if table else OUTPUT_TENSOR
    short = replace(
        output,
        name=name,
        shape=(output.shape[0], len(draft.ids)),
        recipe=Recipe(output.recipe.sources, row_order=draft.ids),
    )
    return (*(t for t in targets if t.name != name), short), draft.ids


def _rank(
    request: DraftRequest, tokenizer: Tokenizer, required: Sequence[int], n_vocab: int
) -> DraftVocabulary:
    size = request.size or draft_vocabulary.default_size(n_vocab, len(required))
    if request.ids_file:
        return draft_vocabulary.rank_by_list(request.ids_file, required, n_vocab, request.size)
    if request.corpus:
        return draft_vocabulary.rank_by_corpus(request.corpus, tokenizer, required, n_vocab, size)
    return draft_vocabulary.rank_by_id(required, n_vocab, size)

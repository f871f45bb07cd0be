"""The options that choose a draft vocabulary, as the commands on finished files have them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mtp_gguf.gguf_tools.model import Model

if TYPE_CHECKING:
    from mtp_gguf.convert.draft_vocabulary import DraftVocabulary

DEFAULT_SIZE = -1  # stands for --fastmtp without a number, as in `convert`


@dataclass(frozen=True)
class DraftOptions:
    """A draft vocabulary that was asked for: `size` None takes the default."""

    wanted: bool
    size: int | None
    corpus: tuple[Path, ...]
    ids_file: Path | None

    @classmethod
    def parse(
        cls, size: int | None, corpus: Sequence[Path] | None, ids_file: Path | None
    ) -> "DraftOptions":
        """The options as given; a usage error when they contradict each other."""
        if corpus and ids_file:
            raise typer.BadParameter("a list of ids and a corpus contradict each other")
        if size is not None and size < 1 and size != DEFAULT_SIZE:
            raise typer.BadParameter(f"expected a size from 1, found {size}")
        wanted = bool(size is not None or corpus or ids_file)
        return cls(wanted, None if size == DEFAULT_SIZE else size, tuple(corpus or ()), ids_file)

    @property
    def files(self) -> list[Path]:
        """The files that are read, to be held against an output's path."""
        return [*self.corpus, *([self.ids_file] if self.ids_file else [])]

    def ranked_for(self, model: Model) -> "DraftVocabulary":
        """The list that was asked for, ranked with the tokenizer of a GGUF."""
        from mtp_gguf.convert.gguf_draft import rank_for_gguf  # noqa: PLC0415  (NumPy)
        from mtp_gguf.native.vocabulary import Vocabulary  # noqa: PLC0415

        return rank_for_gguf(model, self.size, self.corpus, self.ids_file, Vocabulary)

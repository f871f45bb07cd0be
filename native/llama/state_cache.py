"""`set_cache`: of the states in a cache of llama_cpp's, only those that the model can use."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from copy import copy
from typing import Any

from ..runtime import llama_cpp
from ..sessions.session_folder import shared_length
from .loaded import LoadedModel
from .session_identity import identity_of
from .session_store import continues_from_end_only


class StateCache(llama_cpp.llama_cache.BaseLlamaCache):
    """A cache of llama_cpp's between it and a model.

    Its keys are made different for each model and its settings, so that a cache on the disk, which
    other models may share, never offers their states. It keeps no states with pictures, because
    their ids are those of one process.
    """

    def __init__(self, llm: LoadedModel, cache: Any) -> None:
        super().__init__(cache.capacity_bytes)
        self._cache = cache
        self._n_ctx = llm.n_ctx()
        self._whole = continues_from_end_only(llm)
        settings = {**identity_of(llm), "logits_all": str(llm._logits_all)}  # in its states
        identity = json.dumps(settings, sort_keys=True).encode()
        self._model = int.from_bytes(hashlib.sha256(identity).digest()[:8], "little")

    @property
    def cache_size(self) -> int:
        """The bytes of all states."""
        return int(self._cache.cache_size)

    def __contains__(self, key: Sequence[int]) -> bool:
        return self._key(key) in self._cache

    def __getitem__(self, key: Sequence[int]) -> Any:
        """Return the state with the most tokens of a prompt; KeyError if it is of no use."""
        state = self._cache[self._key(key)]  # which LlamaDiskCache removes
        tokens = state.input_ids[: state.n_tokens]
        usable = len(tokens) <= self._n_ctx
        shared = shared_length(tokens, key)
        if self._whole:
            usable &= any(n <= shared for n in (len(tokens), *getattr(state, "mtp_earlier", ())))
        if not usable or shared < len(tokens):
            self._cache[self._key(tokens.tolist())] = state
        if not usable:
            raise KeyError("expected a state from which the model can continue, found another")
        restored = copy(state)
        restored.llama_state_size = len(state.llama_state)
        return restored

    def __setitem__(self, key: Sequence[int], state: Any) -> None:
        if min(key, default=-1) >= 0:
            counted = copy(state)  # llama_cpp's caches add up this field
            parts = (state.llama_state, state.mtp_head, *state.mtp_earlier.values())
            counted.llama_state_size = sum(map(len, parts))
            self._cache[self._key(key)] = counted

    def _key(self, tokens: Sequence[int]) -> tuple[int, ...]:
        return tuple(self._model << 32 | token for token in tokens)

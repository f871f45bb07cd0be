"""Generating tokens: drafts, their verification, and sampling."""

from __future__ import annotations

import secrets
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any

from mtp_gguf.gguf_tools.profile import FROM_TEXT

from .._interrupts import DeferredInterrupts
from ..chat.chat_layer import AnswerSampling
from ..errors import NativeError
from ..runtime import llama_cpp
from .evaluation import check_text
from .loaded import LoadedModel, streaming
from .logprobs import TokenLogprobs
from .options import Options
from .stored import StoringModel

LOGITS_BYTES = 256 << 20  # that a batch may take whose tokens all get log-probabilities


class GeneratingModel(StoringModel):
    """Generates tokens with drafts, from the same distribution as without them."""

    _record: TokenLogprobs | None = None  # of the completion that is read
    _origin = 0

    def __init__(self, how: Options, given: dict[str, Any], /) -> None:
        """Load a model."""
        self._rejection = how.arguments.rejection
        super().__init__(how, given)

    @property
    def token_origin(self) -> int:
        """The origin of the last token that `generate` yielded.

        0: the trunk; i: the i-th draft of the head; -1: a draft from the text.
        """
        return self._origin

    @streaming
    def generate(
        self,
        tokens: Sequence[int],
        top_k: int = 40,
        top_p: float = 0.95,
        min_p: float = 0.05,
        typical_p: float = 1.0,
        temp: float = 0.80,
        repeat_penalty: float = 1.0,
        reset: bool = True,
        frequency_penalty: float = 0.0,
        presence_penalty: float = 0.0,
        tfs_z: float = 1.0,
        mirostat_mode: int = 0,
        mirostat_tau: float = 5.0,
        mirostat_eta: float = 0.1,
        penalize_nl: bool = True,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        grammar: Any = None,
    ) -> Generator[int, Sequence[int] | None, None]:
        """Yield the tokens that follow `tokens`, as llama_cpp.Llama.generate does, with drafting.

        Each token is an accepted draft or was chosen by the sampler; the distribution is the same
        as without drafting.
        """
        if grammar is not None and not isinstance(grammar, AnswerSampling):
            read_grammar(self, "grammar", grammar._grammar)
        failures: list[BaseException] = []
        with DeferredInterrupts():
            self._sampler = self._init_sampler(
                top_k=top_k,
                top_p=top_p,
                min_p=min_p,
                typical_p=typical_p,
                temp=temp,
                repeat_penalty=repeat_penalty,
                frequency_penalty=frequency_penalty,
                presence_penalty=presence_penalty,
                tfs_z=tfs_z,
                mirostat_mode=mirostat_mode,
                mirostat_tau=mirostat_tau,
                mirostat_eta=mirostat_eta,
                penalize_nl=penalize_nl,
                logits_processor=_guarded(logits_processor, failures),
                grammar=grammar,
            )
        by_logits_only = (
            repeat_penalty == 1.0
            and frequency_penalty == 0.0 == presence_penalty
            and logits_processor is None
            and grammar is None
        )
        greedy = temp == 0.0 and by_logits_only  # needs no table of candidates
        # Rejection sampling requires a chain whose distribution is known.
        by_rejection = (
            self._rejection
            and self.depth != 0
            and temp > 0.0
            and typical_p == 1.0
            and mirostat_mode == 0
            and by_logits_only
            and not self._logits_all
            and self._record is None
            and self._head is not None
            and self._head.draws
        )
        if by_rejection:
            seed = secrets.randbits(64) if _is_random(self._seed) else self._seed
            self.session.set_sampling(temp, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
        # Python has to see each token before the next one is sampled, or has to store its scores.
        record = self._record
        stepwise = logits_processor is not None or self._logits_all or record is not None
        try:
            if record is not None and record.wants_prompt:
                self._eval_recorded(list(tokens), record)
            elif reset:
                self._eval_prompt(self._reuse_prefix(list(tokens)), keep=self._prompts.most > 0)
            else:
                self._eval_prompt(tokens, keep=False)
            if self._model_lock.stopped:
                return
            if self._requires_eval:
                raise NativeError("prompt: expected at least one token, found none")
            forced: Sequence[int] | None = None
            while True:
                self._requires_eval = True  # after a cycle the logits are not the last token's
                sampled = self._sample_on(greedy, by_rejection, stepwise, failures)
                try:
                    for token in sampled:
                        if self._model_lock.stopped:
                            return
                        if stopping_criteria is not None and stopping_criteria(
                            self._input_ids, self._scores[-1, :]
                        ):
                            return
                        forced = yield token
                        if forced:
                            break
                finally:
                    sampled.close()
                self.eval([token, *(forced or ())])
        finally:
            self._drop_unread()

    def sample(self, *args: Any, idx: int | None = None, **options: Any) -> Any:
        """Sample a token after the last evaluated one, as llama_cpp.Llama.sample does.

        NativeError if its logits are not there, as after `load_state` or `generate`. llama_cpp's
        methods, which run a model without a session, call this, too.
        """
        with self._model_lock.hold():
            self._check_open()
            self._check_logits("sample")
            token = super().sample(*args, **{**options, "idx": idx})
            if self._record is not None and self._without_session and idx is not None:
                self._record_scores(self._record, idx, token)
            return token

    def _eval_recorded(self, tokens: list[int], record: TokenLogprobs) -> None:
        """Evaluate a prompt from its beginning and record the log-probabilities of its tokens."""
        check_text(tokens)
        self._store_session()
        self.reset()
        if tokens:
            record.begin_prompt(tokens[0])
        most = max(LOGITS_BYTES // (4 * self._n_vocab), 1)
        for start in range(0, len(tokens), most):
            for batch in self._batches_of(tokens[start : start + most]):
                at = self.n_tokens
                self._decode(batch, all_logits=True)
                following = tokens[at + 1 : at + 1 + len(batch)]
                record.add_prompt([*map(self._logits, range(len(following)))], following)
                if self._model_lock.stopped:
                    return

    def _sample_on(
        self, greedy: bool, by_rejection: bool, stepwise: bool, failures: list[BaseException]
    ) -> Generator[int, None, None]:
        """Yield tokens endlessly, starting from the logits of the last decode.

        When a token is yielded, n_tokens and input_ids hold everything before it. failures:
        exceptions of logits processors that were raised inside the sampler; re-raised here.
        """
        session = self.session
        sampler: Any = self._sampler
        if greedy:
            token = session.argmax()
        elif by_rejection:
            token = session.sample()
        else:
            token = self._sample(-1)
        if failures:
            raise failures[0]
        record = self._record
        if record is not None:
            record.add_generated(self._logits(-1), token)
        while True:
            self._origin = 0
            yield token
            at = self.n_tokens
            if not stepwise:
                if by_rejection:
                    new = session.step_sampled(token, self.depth)
                else:
                    chain = None if greedy else sampler.sampler
                    new = session.step(token, self.depth, sampler=chain)
                self.input_ids[at : at + len(new)] = [token, *new[:-1]]
                step = 0 if len(new) > 1 and session.origin(1) == FROM_TEXT else 1
                self._origin = 0 if step else FROM_TEXT
                for token in new[:-1]:
                    self._origin += step
                    self._n_tokens += 1
                    yield token
                self._n_tokens += 1
                token = new[-1]
                continue
            drafts = session.begin(token, self.depth)
            self.input_ids[at] = token
            accepted = 0
            try:
                while True:
                    row = session.row(accepted)
                    if self._logits_all:
                        self._store_scores(at + accepted, row)
                    self._n_tokens = at + 1 + accepted
                    token = session.argmax(row) if greedy else self._sample(row)
                    if failures:
                        raise failures[0]
                    if record is not None:
                        record.add_generated(self._logits(row), token)
                    if accepted == len(drafts) or token != drafts[accepted]:
                        break
                    self._origin = session.origin(accepted + 1)
                    yield token
                    self.input_ids[self.n_tokens] = token
                    accepted += 1
            except BaseException:  # one that closes the generator, too
                with suppress(NativeError):  # which would hide the first one
                    session.end(accepted)
                raise
            session.end(accepted)

    def _sample(self, row: int) -> int:
        """Sample a token. An interrupt in Python code that is called from C would be lost."""
        sampler: Any = self._sampler
        with DeferredInterrupts():
            return self.session.choose(row, sampler.sampler)

    def _record_scores(self, record: TokenLogprobs, at: int, token: int) -> None:
        """Record a token that follows position `at` of a model without a session."""
        if record.wants_prompt and not record.prompt:
            ids = self.input_ids[: at + 1].tolist()
            record.begin_prompt(ids[0])
            record.add_prompt([*self.scores[:at]], ids[1:])
        record.add_generated(self.scores[at], token)

    def _drop_unread(self) -> None:
        """After a generation, remove accepted tokens that were not read, if that is possible."""
        if self._session is None or self._session.closed:
            return
        with suppress(NativeError):
            self._session.remove(self.n_tokens)


def read_grammar(llm: LoadedModel, name: str, text: str) -> Any:
    """Return a GBNF grammar for `llm`; NativeError, which begins with `name`, if it is malformed.

    llama_cpp would go on without a sampler, and crash.
    """
    vocabulary = llama_cpp.llama_model_get_vocab(llm.model)
    sampler = llama_cpp.llama_sampler_init_grammar(vocabulary, text.encode(), b"root")
    if not sampler:
        raise NativeError(
            f"{name}: llama.cpp cannot read the grammar; it must define `root` and all rules that "
            "it uses, repeat nothing more than 2,000 times, and not be left-recursive"
        )
    llama_cpp.llama_sampler_free(sampler)
    return llama_cpp.llama_grammar.LlamaGrammar.from_string(text, verbose=False)


def _is_random(seed: int) -> bool:
    """Whether a seed means "random" to llama.cpp's samplers: -1 as an unsigned 32-bit number."""
    return seed % 2**32 == llama_cpp.LLAMA_DEFAULT_SEED


def _guarded(processors: Any, failures: list[BaseException]) -> Any:
    """Wrap logits processors to record exceptions, which cannot propagate through C."""
    if processors is None:
        return None

    def guard(processor: Any) -> Any:
        def call(ids: Any, scores: Any) -> Any:
            try:
                return processor(ids, scores)
            except BaseException as error:  # Ctrl-C too
                failures.append(error)
                return scores

        return call

    return llama_cpp.LogitsProcessorList([guard(processor) for processor in processors])

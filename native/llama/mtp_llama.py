"""llama_cpp.Llama with multi-token prediction: the same constructor and the same methods."""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Generator, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter, signature
from itertools import groupby
from typing import Any, Literal

from mtp_gguf.gguf_tools.profile import AUTO_MAX_DEPTH

from ..chat.chat_answer import ChatAnswer
from ..chat.chat_layer import AnswerSampling, ChatTemplate, Rendered, sample_answers
from ..chat.chat_request import ChatRequest
from ..chat.completion_request import check_completion
from ..errors import NativeError
from ..libraries.offload import idle_cpu_moe
from ..runtime import llama_cpp
from ..schemas.json_schema import schema_grammar
from .answer import Answer
from .generation import GeneratingModel, read_grammar
from .loaded import exclusive
from .logprobs import TokenLogprobs
from .options import Arguments, resolve
from .python_server import answer_mistakes_with_400, take_what_clients_send
from .session_store import DEFAULT_BYTES

take_what_clients_send()
sample_answers()

# Agents call tools several times between two messages of a user, and templates then drop the
# thoughts of all of these calls. Each copy takes 150 MiB with a model of 27B.
DEFAULT_PROMPTS = 4


class MTPLlama(GeneratingModel):
    """A Llama that drafts with the model's MTP head and verifies with its trunk.

    model_path: a GGUF, or one on the hub (`OWNER/NAME:QUANT`, `hf://OWNER/NAME/FILE`), which is
    downloaded into huggingface_hub's cache with its shards. If it has no head, but only one
    head-only file `mtp-*.gguf` beside it fits, that is its head, here as on the hub.

    Arguments besides those of llama_cpp.Llama:

    - depth: tokens drafted in each cycle, 0 (no drafting) to 16, or "auto" to choose the fastest
      depth up to max_depth in each cycle. A head of several layers drafts a token with each; a
      larger depth is lowered to their number, with a warning. MTP_GGUF_DISABLE=1 in the
      environment sets it to 0.
    - rollback: "snapshot", "checkpoint", "two-phase" or "host".
    - exact: make greedy output byte-identical at every depth; NativeError if something prevents
      that. docs/native.md says what it costs.
    - rejection: accept drafts by rejection sampling if the sampler is a plain chain of top-k,
      top-p, min-p and temperature. False: accept only equal tokens, which gives the same
      tokens as a run without drafts with the same seed.
    - fastmtp_size: how much of a ranked draft vocabulary to use; 0 for all, -1 for none. A file
      without one gets a list of this size when it is loaded; 0 for the default size.
    - mtp_head: another file to take the head from, local or on the hub.
    - mtp_type: quantize the matrices of the head that have more bits to this type of ggml while
      loading, such as "Q8_0"; the file stays as it is. "auto" measures types once for a model and
      machine, in up to a minute or so, and takes the fastest that loses no accepted drafts
      (docs/acceptance.md). None: as stored.
    - mtp_device: ggml's name of the device for the head (default: that of the trunk's last layer).
    - split_mode, tensor_split, main_gpu: llama_cpp.Llama's, for several GPUs.
    - n_cpu_moe: keep the experts of the trunk's first so many layers on the CPU, for a model that
      does not fit on the GPU. The head's are where the head is.
    - tensor_overrides: ggml's name of a device for each regular expression, such as
      {"ffn_.*_exps": "CPU"}; tensors of the trunk in whose names it is found are kept there. The
      first that is found decides, before n_cpu_moe.
    - draft_threads: CPU threads of the head; 0 for as many as the trunk uses.
    - keep_prompt: how many copies of the recurrent state to keep in host memory and session files,
      each near the end of a long prompt. A later prompt with the same beginning continues there
      instead of at its start. 0 for none.
    - session_dir: a folder of sessions. A conversation is written there when another one takes its
      place, when the model is closed and when Python ends; a prompt is continued from the session
      there that holds the most of it. docs/sessions.md has the rules.
    - session_size: bytes of all sessions in session_dir; the least recently used are removed.
    - lookup_files: your own text files, and folders of them, to draft from as well; this implies
      lookup. They are indexed once, in the user's cache.
    - lookup: also draft from the text itself, up to 14 tokens at a time, if a copy of earlier text
      promises more tokens per millisecond than the head; this works without a head, too. On by
      default with depth "auto" if the libraries replay (docs/native.md), and without a head if the
      model has attention only; otherwise rollback "snapshot" needs memory for 14 snapshots.

    depth, rollback, fastmtp_size and draft_threads default to the model's profile, if `mtp-gguf
    tune` has written one for this file and machine (profile=False ignores it), otherwise to "auto",
    "snapshot", 0 and 0. With "auto" the depth depends on measured times. Runs that must reproduce
    every token need a fixed depth, or exact and temperature 0.

    n_threads and n_threads_batch default to the performance cores that this process may use, also
    in a container with a quota (llama_cpp: half of and all of the machine's processors).

    flash_attn is on by default if the trunk runs on a CPU with the patched libraries, whose kernels
    are faster with it.

    A model without a head drafts from the text, with a warning that says why. One that cannot do
    that either (recurrent states without replay, lookup=False, embedding=True, vocab_only=True) is
    run by llama_cpp.Llama's own methods; if depth is a number or exact is set, HeadMissingError or
    NativeError is raised instead. depth=0 decodes any model
    without drafts. Raises ModelRefusedError, with llama.cpp's last log lines, if a model cannot be
    loaded. Close it, or use contextlib.closing.
    """

    def __init__(
        self,
        model_path: str,
        *,
        depth: int | Literal["auto"] | None = None,
        max_depth: int = AUTO_MAX_DEPTH,
        rollback: str | None = None,
        exact: bool = False,
        rejection: bool = True,
        fastmtp_size: int | None = None,
        mtp_head: str | None = None,
        mtp_type: str | None = None,
        mtp_device: str | None = None,
        n_cpu_moe: int = 0,
        tensor_overrides: Mapping[str, str] | None = None,
        keep_prompt: int = DEFAULT_PROMPTS,
        draft_threads: int | None = None,
        profile: bool = True,
        busy: Literal["wait", "raise"] = "wait",
        lookup: bool | None = None,
        lookup_files: Sequence[str | os.PathLike[str]] = (),
        session_dir: str | os.PathLike[str] | None = None,
        session_size: int = DEFAULT_BYTES,
        **options: Any,
    ) -> None:
        _check_names(type(self), options)
        answer_mistakes_with_400()
        arguments = Arguments(
            depth=depth,
            max_depth=max_depth,
            rollback=rollback,
            exact=exact,
            rejection=rejection,
            fastmtp_size=fastmtp_size,
            mtp_head=mtp_head,
            mtp_type=mtp_type,
            mtp_device=mtp_device,
            n_cpu_moe=n_cpu_moe,
            tensor_overrides=tensor_overrides,
            keep_prompt=keep_prompt,
            draft_threads=draft_threads,
            profile=profile,
            busy=busy,
            lookup=lookup,
            lookup_files=lookup_files,
            session_dir=session_dir,
            session_size=session_size,
        )
        self._preserved: frozenset[int] = frozenset()  # special tokens that answers have as text
        self._templates: dict[str, ChatTemplate] = {}
        super().__init__(resolve(model_path, arguments, options), options)
        if idle := idle_cpu_moe(n_cpu_moe, options.get("n_gpu_layers", 0), self.metadata):
            warnings.warn(idle, stacklevel=2)

    @classmethod
    def from_pretrained(
        cls,
        repo_id: str,
        filename: str | None,
        additional_files: list[str] | None = None,
        local_dir: str | os.PathLike[str] | None = None,
        local_dir_use_symlinks: bool | Literal["auto"] = "auto",
        cache_dir: str | os.PathLike[str] | None = None,
        **kwargs: Any,
    ) -> MTPLlama:
        """Download a GGUF of the hub and load it; same arguments as llama_cpp.Llama's.

        filename: the file's name or a glob pattern, which only one model may match; None for its
        Q4_K_M or only one. All shards are downloaded, and the head-only file beside a model that
        has no head. local_dir_use_symlinks is ignored, as in huggingface_hub.
        RemoteError says why a download failed.
        """
        from mtp_gguf.gguf_tools.hub.hub_gguf import Folders, fetch_matching  # noqa: PLC0415  (slow)

        _check_names(cls, kwargs)
        head = kwargs.get("mtp_head")
        path, beside = fetch_matching(
            repo_id,
            filename,
            additional_files or [],
            Folders(
                *(None if path is None else os.fspath(path) for path in (local_dir, cache_dir))
            ),
            with_head=head is None and kwargs.get("depth") != 0,
        )
        if beside is not None:
            kwargs["mtp_head"] = str(beside)
        return cls(model_path=str(path), **kwargs)

    embed = exclusive(llama_cpp.Llama.embed)
    # llama_cpp's handlers of pictures evaluate the prompt here, in several steps.
    _answer_chat = exclusive(llama_cpp.Llama.create_chat_completion)

    def create_chat_completion(
        self, *args: Any, max_completion_tokens: int | None = None, **options: Any
    ) -> Any:
        """Answer a conversation with llama-server's chat layer; arguments of llama_cpp.Llama's.

        messages: as OpenAI's clients send them. tools, tool_choice: "none", "auto", "required" or a
        function by name; calls are read from the answer in the format of the model's family.
        response_format: of OpenAI's API or of llama-server. MessagesError names the place where a
        request is malformed, or what the model's chat template refuses.

        Further arguments, which llama-server has, too: parallel_tool_calls; reasoning_effort;
        reasoning_format, "deepseek" (thinking is `reasoning_content`) or "none" (it is part of the
        content); reasoning_budget_tokens, the most tokens of thinking, after which
        reasoning_budget_message and the end of thinking follow; chat_template_kwargs, variables of
        the template; chat_template, another template than the model's; add_generation_prompt and
        continue_final_message; max_completion_tokens, OpenAI's name of `max_tokens`; truncation,
        "auto" to leave out the oldest turns of a conversation that does not fit the context, whose
        number of messages is the answer's `dropped_messages`.

        With `chat_handler` or a `chat_format` of llama_cpp's own, that answers, as in llama_cpp.
        """
        if max_completion_tokens is not None:
            if options.get("max_tokens") is not None:
                raise NativeError(
                    "max_completion_tokens: expected it or max_tokens, found both; leave out one"
                )
            options["max_tokens"] = max_completion_tokens
        if not self._has_layer(options.get("chat_template")):
            if options.get("logprobs") and options.get("top_logprobs") is None:
                options["top_logprobs"] = 0  # llama_cpp would ignore logprobs
            return self._answer_chat(*args, **options)
        request = ChatRequest(*args, **options)
        with self._model_lock.hold():
            self._check_open()
            if request.schema is not None:
                read_grammar(self, "response_format", schema_grammar(request.schema))
            rendered, tokens = self._render_chat(request)
            function = None
            if request.must_call and not rendered.has_grammar:
                layer, function = request.with_arguments_only()
                rendered = self._rendered(request.template, layer)
            sampling = AnswerSampling(rendered, request.thinking_tokens, request.end)
            sampling.check(self._model.model)
            given = {**request.completion, "logit_bias": self._biases(request.layer)}
            answer = ChatAnswer(rendered, function)
            completion = self._create_completion(
                prompt=tokens,
                chat=True,
                **{
                    **given,
                    "stop": [*given["stop"], *rendered.stops],
                    "grammar": given["grammar"] or sampling,
                },
            )
            return answer.stream(completion) if given["stream"] else answer.whole(next(completion))

    def count_chat_tokens(self, *args: Any, **options: Any) -> int:
        """Return how many tokens `create_chat_completion` reads as its prompt with these arguments.

        Nothing is evaluated. MessagesError as there; NativeError if the model has no chat template.
        """
        if not self._has_layer(options.get("chat_template")):
            raise NativeError(
                "count_chat_tokens: expected a model with a chat template, found none; pass one as "
                "chat_template"
            )
        request = ChatRequest(*args, **options)
        with self._model_lock.hold():
            self._check_open()
            return len(self._render_chat(request)[1])

    def _has_layer(self, template: str | None) -> bool:
        """Whether llama-server's chat layer answers, rather than a handler of llama_cpp."""
        own = self.chat_handler is None and self.chat_format in self._chat_handlers
        return own or template is not None

    def _render_chat(self, request: ChatRequest) -> tuple[Rendered, list[int]]:
        """Return a rendered conversation and its tokens."""
        rendered = self._rendered(request.template, request.layer)
        return rendered, self.tokenize(rendered.prompt.encode(), add_bos=False, special=True)

    def _biases(self, layer: dict[str, Any]) -> dict[int, float] | None:
        """Return the biases of a request that was checked, by token, as llama-server reads them."""
        given, found = layer.get("logit_bias"), dict[int, float]()
        if given is None:
            return None
        for key, value in given.items() if isinstance(given, dict) else given:
            if value is True:
                continue
            try:
                tokens = [int(key)]
            except ValueError:
                tokens = self.tokenize(key.encode(), add_bos=False)
            bias = -math.inf if value is False else float(value)
            found |= {token: bias for token in tokens if 0 <= token < self._n_vocab}
        return found

    def _rendered(self, template: str | None, layer: dict[str, Any]) -> Rendered:
        return self.chat_template(template).render(layer, self._model.model, self.n_ctx())

    def chat_template(self, source: str | None = None) -> ChatTemplate:
        """Return a chat template for this model; its own, or one with another source.

        ModelRefusedError if it is malformed.
        """
        key = self.chat_format if source is None else ""
        if key in self._templates:
            return self._templates[key]
        tools = None
        if source is None:
            default = key == "chat_template.default"
            source = self.metadata["tokenizer.chat_template" if default else f"tokenizer.{key}"]
            tools = self.metadata.get("tokenizer.chat_template.tool_use") if default else None
        bos, eos = (
            "" if token == -1 else self._model.token_get_text(token)
            for token in (self.token_bos(), self.token_eos())
        )
        made = ChatTemplate(source, tools_template=tools, bos=bos, eos=eos)
        if key:
            self._templates[key] = made
        return made

    def detokenize(
        self, tokens: list[int], prev_tokens: list[int] | None = None, special: bool = False
    ) -> bytes:
        """Return the text of tokens; in an answer with those that its format has as text."""
        if special or self._preserved.isdisjoint(tokens):
            return bytes(super().detokenize(tokens, prev_tokens, special))
        return b"".join(
            super(MTPLlama, self).detokenize([*group], prev_tokens, preserved)
            for preserved, group in groupby(tokens, self._preserved.__contains__)
        )

    def _create_completion(
        self,
        *args: Any,
        max_tokens: int | None = 16,
        logprobs: int | None = None,
        echo: bool = False,
        stream: bool = False,
        chat: bool = False,
        stopping_criteria: Any = None,
        **options: Any,
    ) -> Generator[Any, None, None]:
        """Complete a prompt; a `max_tokens` of 0 evaluates it only, negative ones have no limit.

        chat: give log-probabilities in the form of a chat completion's.
        """
        prompt = args[0] if args else options["prompt"]
        check_completion(
            {**options, "prompt": prompt, "max_tokens": max_tokens, "logprobs": logprobs}
        )
        nothing = max_tokens == 0
        criteria = [lambda *_: nothing or self._model_lock.stopped, *(stopping_criteria or ())]
        record = None
        if logprobs is not None and (self._logits_all or not self._without_session):
            threads = llama_cpp.llama_n_threads_batch(self._ctx.ctx)
            record, logprobs = TokenLogprobs(logprobs, prompt=echo, threads=threads), None
        grammar, preserved = options.get("grammar"), frozenset[int]()
        if isinstance(grammar, AnswerSampling):
            preserved = self.single_tokens(grammar.rendered.preserved_tokens)
            options["grammar"] = grammar if grammar.constrains else None
        options |= {
            "max_tokens": 1 if nothing else max_tokens,
            "logprobs": logprobs,  # llama_cpp says what a model without a session needs for them
            "stream": stream,
            "stopping_criteria": llama_cpp.StoppingCriteriaList(criteria),
        }
        chunks: Any = super()._create_completion(*args, **options)
        answer = Answer(self, prompt, record, echo=echo, nothing=nothing, chat=chat)
        read = answer.stream(chunks) if stream else answer.whole(chunks)
        return self._under_lease(self._recorded(record, preserved, read))

    def _recorded(
        self,
        record: TokenLogprobs | None,
        preserved: frozenset[int],
        chunks: Generator[Any, None, None],
    ) -> Generator[Any, None, None]:
        """Collect log-probabilities in `record` while a completion is read.

        preserved: special tokens that its text has.
        """
        self._record, self._preserved = record, preserved
        try:
            yield from chunks
        finally:
            self._record, self._preserved = None, frozenset()

    def single_tokens(self, texts: Iterable[str]) -> frozenset[int]:
        """Return the tokens of those texts that are a token each, special ones included."""
        found = (self.tokenize(text.encode(), add_bos=False, special=True) for text in texts)
        return frozenset(tokens[0] for tokens in found if len(tokens) == 1)


# Names that llama_cpp.Llama ignores: LangChain passes those of earlier versions, its server others.
_IGNORED = ("f16_kv", "low_vram", "mul_mat_q", "n_gqa", "n_parts", "rms_norm_eps", "rpc_servers")


def _check_names(model: type[MTPLlama], names: Iterable[str]) -> None:
    """TypeError for names of keyword arguments that no constructor of the class has."""
    known = {
        name
        for base in model.__mro__
        for name, parameter in signature(base).parameters.items()
        if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    }
    for name in names:
        if name not in known and name not in _IGNORED:
            near = get_close_matches(name, sorted(known), 1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{model.__name__}: expected arguments of MTPLlama and llama_cpp.Llama, found "
                f"{name!r}{hint}"
            )

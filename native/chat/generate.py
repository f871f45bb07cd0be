"""Text generation with llama.cpp, as tokens, without drafting."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.errors import RequestError

from ..checks.model_file import TEMPLATE_ERRORS, check_trunk, template_fault

Tokens = NDArray[np.int64]


class Renderer(Protocol):
    """Renders a conversation as text with a chat template, up to the beginning of the answer."""

    def __call__(self, messages: Sequence[dict[str, Any]], /, **variables: Any) -> str:
        """Render messages; RequestError if the template fails. variables: for the template."""


@dataclass(frozen=True)
class Generation:
    """Generation settings: at most `tokens` for each prompt, in a context of `context` tokens.

    chat: apply the model's chat template to prompts, if it has one. gpu_layers: llama.cpp's -ngl.
    """

    tokens: int
    temperature: float
    seed: int
    context: int
    chat: bool = True
    gpu_layers: int = 0


def generate(
    path: Path, prompts: Sequence[str], settings: Generation
) -> Iterator[tuple[Tokens, Tokens]]:
    """Yield the tokens of each prompt and of its answer, including the end-of-turn token.

    RequestError if llama.cpp cannot load the model or a prompt does not fit into the context.
    """
    from ..runtime import llama_cpp  # noqa: PLC0415  (loads the libraries)

    check_trunk(path)
    try:
        llm: Any = llama_cpp.Llama(
            str(path),
            n_ctx=settings.context,
            n_gpu_layers=settings.gpu_layers,
            seed=settings.seed,
            verbose=False,
        )
    except ValueError as error:
        raise RequestError(f"{path}: llama.cpp cannot load it: {error}") from None
    except TEMPLATE_ERRORS as error:
        raise RequestError(f"{path}: {template_fault(error)}") from None
    with closing(llm):
        vocabulary = llama_cpp.llama_model_get_vocab(llm.model)
        template = llm.metadata.get("tokenizer.chat_template")
        write = chat_writer(template) if settings.chat else None
        for text in prompts:
            prompt = llm.tokenize((write(text) if write else text).encode(), False, True)
            room = settings.context - len(prompt)
            if not 0 < len(prompt) < settings.context:
                raise RequestError(
                    f"a prompt has {len(prompt)} tokens, expected 1 to {settings.context - 1} "
                    "(--ctx)"
                )
            llm.reset()
            answer = []
            written = llm.generate(prompt, temp=settings.temperature)
            for token in islice(written, min(room, settings.tokens)):
                answer.append(int(token))
                if llama_cpp.llama_vocab_is_eog(vocabulary, token):
                    break
            yield np.asarray(prompt, np.int64), np.asarray(answer, np.int64)


def chat_writer(template: str | None) -> Callable[[str], str] | None:
    """Return a function that renders a user message with a chat template; None without a template.

    RequestError if the template is invalid; the function raises it, too.
    """
    render = chat_renderer(template)
    if render is None:
        return None

    def write(text: str) -> str:
        try:
            return render([{"role": "user", "content": text}])
        except RequestError as error:
            raise RequestError(f"{error}; pass --raw to skip it") from None

    return write


def chat_renderer(template: str | None) -> Renderer | None:
    """Return a function that renders a conversation with a chat template; None without a template.

    RequestError if the template is invalid; the function raises it, too.
    """
    if not template:
        return None
    from ..errors import ModelRefusedError  # noqa: PLC0415
    from .chat_layer import ChatTemplate  # noqa: PLC0415  (loads the libraries)

    try:
        layer = ChatTemplate(template)
    except ModelRefusedError as error:
        raise RequestError(str(error)) from None

    def render(messages: Sequence[Any], /, **variables: Any) -> str:
        return layer.render({"messages": [*messages], "chat_template_kwargs": variables}).prompt

    return render

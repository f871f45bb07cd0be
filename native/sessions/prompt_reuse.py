"""How much of a prompt was evaluated already and, if not all of it, why."""

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptReuse:
    """Of a prompt's `tokens`, the first `reused` were not evaluated again.

    why: a sentence if more than the last token, which is always evaluated, was read; else "".
    """

    tokens: int
    reused: int
    why: str


def explain(tokens: int, reused: int, kept: int, shared: int, unfit: str) -> PromptReuse:
    """Return the reuse of a prompt.

    kept: tokens that were evaluated before, of which the first `shared` begin the prompt. unfit:
    why a session with more of it than `reused` was not loaded; "" if there is none.
    """
    if reused >= tokens - 1:
        why = ""
    elif unfit:
        why = unfit
    elif reused > shared:
        why = f"the session that was loaded ends or parts at token {reused}"
    elif reused < shared:
        why = f"{shared} tokens are the same, but the model can only go on from token {reused}"
    elif shared == 0:
        why = "nothing that is kept begins like it"
    elif shared < kept:
        why = f"the text parts from the one that was kept at token {shared}"
    else:
        why = f"the text that was kept ends at token {shared}, and the rest is new"
    return PromptReuse(tokens, reused, why)

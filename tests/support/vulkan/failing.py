"""Uses a model on a device that fails.

    cd tests; python -m support.vulkan.failing MODEL load|text|head|submit|wait

load: load the model, and print the error. text: then write a text. head: load only its head.
submit, wait: lose the device in the middle of a text, when work is submitted or waited for, print
the errors of the next two calls, then close the model.
"""

from __future__ import annotations

import itertools
import os
import sys
from contextlib import suppress

from mtp_gguf.native import Head, MTPLlama, NativeError
from support.near_ties import prompt_of
from support.places import ALL, require_gpu

PROMPT = prompt_of(20, 2)


def main(model: str, work: str) -> None:
    """Do it; what is not expected ends with a traceback."""
    try:
        if work == "head":
            Head(model, device=require_gpu()).close()
            return
        llm = MTPLlama(model, depth=3, n_ctx=256, n_threads=1, n_gpu_layers=ALL)
    except NativeError as error:
        print(f"error: {error}")
        return
    if work == "text":
        print(*itertools.islice(llm.generate(PROMPT, temp=0.0), 20))
    elif work != "load":
        stream = llm.generate(PROMPT, temp=0.0)
        print(*(next(stream) for _ in range(6)))
        os.environ["MTP_VK_LOST"] = work
        for use in (lambda: list(stream), lambda: llm.eval(PROMPT)):
            try:
                use()
            except NativeError as error:
                print(f"error: {error}")
        with suppress(NativeError):
            stream.close()
    llm.close()
    print("closed")


if __name__ == "__main__":
    main(*sys.argv[1:])

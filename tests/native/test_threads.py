"""Threads and processes that share an object: refused in a sentence, and no crash at the end."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mtp_gguf.native import MTPLlama, NativeError
from mtp_gguf.native.depth import DepthChooser, Outcome, plan_batch
from mtp_gguf.native.head import SequenceTask
from mtp_gguf.native.lookup_files import Corpus
from mtp_gguf.native.suffix_index import SuffixIndex
from support.generation import in_another_process

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from mtp_gguf.native._owner import Owner
    from support.models import Dial

    Calls = list[Callable[[], object]]


SHARED = """
import random, threading
from mtp_gguf.native import NativeError
from mtp_gguf.native.suffix_index import SuffixIndex

index, text = SuffixIndex(), random.Random(1).choices(range(700), k=5_000)
refused = set()


def work(call):
    for i in range(80):
        try:
            call()
        except NativeError as error:
            refused.add(str(error))


calls = [lambda: index.append(text), lambda: index.append(text), lambda: index.truncate(0)]
threads = [threading.Thread(target=work, args=[call]) for call in calls]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(*refused)
"""


def test_threads_that_share_an_object_are_refused_and_crash_nothing() -> None:
    done = in_another_process(SHARED)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.strip() in ("", "the suffix index is in use by another thread")


@pytest.fixture(scope="module")
def model(dial: Dial) -> Iterator[MTPLlama]:
    with MTPLlama(str(dial("tiny")), n_ctx=64, n_threads=1, depth=2, lookup=True) as llm:
        llm.eval(range(20))
        yield llm


def suffix_index(_: MTPLlama, __: Path) -> tuple[Owner, Calls]:
    index = SuffixIndex()
    return index, [
        lambda: index.append([1]),
        lambda: index.truncate(0),
        index.match,
        lambda: index.propose(1),
        lambda: index.nbytes,
    ]


def corpus(llm: MTPLlama, folder: Path) -> tuple[Owner, Calls]:
    options = {"n_vocab": llm.n_vocab(), "tokenizer": llm.session.tokenizer()}
    Corpus.write(folder / "index", [range(9)], **options)
    index = Corpus(folder / "index", **options)
    llm.session.set_corpus(index)
    return index, [
        lambda: index.match([1]),
        lambda: index.propose([1], 1),
        llm.session.length,  # a session uses its index, too
    ]


def checkpoint(llm: MTPLlama, _: Path) -> tuple[Owner, Calls]:
    saved = llm.session.save()
    return saved, [saved.to_bytes, lambda: llm.session.restore(saved)]


def head(llm: MTPLlama, _: Path) -> tuple[Owner, Calls]:
    assert llm.head
    made, hidden = llm.head, np.ones((1, llm.head.n_embd), np.float32)
    return made, [
        made.draft_ids,
        made.next_position,
        lambda: made.feed([1], hidden, 1),
        lambda: made.draft([1], hidden, 1, 1),
        lambda: made.draft_batch([SequenceTask([1], hidden, 1, 1, 0)]),
        lambda: made.keep_hidden(0, 0, []),
        lambda: made.rollback(0),
        made.rows,
        lambda: made.set_rows(b"", 1),
        made.ops,
        llm.session.length,  # a session uses its head, too
    ]


def depth_chooser(_: MTPLlama, __: Path) -> tuple[Owner, Calls]:
    chooser = DepthChooser(2)
    other = chooser.beside()
    return chooser, [
        lambda: chooser.share(2),
        lambda: chooser.set_costs([1.0], [1.0]),
        lambda: chooser.plan(1),
        lambda: chooser.keep([0.5]),
        lambda: chooser.report(Outcome()),
        lambda: other.plan(1),  # with the same costs
        lambda: plan_batch([other, chooser], [1, 1]),
    ]


@pytest.mark.parametrize("kind", [suffix_index, corpus, checkpoint, head, depth_chooser])
def test_every_call_is_refused_while_another_runs(
    model: MTPLlama, tmp_path: Path, kind: Callable[[MTPLlama, Path], tuple[Owner, Calls]]
) -> None:
    owner, calls = kind(model, tmp_path)
    with owner._lock:  # as a call of another thread does
        for call in (*calls, owner.close):
            with pytest.raises(NativeError, match=f"^the {owner._what} is in use by another"):
                call()
    assert not owner.closed
    calls[0]()


END = """
import sys, threading
from mtp_gguf.native import MTPLlama

work, model = sys.argv[1:]
llm = MTPLlama(model, n_ctx=1024, n_threads=2, depth=3)
works = threading.Event()


def generate():
    for _ in llm.generate([3, 1, 4, 1, 5], temp=0.0):
        works.set()


def evaluate():
    while True:
        llm.reset()
        llm.eval(range(1000))
        works.set()


threading.Thread(target=globals()[work], daemon=True).start()
works.wait()
"""


@pytest.mark.parametrize("work", ["generate", "evaluate"])
def test_a_process_ends_while_a_daemon_thread_works(dial: Dial, work: str) -> None:
    done = in_another_process(END, work, dial("tiny"))
    assert (done.returncode, done.stderr) == (0, "")


FORK = """
import os, sys, warnings
from mtp_gguf.native import MTPLlama

warnings.simplefilter("ignore")  # of Python 3.12 and later, about fork() itself
llm = MTPLlama(sys.argv[1], n_ctx=128, n_threads=2, depth=2)


def text():
    return llm.create_completion([3, 1, 4, 1, 5], max_tokens=9, temperature=0)["choices"]


want = text()
child = os.fork()
if child == 0:
    for call in (text, llm.session.length, llm.head.next_position, lambda: llm.eval([1])):
        try:
            call()
        except RuntimeError as error:
            print(error)
    print(llm.tokenize(b"aha"))
    llm.close()
    sys.exit()
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text() == want)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork() here")
def test_a_model_in_a_fork_says_that_it_cannot_run_there(dial: Dial) -> None:
    done = in_another_process(FORK, dial("tiny"))
    *said, tokens, end = done.stdout.splitlines()
    subjects = ["the model", "the session", "the head", "the model"]
    assert [line.split(":")[0] for line in said] == subjects
    assert all("found one in its fork, which lacks llama.cpp's threads; load" in x for x in said)
    assert tokens.startswith("[")
    assert (end, done.stderr) == ("0 True", "")

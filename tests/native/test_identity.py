"""What a session and the model that continues it have in common: all that is not harmless."""

from __future__ import annotations

import re
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mtp_gguf.gguf_tools.errors import RequestError
from mtp_gguf.native.llama import session_identity
from mtp_gguf.native.llama.session_identity import (
    KEPT,
    PLACED,
    check_identity,
    identity_of,
    session_fields,
)
from mtp_gguf.native.runtime import llama_cpp
from mtp_gguf.server.upstream_source import base, base_names, fetch_archive
from support import generation
from support.generation import take
from support.models import Dial

STRUCTS = {"model": llama_cpp.llama_model_params, "context": llama_cpp.llama_context_params}
LATER = {("context", "moe_cache_cpu_share")}  # of llama.cpp 1.0, of which no package has the header
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]
load = partial(generation.load, depth=2)


def fields_of(parameters: str, name: str) -> set[str]:
    """The fields of a struct in a base's llama.h."""
    with tarfile.open(fetch_archive(name)) as archive:
        header = archive.extractfile(str(base(name).folder / "include" / "llama.h"))
        assert header is not None
        text = re.sub(r"//.*", "", header.read().decode())
    struct = re.search(rf"struct llama_{parameters}_params \{{(.*?)\}};", text, re.DOTALL)
    assert struct
    names = re.findall(r"(\w+)\s*;", struct[1])
    assert len(names) > 15
    return set(names)


@pytest.mark.upstream
@pytest.mark.thorough
@pytest.mark.parametrize("parameters", STRUCTS)
def test_every_field_is_decided(parameters: str) -> None:
    """A field of another llama.cpp belongs into native/src/session_fields.h, with a reason."""
    listed = {name for of, name in session_fields() if of == parameters}
    later = {name for of, name in LATER if of == parameters}
    found = set().union(*(fields_of(parameters, name) for name in base_names()))
    assert found | later == listed
    assert {name for name, *_ in STRUCTS[parameters]._fields_} <= listed
    for (of, name), why in session_fields().items():
        assert why in {KEPT, PLACED} or len(why) > 10, (of, name)


def changed(value: Any) -> Any:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else 1  # a pointer


@pytest.mark.parametrize("gpu", [False, True])
def test_a_changed_field_is_refused_unless_it_is_harmless(
    dial: Dial, monkeypatch: pytest.MonkeyPatch, gpu: bool
) -> None:
    """Also one that nobody has listed."""
    device = "Vulkan0" if gpu else "CPU"
    monkeypatch.setattr(session_identity, "device_name", lambda _: device)
    compared = {KEPT, PLACED} if gpu else {KEPT}
    rules = session_fields()
    unlisted = ("context", "n_threads")
    listed = {field: why for field, why in rules.items() if field != unlisted}
    monkeypatch.setattr(session_identity, "session_fields", lambda: listed)
    with load(dial("tiny")) as llm:
        saved = identity_of(llm)
        for parameters, struct in STRUCTS.items():
            original = getattr(llm, f"{parameters}_params")
            for name, *_ in struct._fields_:
                other = struct.from_buffer_copy(original)
                setattr(llm, f"{parameters}_params", other)
                if name in {"tensor_split", "tensor_buft_overrides"}:  # of which Python has copies
                    continue
                value = getattr(original, name)
                if not isinstance(value, bool | int | float | None):
                    continue  # a callback
                setattr(other, name, changed(value))
                here = identity_of(llm)
                if rules[parameters, name] in compared or (parameters, name) == unlisted:
                    with pytest.raises(RequestError, match=f": {name}: expected .*, found "):
                        check_identity(Path("a"), saved, here)
                else:
                    assert here == saved, name
            setattr(llm, f"{parameters}_params", original)
        llm.tensor_split = [1.0, 2.0]
        llm._mtp_options["n_cpu_moe"] = 3
        differing = {name for name, value in identity_of(llm).items() if saved.get(name) != value}
        assert differing == ({"tensor_split", "tensor_buft_overrides"} if gpu else set())


def test_what_is_left_out_changes_no_token(dial: Dial, tmp_path: Path) -> None:
    """A session goes on under other values of the harmless options that MTPLlama takes."""
    path, file = dial("tiny"), tmp_path / "a.session"
    with load(path) as llm:
        take(llm, 8, PROMPT)
        llm.save_session(file)
        want = take(llm, 16, [*PROMPT, 3, 4])
    rules = session_fields()
    for options in (
        {"n_ctx": 512},
        {"n_batch": 64},
        {"n_ubatch": 32},
        {"n_threads": 2},
        {"n_threads_batch": 2},
        {"no_perf": True},
        {"use_mlock": True},
        {"use_mmap": False},
        {"rollback": "checkpoint"},
    ):
        (name,) = options
        assert rules.get(("context", name), "an option") not in {KEPT, PLACED}
        with load(path, **options) as llm:
            llm.load_session(file)
            assert take(llm, 16, [*PROMPT, 3, 4]) == want, name


def test_versions_and_machine_are_compared(dial: Dial, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(dial("tiny")) as llm:
        saved = identity_of(llm)
        monkeypatch.setattr(llama_cpp, "LLAMA_STATE_SEQ_VERSION", 99, raising=False)
        monkeypatch.setattr(llama_cpp, "llama_print_system_info", lambda: b"another CPU")
        monkeypatch.setattr(session_identity, "loaded_versions", lambda: "ggml 9")
        monkeypatch.setattr(session_identity, "kernels", lambda: "others")
        here = identity_of(llm)
        changes = {name for name in here if here[name] != saved[name]}
        assert changes == {"state", "system", "llama.cpp", "kernels"}

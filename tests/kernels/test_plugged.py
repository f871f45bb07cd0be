"""The library of native/kernels in libraries and programs without patches."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mtp_gguf.gguf_tools.machine.system import shared_library
from mtp_gguf.native.runtime import VARIABLE, native_library
from support import llama_libraries
from support.commands import MAIN, refused, succeed
from support.kernels.results import Sweep
from support.kernels.sweep import OPERATIONS
from support.llama_libraries import CHOICE, STOCK, stock_libraries
from support.models import ROOT, Models

SOURCES = ROOT / "native" / "kernels"
SAY = """
import json
from mtp_gguf.native.runtime import plugged_kernels as found
print(json.dumps([found.instructions, found.reason, found.operations()]))
"""
# llama_cpp alone, without this package; the library in the process tells what it computed
GENERATE = """
import ctypes, json, sys
import llama_cpp
llm = llama_cpp.Llama(sys.argv[1], n_ctx=128, n_threads=2, verbose=False)
text = llm("def is_prime(n):", max_tokens=12, temperature=0)["choices"][0]["text"]
kernels = ctypes.CDLL(sys.argv[2])
kernels.mtp_kernels_computed.restype = ctypes.c_long
print(json.dumps([text, kernels.mtp_kernels_computed(b"MUL_MAT")]))
"""
# What programs that are run as BEGIN + PROGRAM begin with
BEGIN = """
import ctypes, json, sys
import numpy as np
from hashlib import sha256
from pathlib import Path
from support.kernels.ggml_calls import F32, I32, TYPES, Ggml
ggml = Ggml(*map(Path, sys.argv[1:]))
"""
RMS_NORM = """
norm = ggml.base.ggml_rms_norm
x = np.random.default_rng(1).standard_normal((3, 100), np.float32)
y = ggml.run(2, lambda c, t: norm(c, *t, 1e-6), [(F32, (100, 3), x)]).reshape(3, 100)
exact = x / np.sqrt((x.astype(float) ** 2).mean(axis=1, keepdims=True) + 1e-6)
likeliest = ggml.likeliest(x).tolist() == x.argmax(axis=1).tolist()
left = ggml.plugged.left_to_ggml()
print(json.dumps([ggml.plugged.instructions, float(abs(y - exact).max()), likeliest, left]))
"""

# A norm times a row of weights, and the weighted sum of experts, which patched libraries fuse
FUSED = """
norm = ggml.base.ggml_rms_norm
random = np.random.default_rng(1)
x, w = random.standard_normal((3, 100), np.float32), random.standard_normal(100, np.float32)
inputs = [(F32, (100, 3), x), (F32, (100,), w)]
y = ggml.run(2, lambda c, t: ggml.base.ggml_mul(c, norm(c, t[0], 1e-6), t[1]), inputs)
exact = x / np.sqrt((x.astype(float) ** 2).mean(axis=1, keepdims=True) + 1e-6) * w
off = [float(abs(y.reshape(3, 100) - exact).max())]
x, w = random.standard_normal((3, 4, 100), np.float32), random.standard_normal((3, 4), np.float32)
y = ggml.weighted_sum(x, w, 2, apart=False, in_place=False)
off.append(float(abs(y - (x * w[..., None]).sum(axis=1)).max()))
print(json.dumps([ggml.plugged.instructions, off, ggml.plugged.left_to_ggml()]))
"""

# Operations on tensors that lie in different ways; which of them were computed by the library
LAYOUTS = """
computed, right = {}, []
def compute(name, operation, run, expected):
    run()  # with the small case, if there is one
    before = ggml.plugged.computed(operation)
    right.append(bool((run() == expected).all()))
    computed[name] = ggml.plugged.computed(operation) > before
x = np.random.default_rng(1).standard_normal((6, 20), np.float32)
def joined(step):
    def build(c, t):
        some = ggml.base.ggml_view_2d(c, t[0], 20, 6 // step, step * 80, 0)
        return ggml.base.ggml_concat(c, some, some, 0)
    return ggml.run(2, build, [(F32, (20, 6), x)]).reshape(6 // step, 40)
compute("contiguous", "CONCAT", lambda: joined(1), np.tile(x, (1, 2)))
compute("strided", "CONCAT", lambda: joined(2), np.tile(x[::2], (1, 2)))
long = np.random.default_rng(2).standard_normal((2, 16389), np.float32)
for name, in_place in {"apart": False, "in place": True}.items():
    compute(name, "SCALE", lambda: ggml.scaled(long, 0.5, 2, in_place=in_place), long * 0.5)
compute("anywhere", "ARGMAX", lambda: ggml.likeliest(x), x.argmax(axis=1))
print(json.dumps([computed, right, ggml.plugged.left_to_ggml()]))
"""

# One allocation after the other fails: when the library plugs in, and when it proves a kind of
# operation, each with rows of another length; then all of them
NO_MEMORY = """
import ctypes, json, sys
import numpy as np
from pathlib import Path
from support.kernels.ggml_calls import Ggml
folder, library = map(Path, sys.argv[1:])
own = ctypes.CDLL(str(library))
own.mtp_kernels_reason.restype = ctypes.c_char_p
ggml = Ggml(folder)
cpu, refused = str(folder / "libggml-cpu.so").encode(), []
for n in range(1000):
    own.fail_allocations_after(n)
    if own.mtp_kernels_plug_in(cpu) == 0:
        break
    refused.append(own.mtp_kernels_reason().decode())
own.fail_allocations_after(-1)
ggml = Ggml(folder, library)
right = True
def scale(length):
    x = np.ones((2, length), np.float32)
    return bool((ggml.scaled(x, 0.5, 2, in_place=False) == 0.5).all())
for n in range(40):
    own.fail_allocations_after(n)
    right &= scale(16400 + n)
own.fail_allocations_after(-1)
right &= scale(20000)
before = ggml.plugged.computed("SCALE")
own.fail_allocations_after(0)
right &= scale(20000)
own.fail_allocations_after(-1)
computed = ggml.plugged.computed("SCALE") - before
print(json.dumps([refused, right, computed, ggml.plugged.left_to_ggml()]))
"""

# Rows that are copied in slices, fewer than threads
LONG_ROWS = """
x = np.random.default_rng(1).standard_normal((5, 20011), np.float32)
copied = ggml.copy_strided(x[:2], 3)
ids = np.array([4, 1], np.int32)
inputs = [(F32, (20011, 5), x), (I32, (2,), ids)]
found = ggml.run(3, lambda c, t: ggml.base.ggml_get_rows(c, *t), inputs).reshape(2, -1)
same = (copied[::2] == x[:2]).all() and (copied[1::2] == 1).all() and (found == x[ids]).all()
print(json.dumps([bool(same), ggml.plugged.computed("CPY"), ggml.plugged.left_to_ggml()]))
"""
# A prompt after a single token: other code, which is tried out on its own
ONE_THEN_MANY = """
weights = ggml.encode(TYPES["Q4_K"], np.ones((4, 512), np.float32))
counts = []
for columns in (0, 1, 1, 9):
    before = ggml.plugged.computed("MUL_MAT")
    ggml.product(TYPES["Q4_K"], weights, 4, np.ones((columns, 512), np.float32), 2)
    counts.append(ggml.plugged.computed("MUL_MAT") - before)
print(json.dumps(counts))
"""
# With two types that have no kernels
TYPES_COMPUTED = """
computed = []
for name, number in {**TYPES, "TQ1_0": 34, "Q1_0": 41}.items():
    before = ggml.plugged.computed("MUL_MAT")
    weights = np.zeros(4 * ggml.base.ggml_row_size(number, 512), np.uint8)
    ggml.product(number, weights, 4, np.ones((4, 512), np.float32), 2)
    if ggml.plugged.computed("MUL_MAT") > before:
        computed.append(name)
print(json.dumps([computed, sorted(ggml.plugged.types())]))
"""
# In a fork whose Q2_0 has blocks of 128
OTHER_BLOCKS = """
before = ggml.plugged.types()
traits = ggml.base.ggml_get_type_traits(TYPES["Q2_0"])
page = ctypes.addressof(traits.contents) // 4096 * 4096
assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(page), 8192, 3) == 0
traits.contents.elements, traits.contents.bytes = 128, 34
weights = np.zeros(8 * ggml.base.ggml_row_size(TYPES["Q2_0"], 512), np.uint8)
ggml.strided_product(TYPES["Q2_0"], weights, 4, np.ones((4, 512), np.float32), 2)
print(json.dumps([sorted(before - ggml.plugged.types()), ggml.plugged.computed("MUL_MAT")]))
"""

PLUG_IN_AGAIN = """
import json, sys
from pathlib import Path
from mtp_gguf.native.libraries.plugged_kernels import plug_in
from mtp_gguf.native.runtime import llama_cpp
print(json.dumps(plug_in(Path(sys.argv[1]), llama_cpp.llama_cpp._lib).reason))
"""
# Products of all types whose bits are the same on every path
BITS = """
from support.kernels.sweep import EXACT, columns, encoded_weights
found = {}
for name in EXACT:
    encoded = encoded_weights(ggml, name, 768, 75)
    each = [ggml.product(TYPES[name], encoded, 75, columns(768)[:n], 2) for n in (1, 4, 8, 9, 33)]
    found[name] = sha256(b"".join(y.tobytes() for y in each)).hexdigest()
print(json.dumps([ggml.plugged.instructions, ggml.plugged.left_to_ggml(), found]))
"""

# Two models that compute at the same time, as four threads wait for each of them
TWO_MODELS = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from mtp_gguf.native import MTPLlama
from mtp_gguf.native.runtime import plugged_kernels
options = {"n_ctx": 256, "n_threads": 2, "depth": 2, "verbose": False}
with MTPLlama(sys.argv[1], **options) as first, MTPLlama(sys.argv[2], **options) as second:
    def text(i):
        llm = (first, second)[i % 2]
        found = llm.create_completion([3, 4, 5, 6 + i], max_tokens=16, temperature=0)
        return found["choices"][0]["text"]
    alone = [text(i) for i in range(8)]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(text, [i for _ in range(4) for i in range(8)]))
wrong = sum(found != alone[i % 8] for i, found in enumerate(together))
print(json.dumps([wrong, len(set(alone)), plugged_kernels.computed("MUL_MAT")]))
"""
# kB in pages of 2 MiB of a buffer with keys and values of 16 MiB each, after attention of one query
# and of many
HUGE_PAGES = """
for name, kind in ("get_base", ctypes.c_void_p), ("get_size", ctypes.c_size_t):
    function = getattr(ggml.base, f"ggml_backend_buffer_{name}")
    function.argtypes, function.restype = [ctypes.c_void_p], kind
free = ggml.base.ggml_backend_buffer_free
found = []
def look_and_free(buffer):
    begin = ggml.base.ggml_backend_buffer_get_base(buffer)
    end = begin + ggml.base.ggml_backend_buffer_get_size(buffer)
    kilobytes = inside = 0
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *words = line.split()
        if not first.endswith(":"):
            low, high = (int(word, 16) for word in first.split("-"))
            inside = low < end and begin < high
        elif first == "AnonHugePages:" and inside:
            kilobytes += int(words[0])
    found.append(kilobytes)
    free(buffer)
ggml.base.ggml_backend_buffer_free = look_and_free
cache = np.ones((2, 16384, 256), np.float32)
off = 0.0
for n in (1, 16):
    mask = np.zeros((n, 16384), np.float32)
    y = ggml.attention(np.ones((4, n, 256), np.float32), cache, cache, mask, 2)
    off = max(off, float(abs(y - 1).max()))
print(json.dumps([found, off]))
"""
# A program that closes a copy of the library while ggml may still call it; the package's own is off
UNLOAD = """
import _ctypes, ctypes, json, os, sys
import numpy as np
from pathlib import Path
from support.kernels.ggml_calls import TYPES, Ggml
folder, library = map(Path, sys.argv[1:])
del os.environ["MTP_GGUF_KERNELS"]
ggml = Ggml(folder, library)
handle = ctypes.CDLL(str(library))._handle
for _ in range(2):  # ours and that of plug_in
    _ctypes.dlclose(handle)
ones = np.ones((4, 512), np.float32)
found = ggml.product(TYPES["Q4_K"], ggml.encode(TYPES["Q4_K"], ones), 4, ones, 2)
again = ctypes.CDLL(str(library))
again.mtp_kernels_computed.restype = ctypes.c_long
status = again.mtp_kernels_plug_in(str(folder / "libggml-cpu.so").encode())
print(json.dumps([float(abs(found - 512).max()), status, again.mtp_kernels_computed(b"MUL_MAT")]))
"""

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="Windows has no such library")


@pytest.fixture(autouse=True)
def _needs_kernels(has_kernels: bool) -> None:
    if not has_kernels:
        pytest.skip("this CPU has no AVX2, or no dot products")


@pytest.mark.thorough
def test_the_sweep_was_computed_by_the_library(sweep: Sweep) -> None:
    found = sweep("")
    computed = dict(zip(OPERATIONS, found["computed"].tolist(), strict=True))
    unused = {"RMS_NORM"}  # not in the sweep
    assert {name for name, count in computed.items() if count == 0} == unused
    assert found["left to ggml"].tolist() == []


@pytest.mark.parametrize(
    ("choice", "operations"),
    [
        ("", {*OPERATIONS, "GET_ROWS"}),
        ("avx2,dotprod", {*OPERATIONS, "GET_ROWS"}),
        ("MUL_MAT,SSM_CONV", {"MUL_MAT", "SSM_CONV"}),
        ("0", set()),
    ],
)
def test_the_variable_chooses(choice: str, operations: set[str]) -> None:
    instructions, reason, found = llama_libraries.answer(STOCK, SAY, **{CHOICE: choice})
    assert set(found) == operations
    if choice == "0":
        assert (instructions, reason) == (None, f"{CHOICE}=0")
    else:
        assert (instructions or "").startswith(("AVX", "NEON"))
        assert reason == ""


def test_libraries_with_hooks_compute_replays_too() -> None:
    _, _, found = llama_libraries.answer(llama_libraries.FAST, SAY)
    assert set(found) == {*OPERATIONS, "GET_ROWS", "GATED_DELTA_NET_REPLAY"}


def test_a_second_copy_is_refused(tmp_path: Path) -> None:
    copy = shutil.copy(native_library("mtp_kernels"), tmp_path)
    said = llama_libraries.answer(llama_libraries.FAST, PLUG_IN_AGAIN, copy)
    assert "another copy of the kernels is plugged in" in said


def test_info_says_what_is_plugged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, STOCK)
    done = subprocess.run(
        [sys.executable, "-c", MAIN, "info"], capture_output=True, text=True, check=True
    )
    line = next(line for line in done.stdout.splitlines() if line.startswith("kernels: "))
    assert "MUL_MAT" in line
    assert "not fused, which takes libraries with patches/" in line


def test_greedy_text_is_the_same_at_every_depth_on_stock_libraries(models: Models) -> None:
    work = {"depths": [0, 1, 2, 4], "prompts": [7, 40], "tokens": 40, "threads": 2, "n_ctx": 512}
    words = (models.convert("demo"), json.dumps(work))
    printed = llama_libraries.run_on(STOCK, "greedy_texts", *words, timeout=300)
    texts = [found["texts"] for found in json.loads(printed.splitlines()[-1])]
    assert len(texts) == 4
    assert texts == texts[:1] * 4


def with_kernels(folder: Path, name: str, *others: str) -> Path:
    """The library with the kernels of another file, and with other files."""
    library = folder / shared_library(name)
    support = Path(__file__).parents[1] / "support" / "kernels"
    kernels = [support / f"{name}_kernels.cpp", *(support / other for other in others)]
    include = Path(llama_libraries.stock_libraries()).parents[1] / "include"
    command = [
        *("c++", "-std=c++17", "-shared", "-fPIC", "-fvisibility=hidden", "-o", library, *kernels),
        *(f"-I{folder}" for folder in (SOURCES / "include", SOURCES / "src", include)),
        *SOURCES.glob("src/*.cpp"),
        *("-ldl", "-pthread", "-Wl,-Bsymbolic"),
    ]
    subprocess.run([str(word) for word in command], check=True)
    return library


@pytest.fixture(scope="module")
def wrong_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library with the kernels of wrong_kernels.cpp."""
    return with_kernels(tmp_path_factory.mktemp("wrong"), "wrong")


@pytest.mark.thorough
def test_kernels_with_other_results_are_left_to_ggml(wrong_library: Path) -> None:
    words = (stock_libraries(), wrong_library)
    name, off, likeliest, left = llama_libraries.answer(STOCK, BEGIN + RMS_NORM, *words)
    assert name == "WRONG"
    assert off < 1e-5
    assert likeliest
    assert len(left) == 1
    assert left[0].startswith("RMS_NORM of f32 is left to ggml: its results differ by ")


@pytest.mark.thorough
def test_a_fusion_is_not_used_where_a_part_of_it_is_wrong(
    wrong_library: Path, libraries: Path
) -> None:
    name, off, left = llama_libraries.answer(libraries, BEGIN + FUSED, libraries, wrong_library)
    assert name == "WRONG"
    assert max(off) < 1e-5
    assert [line.partition(":")[0] for line in left] == [
        "MUL is not computed with what follows it",
        "RMS_NORM of f32 is left to ggml",
    ]


@pytest.mark.thorough
def test_every_layout_is_proved_for_itself(tmp_path: Path) -> None:
    library, stock = with_kernels(tmp_path, "careless"), stock_libraries()
    computed, right, left = llama_libraries.answer(stock, BEGIN + LAYOUTS, stock, library)
    assert right == [True] * 5
    assert {name for name, here in computed.items() if here} == {"contiguous", "apart"}
    assert [line.split()[0] for line in left] == ["CONCAT", "SCALE", "ARGMAX"]


@pytest.mark.thorough
@pytest.mark.skipif(sys.platform == "darwin", reason="its linker has no -Bsymbolic")
def test_without_memory_operations_are_left_to_ggml(tmp_path: Path) -> None:
    stock = stock_libraries()
    library = with_kernels(tmp_path, "careless", "failing_new.cpp")
    refused, right, computed, left = llama_libraries.answer(stock, NO_MEMORY, stock, library)
    assert set(refused) == {"no memory"}
    assert right
    assert computed == 1  # what was proved before is computed without any
    assert left
    assert set(left) == {"SCALE of f32 is left to ggml: a small case of it cannot be computed"}


@pytest.mark.thorough
def test_threads_and_forked_children() -> None:
    words = (stock_libraries(), native_library("mtp_kernels"))
    found = json.loads(llama_libraries.run_on(STOCK, "kernels.threads", *words, timeout=300))
    assert found["wrong"] == 0
    assert found["child"] == 0
    assert min(found["computed"]) > 300


def test_eight_threads_on_two_models(models: Models) -> None:
    files = (models.convert("demo"), models.convert("moe-mixed"))
    wrong, texts, computed = llama_libraries.answer(STOCK, TWO_MODELS, *files)
    assert (wrong, texts) == (0, 8)
    assert computed > 1000


def test_the_library_stays_when_it_is_closed(tmp_path: Path) -> None:
    words = (stock_libraries(), shutil.copy(native_library("mtp_kernels"), tmp_path))
    off, status, computed = llama_libraries.answer(STOCK, UNLOAD, *words, **{CHOICE: "0"})
    assert off < 1
    assert status == 0
    assert computed > 0


@pytest.mark.thorough
@pytest.mark.skipif(platform.machine() != "x86_64", reason="the paths of x86-64")
def test_quants_have_the_same_bits_on_every_path() -> None:
    words = (stock_libraries(), native_library("mtp_kernels"))
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
    paths = {"": "avx2", "avx512": "avx512bw", "avx_vnni": "avx_vnni", "avx2": "avx2"}
    found = {
        path: llama_libraries.answer(STOCK, BEGIN + BITS, *words, **{CHOICE: path})
        for path, flag in paths.items()
        if flag in flags
    }
    best = found.pop("")
    for path, (instructions, left, bits) in found.items():
        assert (instructions, left, bits) == (path.upper(), [], best[2])
        for how in (
            "no_hint,one_stream,rows",
            "hint,two_streams,rows",
            "hint,two_streams,panels",
            "no_hint,two_streams,panels",
        ):
            words_of = {CHOICE: f"fixed,{path},{how}"}
            again = llama_libraries.answer(STOCK, BEGIN + BITS, *words, **words_of)
            assert again == [instructions, [], bits], how
    for how in ("no_amx", "amx"):  # which makes no difference where the CPU has no tiles
        words_of = {CHOICE: f"fixed,{how}"}
        assert llama_libraries.answer(STOCK, BEGIN + BITS, *words, **words_of) == best, how


def test_long_rows_are_copied_by_all_threads() -> None:
    stock, library = stock_libraries(), native_library("mtp_kernels")
    same, copies, left = llama_libraries.answer(stock, BEGIN + LONG_ROWS, stock, library)
    assert (same, left) == (True, [])
    assert copies == 2  # that of the small case, too


def test_a_prompt_moves_a_long_cache_to_huge_pages_and_a_token_one_page() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[madvise]" not in setting.read_text("ascii"):
        pytest.skip("this system has no such pages, or moves memory by itself")
    if tuple(map(int, platform.release().split(".")[:2])) < (6, 1):
        pytest.skip("this Linux moves memory later")
    if platform.machine() != "x86_64":
        pytest.skip("attention is computed on x86-64 only")
    words = (stock_libraries(), native_library("mtp_kernels"))
    found, off = llama_libraries.answer(STOCK, BEGIN + HUGE_PAGES, *words)
    one, many = found
    assert one <= 2 << 10  # the time of a token is not for all of a cache
    assert many >= 24 << 10
    assert off < 1e-3


def test_each_path_is_tried_out_before_it_is_used() -> None:
    stock, library = stock_libraries(), native_library("mtp_kernels")
    one_candidate = {CHOICE: "avx2,dotprod,no_hint,one_stream"}
    counts = llama_libraries.answer(stock, BEGIN + ONE_THEN_MANY, stock, library, **one_candidate)
    assert counts == [0, 2, 1, 2]  # with and without a small case; of no columns there is none


def test_the_types_are_those_whose_products_are_computed() -> None:
    stock, library = stock_libraries(), native_library("mtp_kernels")
    computed, said = llama_libraries.answer(stock, BEGIN + TYPES_COMPUTED, stock, library)
    assert sorted(computed) == said
    assert "Q4_K" in said


@pytest.mark.skipif(platform.machine() != "x86_64", reason="NEON has no kernels for Q2_0")
def test_a_type_with_other_blocks_is_left_to_ggml() -> None:
    stock, library = stock_libraries(), native_library("mtp_kernels")
    assert llama_libraries.answer(stock, BEGIN + OTHER_BLOCKS, stock, library) == [["Q2_0"], 0]


@pytest.mark.parametrize("operations", ["0", "RMS_NORM"])
def test_no_types_without_products(operations: str) -> None:
    say = "import json; from mtp_gguf.native.runtime import plugged_kernels as found; "
    say += "print(json.dumps(sorted(found.types())))"
    assert llama_libraries.answer(STOCK, say, MTP_GGUF_KERNELS=operations) == []


@pytest.mark.skipif(sys.platform == "darwin", reason="the loader of macOS preloads otherwise")
def test_a_preloaded_library_is_plugged_in_once() -> None:
    preloaded = {"LD_PRELOAD": str(native_library("mtp_kernels"))}
    instructions, reason, _ = llama_libraries.answer(STOCK, SAY, **preloaded)
    assert instructions
    assert reason == ""


def generated(models: Models, *before: str, **environment: str) -> tuple[str, int]:
    """The text that llama_cpp generates in a process of its own, and the products computed."""
    words = [str(models.convert("demo")), str(native_library("mtp_kernels"))]
    done = subprocess.run(
        [*before, sys.executable, "-c", GENERATE, *words],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    text, computed = json.loads(done.stdout.splitlines()[-1])
    return text, computed


KERNELS = (sys.executable, "-c", MAIN, "kernels", "--")


@pytest.mark.skipif(sys.platform == "darwin", reason="the loader of macOS preloads otherwise")
def test_a_program_gets_them_by_its_environment(models: Models) -> None:
    llama_libraries.skip_where_stock_crashes(models.convert("demo"))
    plain, without = generated(models)
    text, computed = generated(models, *KERNELS)
    assert without == 0
    assert computed > 100
    assert text == plain
    assert generated(models, *KERNELS, **{CHOICE: "0"})[1] == 0


def compiled(path: Path, source: str) -> Path:
    """A shared library of `source`, in C."""
    text = path.with_suffix(".c")
    text.write_text(source, encoding="utf-8")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(path), str(text)], check=True)
    text.unlink()
    return path


def variant(path: Path, score: int) -> Path:
    """A CPU backend that runs here with this score, and returns itself as the registration."""
    return compiled(
        path,
        f"int ggml_backend_score(void) {{ return {score}; }}\n"
        f"static int me = {score};\nvoid * ggml_backend_init(void) {{ return &me; }}\n",
    )


def test_a_folder_of_backends_gets_them_installed(tmp_path: Path) -> None:
    for name, score in {"a": 3, "b": 70, "c": 0}.items():
        variant(tmp_path / f"libggml-cpu-{name}.so", score)
    before = sorted(tmp_path.iterdir())
    assert "installed" in succeed("kernels", "install", tmp_path)
    backend = tmp_path / "libggml-cpu-mtp.so"
    load = (
        "import ctypes, sys\nb = ctypes.CDLL(sys.argv[1])\n"
        "b.ggml_backend_init.restype = ctypes.POINTER(ctypes.c_int)\n"
        "print(b.ggml_backend_score() > 70, b.ggml_backend_init()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", load, str(backend)], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["True", "70"]
    # the stand-in is no ggml
    assert "not used: " in done.stderr
    assert "expected a libggml-cpu" in done.stderr
    succeed("kernels", "uninstall", tmp_path)
    assert sorted(tmp_path.iterdir()) == before
    assert "not installed" in succeed("kernels", "uninstall", tmp_path)


def test_what_kernels_refuses(tmp_path: Path) -> None:
    refused(tmp_path, "kernels", "install", tmp_path, words=("expected libggml-cpu-*.so",))
    refused(tmp_path, "kernels", "--", "no-such-program", words=("found none of this name",))
    main = tmp_path / "main.c"
    main.write_text(
        'const char * name = "ggml_backend_cpu_init"; int main(void) { return name[0]; }\n'
    )
    program = tmp_path / "static"
    subprocess.run(["cc", "-o", str(program), str(main)], check=True)
    refused(tmp_path, "kernels", "--", program, words=("found ggml in the program itself",))

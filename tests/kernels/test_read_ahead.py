"""Experts that are mapped from a file and not in memory are asked for at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest

from mtp_gguf.native.runtime import native_library
from support.llama_libraries import answer, stock_libraries

EXPERTS, ROWS, COLUMNS = 32, 256, 1024
PAGES = ROWS * COLUMNS * 2 // 4096  # of an expert

# Products with experts of a mapped file, each with others; the page faults of each that read from
# the disk, which maps single pages, and how far the last product is from NumPy's
PRODUCTS = """
import ctypes, json, mmap, os, resource, sys
import numpy as np
from pathlib import Path
from support.kernels.ggml_calls import F16, F32, I32, Ggml
folder, library, path = map(Path, sys.argv[1:4])
experts, rows, columns = map(int, sys.argv[4:])
ggml = Ggml(folder, library)
pointer, size = ctypes.c_void_p, ctypes.c_size_t
adopt, place = ggml.base.ggml_backend_cpu_buffer_from_ptr, ggml.base.ggml_backend_tensor_alloc
adopt.restype, adopt.argtypes = pointer, [pointer, size]
place.restype, place.argtypes = ctypes.c_int, [pointer, pointer, pointer]
with path.open("rb") as file:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
mapped.madvise(mmap.MADV_RANDOM)
weights = np.frombuffer(mapped, np.float16).reshape(experts, rows, columns)
x = np.random.default_rng(2).standard_normal((1, 1, columns), np.float32)
def product(ids):
    def build(context, tensors):
        w = ggml.base.ggml_new_tensor_4d(context, F16, columns, rows, experts, 1)
        place(adopt(weights.ctypes.data, weights.nbytes), w, weights.ctypes.data)
        return ggml.base.ggml_mul_mat_id(context, w, *tensors)
    inputs = [(F32, (columns, 1, 1), x), (I32, (len(ids), 1), np.array([ids], np.int32))]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_majflt
    y = ggml.run(2, build, inputs)
    return resource.getrusage(resource.RUSAGE_SELF).ru_majflt - before, y.reshape(-1, rows)
faults = [product(ids)[0] for ids in ([0, 1], [2, 3], [4, 5])]
last, y = product([6, 7])
off = abs(y - weights[6:8].astype(np.float32) @ x.reshape(-1)).max()
print(json.dumps([[*faults, last], float(off)]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a thread what it has read")
def test_experts_are_read_at_once(tmp_path: Path) -> None:
    path = tmp_path / "experts.bin"
    random = np.random.default_rng(1).standard_normal((EXPERTS, ROWS, COLUMNS), np.float32)
    with path.open("wb") as file:
        file.write((random / 32).astype(np.float16).tobytes())
        file.flush()
        os.fsync(file.fileno())
    stock = stock_libraries()
    words = (stock, native_library("mtp_kernels"), path, EXPERTS, ROWS, COLUMNS)
    one_by_one, off = answer(stock, PRODUCTS, *words, MTP_GGUF_READ_AHEAD="0")
    at_once, same = answer(stock, PRODUCTS, *words)
    print(one_by_one, at_once)
    assert off == same < 1e-2
    if min(one_by_one) < PAGES:
        pytest.skip("the file system keeps the file in memory")
    assert max(at_once[1:]) <= PAGES / 10  # the first product may have to show that a disk is read

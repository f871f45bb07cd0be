"""Compare quantizer throughput with ggml_quantize_chunk's, by type and number of threads.

    python benchmarks/quantize.py [--types Q4_K Q6_K] [--threads 1 2] [--source BF16] [--weighted]
        [--rounds 7] [--values 2000000]

Throughput is in gigabytes of input per second. Values are heavy-tailed like trained weights. Each
side gets its own input type: ggml rows of F32 (the time to convert them is not counted), ours the
source type; bytes are those of the source type for both. The two alternate in one process, round by
round, and each thread has its own matrix. The table shows the median throughput of all threads
together, and the median over the rounds of the ratio of CPU time: this is the gain per core, which
other load on the machine affects little. MTP_QUANTIZE_TARGET=avx2 (sse2, neon) forces an
instruction set.
"""

import ctypes
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ml_dtypes
import numpy as np
from measuring import options
from numpy.typing import NDArray

from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.native.runtime import loaded_library
from mtp_gguf.quantize import quantizer

TYPES = ("Q4_K", "Q5_K", "Q6_K", "Q8_0", "Q4_0", "Q2_K", "Q3_K", "IQ4_NL", "IQ4_XS", "F16")
SOURCES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
COLUMNS = 4096


def upstream() -> Callable[..., int]:
    """Return ggml_quantize_chunk of the libggml-base that llama_cpp has loaded."""
    function = ctypes.CDLL(str(loaded_library("ggml-base"))).ggml_quantize_chunk
    function.restype = ctypes.c_size_t
    pointer, size = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [ctypes.c_int, pointer, pointer, size, size, size, pointer]
    return function


def matrices(count: int, values: int) -> list[NDArray[np.float32]]:
    rng = np.random.default_rng(0)
    shape = max(values // COLUMNS, 1), COLUMNS
    return [np.asarray(rng.standard_t(5, shape) * 0.02, np.float32) for _ in range(count)]


def seconds(
    pool: ThreadPoolExecutor, work: Callable[[Any], object], items: list[Any]
) -> tuple[float, float]:
    """Return the wall time for all items, one per thread, and their total CPU time."""

    def timed(item: Any) -> float:
        began = time.thread_time()
        work(item)
        return time.thread_time() - began

    began = time.perf_counter()
    busy = sum(pool.map(timed, items))
    return time.perf_counter() - began, busy


def main() -> None:
    parser = options(__doc__, {"--rounds": 7, "--values": 2_000_000})
    parser.add_argument("--types", nargs="+", default=TYPES, choices=TYPES)
    parser.add_argument("--threads", nargs="+", type=int, default=[1])
    parser.add_argument("--source", default="BF16", choices=SOURCES)
    parser.add_argument("--weighted", action="store_true", help="use importance weights")
    arguments = parser.parse_args()

    chunk = upstream()
    importance = np.random.default_rng(1).random(COLUMNS, np.float32) + np.float32(0.1)
    weights = importance if arguments.weighted else None
    print("type    threads  kernel   ggml GB/s   ours GB/s   per core")
    for threads in arguments.threads:
        wide = matrices(threads, arguments.values)
        narrow = [m.astype(SOURCES[arguments.source]) for m in wide]
        wide = [m.astype(np.float32) for m in narrow]
        bytes_in = sum(m.nbytes for m in narrow)
        with ThreadPoolExecutor(threads) as pool:
            for name in arguments.types:
                kind = BY_NAME[name]

                def theirs(rows: NDArray[np.float32], kind: Any = kind) -> NDArray[np.uint8]:
                    out = np.empty((len(rows), kind.row_bytes(COLUMNS)), np.uint8)
                    pointer = None if weights is None else weights.ctypes.data
                    chunk(kind.id, rows.ctypes.data, out.ctypes.data, 0, *rows.shape, pointer)
                    return out

                def ours(rows: NDArray[Any], kind: Any = kind) -> NDArray[np.uint8]:
                    return quantizer.quantize_rows(kind, rows, weights)[0]

                if not all(
                    np.array_equal(theirs(a), ours(b)) for a, b in zip(wide, narrow, strict=True)
                ):
                    raise SystemExit(f"{name}: the bytes differ")
                times = [
                    (seconds(pool, theirs, wide), seconds(pool, ours, narrow))
                    for _ in range(arguments.rounds)
                ]
                theirs_s = statistics.median(wall for (wall, _), _ in times)
                ours_s = statistics.median(wall for _, (wall, _) in times)
                ratio = statistics.median(a / b for (_, a), (_, b) in times)
                kernel = quantizer.kernel(kind, arguments.weighted).split(":")[0]
                print(
                    f"{name:7} {threads:7}  {kernel:7} {bytes_in / theirs_s / 1e9:10.3f}"
                    f"  {bytes_in / ours_s / 1e9:10.3f}  {ratio:8.1f} x",
                    flush=True,
                )


if __name__ == "__main__":
    main()

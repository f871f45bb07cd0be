"""Products and attention on ggml's CPU backend, through ctypes on the libraries of one folder.

A process of its own for each folder and setting (`sweep.py`): libraries of one name cannot be
loaded twice, and ggml chooses its kernels once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_bool, c_char_p, c_float, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mtp_gguf.gguf_tools.files.tensor_types import BY_NAME
from mtp_gguf.native.libraries.plugged_kernels import PluggedKernels, plug_in

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]
Input = tuple[int, tuple[int, ...], Any]  # type, shape in ggml's order, data

F32, F16, BF16, I32 = 0, 1, 30, 26
# Types that our kernels multiply with, by the numbers of ggml
TYPES = {
    "F32": F32,
    "F16": F16,
    "BF16": BF16,
    "Q8_0": 8,
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "IQ4_XS": 23,
    "Q4_0": 2,
    "Q4_1": 3,
    "Q5_0": 6,
    "Q5_1": 7,
    "IQ4_NL": 20,
    "MXFP4": 39,
    "NVFP4": 40,
    "Q2_0": 42,
    "Q2_K": 10,
    "Q3_K": 11,
    "TQ2_0": 35,
    "IQ2_XXS": 16,
    "IQ2_XS": 17,
    "IQ2_S": 22,
    "IQ3_XXS": 18,
    "IQ3_S": 21,
}


class Products(Protocol):
    """The interface of `Ggml`, and of `EmulatedGgml` for another CPU."""

    def encode(self, type_: int, values: Floats, /) -> Bytes: ...
    def product(
        self, type_: int, weights: Bytes, rows: int, x: Floats, threads: int, /
    ) -> Floats: ...
    def strided_product(
        self, type_: int, weights: Bytes, rows: int, x: Floats, threads: int, /
    ) -> Floats: ...
    def expert_product(
        self,
        type_: int,
        weights: Bytes,
        rows: int,
        x: Floats,
        ids: npt.NDArray[np.int32],
        threads: int,
        /,
    ) -> Floats: ...


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class TypeTraits(ctypes.Structure):
    """The beginning of ggml_type_traits: the elements and bytes of a block."""

    _fields_ = (
        ("name", c_char_p),
        ("elements", c_int64),
        ("interleaved", c_int64),
        ("bytes", c_size_t),
    )


class _Feature(ctypes.Structure):
    _fields_ = (("name", c_char_p), ("value", c_char_p))


class Ggml:
    """The ggml libraries of `folder`.

    kernels: our kernels' library, to plug into them.
    """

    def __init__(self, folder: Path, kernels: Path | None = None) -> None:
        self.base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        self.cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"))
        tensor, context = c_void_p, c_void_p
        for name, result, *arguments in (
            ("ggml_init", context, _InitParams),
            ("ggml_free", None, context),
            ("ggml_tensor_overhead", c_size_t),
            ("ggml_graph_overhead", c_size_t),
            ("ggml_row_size", c_size_t, c_int, c_int64),
            ("ggml_new_tensor_4d", tensor, context, c_int, *[c_int64] * 4),
            ("ggml_mul", tensor, context, tensor, tensor),
            ("ggml_add", tensor, context, tensor, tensor),
            ("ggml_view_2d", tensor, context, tensor, *[c_int64] * 2, *[c_size_t] * 2),
            ("ggml_mul_mat", tensor, context, tensor, tensor),
            ("ggml_mul_mat_id", tensor, context, tensor, tensor, tensor),
            ("ggml_flash_attn_ext", tensor, context, *[tensor] * 4, *[c_float] * 3),
            ("ggml_gated_delta_net", tensor, context, *[tensor] * 6, c_int64),
            ("ggml_gated_delta_net_replay", tensor, context, *[tensor] * 8, c_int64),
            ("ggml_concat", tensor, context, tensor, tensor, c_int),
            ("ggml_transpose", tensor, context, tensor),
            ("ggml_ssm_conv", tensor, context, tensor, tensor),
            ("ggml_silu", tensor, context, tensor),
            ("ggml_argmax", tensor, context, tensor),
            ("ggml_soft_max", tensor, context, tensor),
            ("ggml_rms_norm", tensor, context, tensor, c_float),
            ("ggml_scale", tensor, context, tensor, c_float),
            ("ggml_scale_inplace", tensor, context, tensor, c_float),
            ("ggml_get_rows", tensor, context, tensor, tensor),
            ("ggml_reshape_4d", tensor, context, tensor, *[c_int64] * 4),
            ("ggml_set_input", None, tensor),
            ("ggml_set_output", None, tensor),
            ("ggml_gallocr_new", c_void_p, c_void_p),
            ("ggml_gallocr_alloc_graph", c_bool, c_void_p, c_void_p),
            ("ggml_gallocr_free", None, c_void_p),
            ("ggml_view_3d", tensor, context, tensor, *[c_int64] * 3, *[c_size_t] * 3),
            ("ggml_view_4d", tensor, context, tensor, *[c_int64] * 4, *[c_size_t] * 4),
            ("ggml_cpy", tensor, context, tensor, tensor),
            ("quantize_row_q8_K_ref", None, c_void_p, c_void_p, c_int64),
            ("ggml_new_graph", c_void_p, context),
            ("ggml_build_forward_expand", None, c_void_p, tensor),
            ("ggml_quantize_chunk", c_size_t, c_int, c_void_p, c_void_p, *[c_int64] * 3, c_void_p),
            ("ggml_fp32_to_bf16_row", None, c_void_p, c_void_p, c_int64),
            ("ggml_bf16_to_fp32_row", None, c_void_p, c_void_p, c_int64),
            ("ggml_get_type_traits", POINTER(TypeTraits), c_int),
            ("ggml_nbytes", c_size_t, tensor),
            ("ggml_backend_alloc_ctx_tensors", c_void_p, context, c_void_p),
            ("ggml_backend_buffer_free", None, c_void_p),
            ("ggml_backend_tensor_set", None, tensor, c_void_p, c_size_t, c_size_t),
            ("ggml_backend_tensor_get", None, tensor, c_void_p, c_size_t, c_size_t),
            ("ggml_backend_graph_compute", c_int, c_void_p, c_void_p),
            ("ggml_backend_free", None, c_void_p),
            ("ggml_backend_reg_get_proc_address", c_void_p, c_void_p, c_char_p),
        ):
            if function := getattr(self.base, str(name), None):  # older versions have fewer
                function.restype, function.argtypes = result, arguments
        for name, result, *arguments in (
            ("ggml_backend_cpu_init", c_void_p),
            ("ggml_backend_cpu_set_n_threads", None, c_void_p, c_int),
            ("ggml_backend_cpu_reg", c_void_p),
            ("ggml_backend_cpu_buffer_type", c_void_p),
        ):
            function = getattr(self.cpu, name)
            function.restype, function.argtypes = result, arguments
        self.plugged = PluggedKernels(None, "not asked for")
        if kernels is not None:
            self.plugged = plug_in(kernels, self.cpu)
        self.backend = self.cpu.ggml_backend_cpu_init()

    def has(self, function: str) -> bool:
        """Whether this version of ggml has a function."""
        return hasattr(self.base, function)

    def types(self) -> tuple[str, ...]:
        """Return the names of the types that this version of ggml has."""
        found = []
        for name, number in TYPES.items():
            traits, known = self.base.ggml_get_type_traits(number).contents, BY_NAME[name]
            # behind an older version's table the size is another, and the name may not be read
            if (traits.elements, traits.bytes) == (known.block_length, known.block_bytes):
                found += [name] if traits.name.decode().upper() == name else []
        return tuple(found)

    def kernels(self) -> str:
        """Return the instruction set of our kernels; "" if none run."""
        return self.plugged.instructions or ""

    def features(self) -> dict[str, str]:
        """Return the features that the CPU backend reports."""
        address = self.base.ggml_backend_reg_get_proc_address(
            self.cpu.ggml_backend_cpu_reg(), b"ggml_backend_get_features"
        )
        get = ctypes.CFUNCTYPE(POINTER(_Feature), c_void_p)(address)
        found: dict[str, str] = {}
        for feature in get(self.cpu.ggml_backend_cpu_reg()):
            if not feature.name:
                break
            found[feature.name.decode()] = feature.value.decode()
        return found

    def encode(self, type_: int, values: Floats) -> npt.NDArray[np.uint8]:
        """Rows [..., n] as the bytes of a type."""
        n = values.shape[-1]
        rows = values.size // n
        out = np.zeros(rows * self.base.ggml_row_size(type_, n), np.uint8)
        source = np.ascontiguousarray(values, np.float32)
        if type_ == F32:
            return source.reshape(-1).view(np.uint8)
        if type_ == BF16:
            self.base.ggml_fp32_to_bf16_row(source.ctypes.data, out.ctypes.data, source.size)
        else:
            self.base.ggml_quantize_chunk(
                type_, source.ctypes.data, out.ctypes.data, 0, rows, n, None
            )
        return out

    def context(self) -> Any:
        """Return a new context for 128 tensors and a graph, without their data."""
        size = self.base.ggml_tensor_overhead() * 128 + self.base.ggml_graph_overhead()
        return self.base.ggml_init(_InitParams(size, None, True))

    def run(
        self, threads: int, build: Any, inputs: Sequence[Input], result_of: int | None = None
    ) -> Floats:
        """Compute `build(context, tensors)`, or all of these in order if it is a list; the (last)
        result, or what input `result_of` is then."""
        context = self.context()
        tensors = [
            self.base.ggml_new_tensor_4d(context, type_, *shape, *[1] * (4 - len(shape)))
            for type_, shape, _ in inputs
        ]
        built = build(context, tensors)
        results = built if isinstance(built, list) else [built]
        result = results[-1]
        graph = self.base.ggml_new_graph(context)
        for each in results:
            self.base.ggml_build_forward_expand(graph, each)
        buffer = self.base.ggml_backend_alloc_ctx_tensors(context, self.backend)
        for tensor, (_, _, data) in zip(tensors, inputs, strict=True):
            raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
            assert raw.size == self.base.ggml_nbytes(tensor)
            self.base.ggml_backend_tensor_set(tensor, raw.ctypes.data, 0, raw.size)
        self.cpu.ggml_backend_cpu_set_n_threads(self.backend, threads)
        assert self.base.ggml_backend_graph_compute(self.backend, graph) == 0
        if result_of is not None:
            result = tensors[result_of]
        out = np.empty(self.base.ggml_nbytes(result) // 4, np.float32)
        self.base.ggml_backend_tensor_get(result, out.ctypes.data, 0, out.nbytes)
        self.base.ggml_backend_buffer_free(buffer)
        self.base.ggml_free(context)
        return out

    def product(
        self, type_: int, weights: npt.NDArray[np.uint8], rows: int, x: Floats, threads: int
    ) -> Floats:
        """Weights [rows, n] times each of x [columns, n]: [columns, rows]."""
        columns, n = x.shape
        inputs = [(type_, (n, rows), weights), (F32, (n, columns), x)]
        out = self.run(threads, lambda c, t: self.base.ggml_mul_mat(c, *t), inputs)
        return out.reshape(columns, rows)

    def strided_product(
        self, type_: int, weights: npt.NDArray[np.uint8], rows: int, x: Floats, threads: int
    ) -> Floats:
        """As `product` with every other of the first 2 * rows rows of weights."""
        columns, n = x.shape
        row = self.base.ggml_row_size(type_, n)
        inputs = [(type_, (n, 2 * rows), weights[: 2 * rows * row]), (F32, (n, columns), x)]

        def build(context: Any, tensors: list[Any]) -> Any:
            w, y = tensors
            apart = self.base.ggml_view_3d(context, w, n, rows, 1, 2 * row, 2 * row * rows, 0)
            return self.base.ggml_mul_mat(context, apart, y)

        return self.run(threads, build, inputs).reshape(columns, rows)

    def expert_product(
        self,
        type_: int,
        weights: npt.NDArray[np.uint8],
        rows: int,
        x: Floats,
        ids: npt.NDArray[np.int32],
        threads: int,
    ) -> Floats:
        """Weights [experts, rows, n], x [tokens, n], ids [tokens, used]: [tokens, used, rows]."""
        tokens, n = x.shape
        experts = weights.size // (rows * self.base.ggml_row_size(type_, n))
        inputs = [
            (type_, (n, rows, experts), weights),
            (F32, (n, 1, tokens), x),
            (I32, (ids.shape[1], tokens), ids),
        ]
        out = self.run(threads, lambda c, t: self.base.ggml_mul_mat_id(c, *t), inputs)
        return out.reshape(tokens, ids.shape[1], rows)

    def attention(
        self, q: Floats, k: Floats, v: Floats, mask: Floats, threads: int, cache: int = F16
    ) -> Floats:
        """Heads' attention; q [heads, queries, d], k and v [kv heads, length, d] kept as `cache`,
        mask [queries, length]: [queries, heads, d]."""
        heads, queries, d = q.shape
        kv_heads, length, _ = k.shape
        inputs = [
            (F32, (d, queries, heads), q),
            (cache, (d, length, kv_heads), self.encode(cache, k)),
            (cache, (d, length, kv_heads), self.encode(cache, v)),
            (F16, (length, queries), mask.astype(np.float16)),
        ]

        def build(context: Any, tensors: list[Any]) -> Any:
            return self.base.ggml_flash_attn_ext(context, *tensors, d**-0.5, 0.0, 0.0)

        return self.run(threads, build, inputs).reshape(queries, heads, d)

    def recurrence(
        self, rows: dict[str, Floats], state: Floats, snapshots: int, threads: int
    ) -> tuple[Floats, Floats]:
        """A gated delta net over tokens: the output [tokens, heads, d], and the states after the
        last token, the one before, …: [snapshots, heads, d, d].

        rows: q, k, v [tokens, heads, d], q and k perhaps of fewer heads; g, the logarithm of the
        decay, and beta [tokens, heads].
        state: [heads, d, d].
        """
        tokens, heads, d = rows["v"].shape
        inputs: list[Input] = [(F32, (d, rows[n].shape[1], tokens), rows[n]) for n in "qkv"]
        inputs += [(F32, (1, heads, tokens), rows[name]) for name in ("g", "beta")]
        inputs += [(F32, (d, d, heads), state)]

        def build(context: Any, tensors: list[Any]) -> Any:
            return self.base.ggml_gated_delta_net(context, *tensors, snapshots)

        out = self.run(threads, build, inputs)
        cut = tokens * heads * d
        return out[:cut].reshape(tokens, heads, d), out[cut:].reshape(snapshots, heads, d, d)

    def joined(self, a: Floats, b: Floats, axis: int, threads: int, *, across: bool) -> Floats:
        """np.concatenate of arrays of four axes; across: `b` comes with its last two swapped."""
        inputs: list[Input] = [(F32, tuple(reversed(x.shape)), x) for x in (a, b)]

        def build(context: Any, tensors: list[Any]) -> Any:
            first, second = tensors
            if across:
                second = self.base.ggml_transpose(context, second)
            return self.base.ggml_concat(context, first, second, 3 - axis)

        return self.run(threads, build, inputs)

    def convolution(self, x: Floats, weights: Floats, threads: int) -> Floats:
        """Windows over each channel's inputs, x [sequences, channels, tokens + taps - 1]; weights
        [channels, taps]: [sequences, tokens, channels]."""
        (sequences, channels, n), (_, taps) = x.shape, weights.shape
        inputs: list[Input] = [(F32, (n, channels, sequences), x), (F32, (taps, channels), weights)]
        out = self.run(threads, lambda c, t: self.base.ggml_ssm_conv(c, *t), inputs)
        return out.reshape(sequences, n - taps + 1, channels)

    def gated_convolution(
        self, past: Floats, tokens: Floats, weights: Floats, threads: int, *, apart: bool
    ) -> Floats:
        """SiLU of the convolution of `past` and `tokens`, [sequences, n, channels] each, in memory
        that ggml's allocator reuses as in a model: [sequences, tokens, channels].

        apart: keep the joined inputs and the convolution, so that nothing is fused.
        """
        base = self.base
        context = self.context()
        inputs = []
        for x in (past, tokens, weights):
            shape = (*x.shape[::-1], *[1] * (4 - x.ndim))
            inputs.append(base.ggml_new_tensor_4d(context, F32, *shape))
            base.ggml_set_input(inputs[-1])
        # results of other operations, as in a model, whose memory may be reused
        first, second = (base.ggml_scale(context, tensor, 1.0) for tensor in inputs[:2])
        across = [base.ggml_transpose(context, tensor) for tensor in (first, second)]
        joined = base.ggml_concat(context, *across, 0)
        convolved = base.ggml_ssm_conv(context, joined, inputs[2])
        result = base.ggml_silu(context, convolved)
        for tensor in (joined, convolved) if apart else ():
            base.ggml_set_output(tensor)
        base.ggml_set_output(result)
        arrays = (past, tokens, weights)
        return self._allocated(context, inputs, arrays, (first, second, result), threads).reshape(
            tokens.shape
        )

    def weighted_sum(
        self, x: Floats, weights: Floats, threads: int, *, apart: bool, in_place: bool
    ) -> Floats:
        """The sum over experts of the outputs x [tokens, experts, n] times their weights [tokens,
        experts], in memory that ggml's allocator reuses as in a model: [tokens, n].

        apart: keep the products, so that nothing is fused. in_place: x is the result of another
        operation, over which products may be written.
        """
        base = self.base
        context = self.context()
        tokens, experts, n = x.shape
        given = base.ggml_new_tensor_4d(context, F32, n, experts, tokens, 1)
        by = base.ggml_new_tensor_4d(context, F32, 1, experts, tokens, 1)
        for tensor in (given, by):
            base.ggml_set_input(tensor)
        outputs = base.ggml_scale(context, given, 1.0) if in_place else given
        product = base.ggml_mul(context, outputs, by)
        if apart:
            base.ggml_set_output(product)
        size = n * 4
        views = [
            base.ggml_view_2d(context, product, n, tokens, experts * size, e * size)
            for e in range(experts)
        ]
        result = views[0]
        for view in views[1:]:
            result = base.ggml_add(context, result, view)
        base.ggml_set_output(result)
        expanded = (outputs, product, *views, result)
        return self._allocated(context, [given, by], (x, weights), expanded, threads).reshape(
            tokens, n
        )

    def _allocated(
        self,
        context: Any,
        inputs: list[Any],
        arrays: tuple[Floats, ...],
        expanded: tuple[Any, ...],
        threads: int,
    ) -> Floats:
        """Compute tensors in the given order, in memory from ggml's allocator, and free the
        context. Returns the last tensor."""
        base = self.base
        graph = base.ggml_new_graph(context)
        for tensor in expanded:
            base.ggml_build_forward_expand(graph, tensor)
        allocator = base.ggml_gallocr_new(self.cpu.ggml_backend_cpu_buffer_type())
        assert base.ggml_gallocr_alloc_graph(allocator, graph)
        for tensor, x in zip(inputs, arrays, strict=True):
            base.ggml_backend_tensor_set(tensor, x.ctypes.data, 0, x.nbytes)
        self.cpu.ggml_backend_cpu_set_n_threads(self.backend, threads)
        assert base.ggml_backend_graph_compute(self.backend, graph) == 0
        out = np.empty(base.ggml_nbytes(expanded[-1]) // 4, np.float32)
        base.ggml_backend_tensor_get(expanded[-1], out.ctypes.data, 0, out.nbytes)
        base.ggml_gallocr_free(allocator)
        base.ggml_free(context)
        return out

    def likeliest(self, rows: Floats) -> npt.NDArray[np.int32]:
        """The index of the maximum of each row [n, length]."""
        out = self.run(
            1, lambda c, t: self.base.ggml_argmax(c, *t), [(F32, rows.shape[::-1], rows)]
        )
        return out.view(np.int32)

    def soft_max(self, rows: Floats) -> Floats:
        """The softmax of each row [n, length]."""
        out = self.run(
            1, lambda c, t: self.base.ggml_soft_max(c, *t), [(F32, rows.shape[::-1], rows)]
        )
        return out.reshape(rows.shape)

    def replay(
        self,
        rows: dict[str, Floats],
        memory: Floats,
        ids: npt.NDArray[np.int32],
        kept: npt.NDArray[np.int32],
        n_log: int,
        threads: int,
    ) -> tuple[Floats, Floats]:
        """A gated delta net over the tokens of several sequences, each from a row of `memory`, once
        `kept` tokens of that row's log are replayed: the output [seqs, tokens, heads, d], and the
        new rows [seqs, row].

        rows: as for `recurrence`, with a first axis for sequences; q and k may have fewer heads.
        memory: [any number, row], a row being a state [heads, d, d] and the log of `n_log` tokens.
        """
        function = self.base.ggml_gated_delta_net_replay
        seqs, tokens, heads, d = rows["v"].shape
        inputs: list[Input] = [
            (F32, (d, rows[name].shape[2], tokens, seqs), rows[name]) for name in "qkv"
        ]
        inputs += [(F32, (1, heads, tokens, seqs), rows[name]) for name in ("g", "beta")]
        inputs += [(F32, memory.shape[::-1], memory), (I32, (seqs,), ids), (I32, (seqs,), kept)]
        out = self.run(threads, lambda c, t: function(c, *t, n_log), inputs)
        cut = seqs * tokens * heads * d
        return out[:cut].reshape(seqs, tokens, heads, d), out[cut:].reshape(seqs, -1)

    def replay_in_place(
        self,
        rows: dict[str, Floats],
        memory: Floats,
        kept: npt.NDArray[np.int32],
        n_log: int,
        threads: int,
    ) -> tuple[Floats, Floats]:
        """`replay` from the rows of `memory` in order, to which the new rows are copied as far as
        they are written: the output, and the memory after it."""
        function = self.base.ggml_gated_delta_net_replay
        seqs, tokens, heads, d = rows["v"].shape
        k_heads, row = rows["k"].shape[2], memory.shape[1]
        attention = seqs * tokens * heads * d
        state, log = heads * d * d, (k_heads + heads) * d + heads
        written = state + min(max(tokens - 1, 0), n_log) * log
        ids = np.arange(seqs, dtype=np.int32)
        inputs: list[Input] = [
            (F32, (d, rows[name].shape[2], tokens, seqs), rows[name]) for name in "qkv"
        ]
        inputs += [(F32, (1, heads, tokens, seqs), rows[name]) for name in ("g", "beta")]
        inputs += [(F32, memory.shape[::-1], memory), (I32, (seqs,), ids), (I32, (seqs,), kept)]

        def build(context: Any, tensors: list[Any]) -> Any:
            result = function(context, *tensors, n_log)
            view, size = self.base.ggml_view_3d, (row * 4, row * seqs * 4)
            output = view(context, result, attention, 1, 1, 0, 0, 0)
            new = view(context, result, written, seqs, 1, *size, attention * 4)
            place = view(context, tensors[5], written, seqs, 1, *size, 0)
            copied = self.base.ggml_cpy(context, new, place)
            one = view(context, copied, 1, 1, 1, 0, 0, 0)
            return self.base.ggml_concat(context, output, one, 0)  # a graph that computes both

        out = self.run(threads, build, inputs)[:attention].reshape(seqs, tokens, heads, d)
        return out, self.run(threads, build, inputs, result_of=5).reshape(memory.shape)

    def copy_strided(self, rows: Floats, threads: int) -> Floats:
        """Copy rows [n, length] to every other row of a tensor of 2 n rows of ones: that tensor."""
        n, length = rows.shape

        def build(context: Any, tensors: list[Any]) -> Any:
            source, target = tensors
            view = self.base.ggml_view_3d
            of_source = view(context, source, length, 1, n, length * 4, length * 4, 0)
            apart = view(context, target, length, 1, n, length * 4, length * 8, 0)
            return self.base.ggml_cpy(context, of_source, apart)

        ones = np.ones((2 * n, length), np.float32)
        inputs: list[Input] = [(F32, (length, n), rows), (F32, (length, 2 * n), ones)]
        return self.run(threads, build, inputs, result_of=1).reshape(2 * n, length)

    def scaled(self, rows: Floats, by: float, threads: int, *, in_place: bool) -> Floats:
        """Rows [n, length] times `by`."""
        scale = self.base.ggml_scale_inplace if in_place else self.base.ggml_scale
        return self.run(
            threads, lambda c, t: scale(c, *t, by), [(F32, rows.shape[::-1], rows)]
        ).reshape(rows.shape)

    def quantized(self, x: Floats) -> npt.NDArray[np.void]:
        """What ggml's reference makes of blocks [n, 256] for products: block_q8_K."""
        block = [("scale", "<f4"), ("quants", "i1", 256), ("sums", "<i2", 16)]
        out = np.zeros(len(x), block)
        self.base.quantize_row_q8_K_ref(x.ctypes.data, out.ctypes.data, x.size)
        return out

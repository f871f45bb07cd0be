"""ctypes declarations for every function of mtp.h, each below its C prototype.

`library()` loads libmtp once, after `runtime`, so that it resolves to the llama.cpp that llama_cpp
has loaded.
"""

import ctypes
from ctypes import (
    POINTER,
    c_bool,
    c_char_p,
    c_double,
    c_float,
    c_int32,
    c_int64,
    c_size_t,
    c_uint32,
    c_uint64,
    c_void_p,
)
from functools import cache

from .errors import (
    ContextFullError,
    DeviceFailedError,
    HeadMissingError,
    LibraryMismatchError,
    ModelRefusedError,
    NativeError,
)
from .layouts import UNDERSTOOD

API_VERSION = 10
MAX_DEPTH = 16
DEPTH_AUTO = -1

_BACKEND = 7  # MTP_ERROR_BACKEND
_DEVICE = 12  # MTP_ERROR_DEVICE

# The mtp_status values that have an exception class of their own.
_ERRORS: dict[int, type[NativeError]] = {
    2: ModelRefusedError,
    3: ModelRefusedError,
    4: HeadMissingError,
    5: ModelRefusedError,
    8: ContextFullError,
    10: LibraryMismatchError,
    _DEVICE: DeviceFailedError,
}


class HeadParams(ctypes.Structure):
    """mtp_head_params."""

    _fields_ = (
        ("trunk_path", c_char_p),
        ("device", c_char_p),
        ("n_threads", c_int32),
        ("n_ctx", c_int32),
        ("n_seq_max", c_int32),
        ("n_batch", c_int32),
        ("fastmtp_size", c_int32),
        ("n_ring", c_int32),
        ("embedding", c_void_p),
        ("output", c_void_p),
        ("type", c_char_p),
    )


class ImatrixEntry(ctypes.Structure):
    """mtp_imatrix_entry."""

    _fields_ = (
        ("name", c_char_p),
        ("sums", POINTER(c_float)),
        ("n_sums", c_size_t),
        ("counts", POINTER(c_int64)),
        ("n_counts", c_size_t),
    )


class SessionParams(ctypes.Structure):
    """mtp_session_params."""

    _fields_ = (
        ("rollback", c_int32),
        ("max_depth", c_int32),
        ("max_rows", c_int32),
        ("min_rows", c_int32),
        ("max_lookup", c_int32),
    )


class SessionStats(ctypes.Structure):
    """mtp_session_stats."""

    _fields_ = (
        ("cycles", c_int64),
        ("tokens", c_int64),
        ("rollbacks", c_int64),
        ("prefilled", c_int64),
        ("drafted", c_int64 * MAX_DEPTH),
        ("accepted", c_int64 * MAX_DEPTH),
        ("prefill_ms", c_double),
        ("prefill_head_ms", c_double),
        ("draft_ms", c_double),
        ("verify_ms", c_double),
        ("sample_ms", c_double),
        ("rollback_ms", c_double),
        ("text_cycles", c_int64),
        ("text_drafted", c_int64),
        ("text_accepted", c_int64),
        ("decodes", c_int64),
        ("draft_graphs", c_int64),
        ("draft_syncs", c_int64),
        ("draft_bytes_up", c_int64),
        ("draft_bytes_down", c_int64),
    )


class Sampling(ctypes.Structure):
    """mtp_sampling."""

    _fields_ = (
        ("temperature", c_float),
        ("top_k", c_int32),
        ("top_p", c_float),
        ("min_p", c_float),
        ("seed", c_uint64),
    )


class CycleOutcome(ctypes.Structure):
    """mtp_cycle_outcome."""

    _fields_ = (
        ("n_drafted", c_int32),
        ("n_verified", c_int32),
        ("n_accepted", c_int32),
        ("probabilities", POINTER(c_float)),
        ("next_right", c_float),
        ("draft_ms", c_double),
        ("verify_ms", c_double),
        ("undo_ms", c_double),
    )


class HeadInfo(ctypes.Structure):
    """mtp_head_info."""

    _fields_ = (
        ("n_embd", c_int32),
        ("n_vocab", c_int32),
        ("n_draft_vocab", c_int32),
        ("n_ring", c_int32),
        ("block", c_int32),
        ("n_ctx", c_int32),
        ("n_seq_max", c_int32),
        ("max_depth", c_int32),
        ("layout", c_int32),
        ("moe", c_bool),
        ("tied", c_bool),
        ("draws", c_bool),
        ("weight_bytes", c_int64),
        ("mapped_bytes", c_int64),
        ("cache_bytes", c_int64),
    )


class DraftTask(ctypes.Structure):
    """mtp_draft_task."""

    _fields_ = (
        ("seq", c_int32),
        ("first", c_int32),
        ("tokens", POINTER(c_int32)),
        ("hidden", POINTER(c_float)),
        ("n_rows", c_int32),
        ("depth", c_int32),
        ("out_tokens", POINTER(c_int32)),
        ("out_probs", POINTER(c_float)),
    )


class KeptRows(ctypes.Structure):
    """mtp_kept_rows."""

    _fields_ = (
        ("seq", c_int32),
        ("at", c_int32),
        ("first", c_int32),
        ("n", c_int32),
        ("kept", c_bool),
    )


class CheckpointInfo(ctypes.Structure):
    """mtp_checkpoint_info."""

    _fields_ = (
        ("kind", c_int32),
        ("length", c_int32),
        ("bytes", c_int64),
        ("written_bytes", c_int64),
    )


class SessionFileInfo(ctypes.Structure):
    """mtp_session_file_info."""

    _fields_ = (
        ("nbytes", c_uint64),
        ("owner", c_uint64),
        ("program", c_int32),
        ("n_tokens", c_int32),
        ("n_sections", c_int32),
        ("n_fields", c_int32),
        ("extra", c_void_p),
        ("n_extra", c_size_t),
    )


class SessionSection(ctypes.Structure):
    """mtp_session_section."""

    _fields_ = (
        ("name", c_char_p),
        ("offset", c_uint64),
        ("nbytes", c_uint64),
        ("checksum", c_uint32),
        ("n_tokens", c_int32),
    )


class SessionField(ctypes.Structure):
    """mtp_session_field."""

    _fields_ = (("name", c_char_p), ("value", c_char_p))


@cache
def library() -> ctypes.CDLL:
    """Load libmtp, once; LibraryMismatchError when it cannot be used with this llama_cpp."""
    from . import runtime  # noqa: PLC0415  (loads llama.cpp's libraries, which libmtp resolves to)

    lib = runtime.load_libmtp()
    if (found := lib.mtp_api_version()) != API_VERSION:
        raise LibraryMismatchError(
            f"{lib._name}: expected API version {API_VERSION}, found {found}"
        )
    _declare(lib)
    if lib.mtp_check_runtime():
        raise LibraryMismatchError(f"{lib.mtp_last_error().decode()}; {UNDERSTOOD}")
    return lib


def check(status: int) -> None:
    """Raise the exception for a status other than MTP_OK, with the library's error message.

    If llama.cpp itself or a device failed, its last log lines are appended.
    """
    if status:
        text = library().mtp_last_error().decode(errors="replace")
        if status in (_BACKEND, _DEVICE):
            text += indented_log()
        raise _ERRORS.get(status, NativeError)(text)


def indented_log() -> str:
    """Return llama.cpp's last log lines, indented, to append to an error message."""
    text: str = library().mtp_log_last().decode(errors="replace")
    return "".join(f"\n  {line}" for line in text.split("\n")[:-1])


def _declare(lib: ctypes.CDLL) -> None:
    i32_p, f32_p, f64_p = POINTER(c_int32), POINTER(c_float), POINTER(c_double)

    # const char * mtp_last_error(void);
    lib.mtp_last_error.restype = c_char_p
    lib.mtp_last_error.argtypes = []
    # int32_t mtp_api_version(void);
    lib.mtp_api_version.restype = c_int32
    lib.mtp_api_version.argtypes = []
    # const char * mtp_built_for(void);
    lib.mtp_built_for.restype = c_char_p
    lib.mtp_built_for.argtypes = []
    # mtp_status mtp_check_runtime(void);
    lib.mtp_check_runtime.restype = c_int32
    lib.mtp_check_runtime.argtypes = []
    # mtp_status mtp_call_for_struct(void (*function)(void), void * out);
    lib.mtp_call_for_struct.restype = c_int32
    lib.mtp_call_for_struct.argtypes = [c_void_p, c_void_p]

    # bool mtp_context_has_failed(struct llama_context * context);
    lib.mtp_context_has_failed.restype = c_bool
    lib.mtp_context_has_failed.argtypes = [c_void_p]

    # const char * mtp_gpu_name(int32_t index);
    lib.mtp_gpu_name.restype = c_char_p
    lib.mtp_gpu_name.argtypes = [c_int32]
    # void mtp_abort_decoding(void);
    lib.mtp_abort_decoding.restype = None
    lib.mtp_abort_decoding.argtypes = []
    # mtp_status mtp_log_listen(bool echo);
    lib.mtp_log_listen.restype = c_int32
    lib.mtp_log_listen.argtypes = [c_bool]
    # const char * mtp_log_last(void);
    lib.mtp_log_last.restype = c_char_p
    lib.mtp_log_last.argtypes = []
    # mtp_status mtp_tell_crashes(void);
    lib.mtp_tell_crashes.restype = c_int32
    lib.mtp_tell_crashes.argtypes = []

    # mtp_head_params mtp_head_default_params(void);
    lib.mtp_head_default_params.restype = HeadParams
    lib.mtp_head_default_params.argtypes = []
    # mtp_status mtp_head_load(const char * path, const mtp_head_params * params, mtp_head ** out);
    lib.mtp_head_load.restype = c_int32
    lib.mtp_head_load.argtypes = [c_char_p, POINTER(HeadParams), POINTER(c_void_p)]
    # mtp_status mtp_head_check(const char * path, const mtp_head_params * params);
    lib.mtp_head_check.restype = c_int32
    lib.mtp_head_check.argtypes = [c_char_p, POINTER(HeadParams)]
    # void mtp_head_free(mtp_head * head);
    lib.mtp_head_free.restype = None
    lib.mtp_head_free.argtypes = [c_void_p]
    # mtp_status mtp_head_get_info(const mtp_head * head, mtp_head_info * out);
    lib.mtp_head_get_info.restype = c_int32
    lib.mtp_head_get_info.argtypes = [c_void_p, POINTER(HeadInfo)]
    # mtp_status mtp_head_get_draft_ids(const mtp_head * head, int32_t * out, size_t n);
    lib.mtp_head_get_draft_ids.restype = c_int32
    lib.mtp_head_get_draft_ids.argtypes = [c_void_p, i32_p, c_size_t]
    # mtp_status mtp_head_next_position(const mtp_head * head, int32_t seq, int32_t * out);
    lib.mtp_head_next_position.restype = c_int32
    lib.mtp_head_next_position.argtypes = [c_void_p, c_int32, i32_p]
    # mtp_status mtp_head_feed(mtp_head * head, int32_t seq, int32_t first, const int32_t * tokens,
    #     const float * hidden, int32_t n_rows);
    lib.mtp_head_feed.restype = c_int32
    lib.mtp_head_feed.argtypes = [c_void_p, c_int32, c_int32, i32_p, f32_p, c_int32]
    # mtp_status mtp_head_draft(mtp_head * head, int32_t seq, int32_t first, const int32_t * tokens,
    #     const float * hidden, int32_t n_rows, int32_t depth, int32_t * out_tokens,
    #     float * out_probs, float * out_logits);
    lib.mtp_head_draft.restype = c_int32
    lib.mtp_head_draft.argtypes = [
        c_void_p,
        c_int32,
        c_int32,
        i32_p,
        f32_p,
        c_int32,
        c_int32,
        i32_p,
        f32_p,
        f32_p,
    ]
    # mtp_status mtp_head_keep_hidden(mtp_head * head, struct ggml_tensor * tensor,
    #     struct ggml_backend * backend, mtp_kept_rows * parts, int32_t n);
    lib.mtp_head_keep_hidden.restype = c_int32
    lib.mtp_head_keep_hidden.argtypes = [c_void_p, c_void_p, c_void_p, POINTER(KeptRows), c_int32]
    # mtp_status mtp_head_get_hidden(mtp_head * head, int32_t seq, int32_t n, float * out,
    #     size_t size);
    lib.mtp_head_get_hidden.restype = c_int32
    lib.mtp_head_get_hidden.argtypes = [c_void_p, c_int32, c_int32, f32_p, c_size_t]
    # mtp_status mtp_head_draft_batch(mtp_head * head, const mtp_draft_task * tasks, int32_t n);
    lib.mtp_head_draft_batch.restype = c_int32
    lib.mtp_head_draft_batch.argtypes = [c_void_p, POINTER(DraftTask), c_int32]
    # mtp_status mtp_head_rollback(mtp_head * head, int32_t seq, int32_t position);
    lib.mtp_head_rollback.restype = c_int32
    lib.mtp_head_rollback.argtypes = [c_void_p, c_int32, c_int32]
    # mtp_status mtp_head_rows_size(const mtp_head * head, int32_t seq, size_t * out);
    lib.mtp_head_rows_size.restype = c_int32
    lib.mtp_head_rows_size.argtypes = [c_void_p, c_int32, POINTER(c_size_t)]
    # mtp_status mtp_head_get_rows(const mtp_head * head, int32_t seq, void * out, size_t n);
    lib.mtp_head_get_rows.restype = c_int32
    lib.mtp_head_get_rows.argtypes = [c_void_p, c_int32, c_void_p, c_size_t]
    # mtp_status mtp_head_set_rows(mtp_head * head, int32_t seq, int32_t end, const void * rows,
    #     size_t n);
    lib.mtp_head_set_rows.restype = c_int32
    lib.mtp_head_set_rows.argtypes = [c_void_p, c_int32, c_int32, c_void_p, c_size_t]
    # mtp_status mtp_head_ops(mtp_head * head, const char ** out);
    lib.mtp_head_ops.restype = c_int32
    lib.mtp_head_ops.argtypes = [c_void_p, POINTER(c_char_p)]

    # mtp_status mtp_imatrix_new(bool with_output, mtp_imatrix ** out);
    lib.mtp_imatrix_new.restype = c_int32
    lib.mtp_imatrix_new.argtypes = [c_bool, POINTER(c_void_p)]
    # void mtp_imatrix_free(mtp_imatrix * imatrix);
    lib.mtp_imatrix_free.restype = None
    lib.mtp_imatrix_free.argtypes = [c_void_p]
    # bool mtp_imatrix_evaluate(struct ggml_tensor * node, bool ask, void * imatrix);
    lib.mtp_imatrix_evaluate.restype = c_bool
    lib.mtp_imatrix_evaluate.argtypes = [c_void_p, c_bool, c_void_p]
    # mtp_status mtp_imatrix_size(const mtp_imatrix * imatrix, int32_t * out);
    lib.mtp_imatrix_size.restype = c_int32
    lib.mtp_imatrix_size.argtypes = [c_void_p, i32_p]
    # mtp_status mtp_imatrix_get(const mtp_imatrix * imatrix, int32_t i, mtp_imatrix_entry * out);
    lib.mtp_imatrix_get.restype = c_int32
    lib.mtp_imatrix_get.argtypes = [c_void_p, c_int32, POINTER(ImatrixEntry)]
    # mtp_status mtp_head_built_graphs(const mtp_head * head, int64_t * out);
    lib.mtp_head_built_graphs.restype = c_int32
    lib.mtp_head_built_graphs.argtypes = [c_void_p, POINTER(c_int64)]
    # mtp_status mtp_head_set_imatrix(mtp_head * head, mtp_imatrix * imatrix);
    lib.mtp_head_set_imatrix.restype = c_int32
    lib.mtp_head_set_imatrix.argtypes = [c_void_p, c_void_p]

    # mtp_status mtp_model_matrix(const struct llama_model * model, bool output,
    #     const struct ggml_tensor ** out);
    lib.mtp_model_matrix.restype = c_int32
    lib.mtp_model_matrix.argtypes = [c_void_p, c_bool, POINTER(c_void_p)]
    # mtp_status mtp_session_new(struct llama_context * context, mtp_head * head,
    #     const mtp_session_params * params, mtp_session ** out);
    lib.mtp_session_new.restype = c_int32
    lib.mtp_session_new.argtypes = [c_void_p, c_void_p, POINTER(SessionParams), POINTER(c_void_p)]
    # void mtp_session_free(mtp_session * session);
    lib.mtp_session_free.restype = None
    lib.mtp_session_free.argtypes = [c_void_p]
    # mtp_status mtp_session_get_stats(const mtp_session * session, mtp_session_stats * out);
    lib.mtp_session_get_stats.restype = c_int32
    lib.mtp_session_get_stats.argtypes = [c_void_p, POINTER(SessionStats)]
    # mtp_status mtp_session_reset_stats(mtp_session * session);
    lib.mtp_session_reset_stats.restype = c_int32
    lib.mtp_session_reset_stats.argtypes = [c_void_p]
    # mtp_status mtp_session_length(const mtp_session * session, int32_t seq, int32_t * out);
    lib.mtp_session_length.restype = c_int32
    lib.mtp_session_length.argtypes = [c_void_p, c_int32, i32_p]
    # mtp_status mtp_session_decode(mtp_session * session, int32_t seq, const int32_t * tokens,
    #     int32_t n, bool all_logits);
    lib.mtp_session_decode.restype = c_int32
    lib.mtp_session_decode.argtypes = [c_void_p, c_int32, i32_p, c_int32, c_bool]
    # mtp_status mtp_session_want_hidden(mtp_session * session);
    lib.mtp_session_want_hidden.restype = c_int32
    lib.mtp_session_want_hidden.argtypes = [c_void_p]
    # mtp_status mtp_session_get_hidden(mtp_session * session, int32_t n, float * out, size_t size);
    lib.mtp_session_get_hidden.restype = c_int32
    lib.mtp_session_get_hidden.argtypes = [c_void_p, c_int32, f32_p, c_size_t]
    # mtp_status mtp_cycle_begin(mtp_session * session, int32_t seq, int32_t token, int32_t depth,
    #     int32_t * out_tokens, float * out_probs, int32_t * out_n);
    lib.mtp_cycle_begin.restype = c_int32
    lib.mtp_cycle_begin.argtypes = [c_void_p, c_int32, c_int32, c_int32, i32_p, f32_p, i32_p]
    # mtp_status mtp_cycle_row(mtp_session * session, int32_t row, int32_t * out);
    lib.mtp_cycle_row.restype = c_int32
    lib.mtp_cycle_row.argtypes = [c_void_p, c_int32, i32_p]
    # mtp_status mtp_cycle_end(mtp_session * session, int32_t n_accepted);
    lib.mtp_cycle_end.restype = c_int32
    lib.mtp_cycle_end.argtypes = [c_void_p, c_int32]
    # mtp_status mtp_cycle_from_text(const mtp_session * session, bool * out);
    lib.mtp_cycle_from_text.restype = c_int32
    lib.mtp_cycle_from_text.argtypes = [c_void_p, POINTER(c_bool)]
    # mtp_status mtp_session_step(mtp_session * session, int32_t seq, int32_t token, int32_t depth,
    #     struct llama_sampler * sampler, int32_t * out, int32_t * out_n);
    lib.mtp_session_step.restype = c_int32
    lib.mtp_session_step.argtypes = [c_void_p, c_int32, c_int32, c_int32, c_void_p, i32_p, i32_p]
    # mtp_status mtp_session_set_sampling(mtp_session * session, const mtp_sampling * sampling);
    lib.mtp_session_set_sampling.restype = c_int32
    lib.mtp_session_set_sampling.argtypes = [c_void_p, POINTER(Sampling)]
    # mtp_status mtp_session_sample(mtp_session * session, int32_t row, int32_t * out);
    lib.mtp_session_sample.restype = c_int32
    lib.mtp_session_sample.argtypes = [c_void_p, c_int32, i32_p]
    # mtp_status mtp_session_step_sampled(mtp_session * session, int32_t seq, int32_t token,
    #     int32_t depth, int32_t * out, int32_t * out_n);
    lib.mtp_session_step_sampled.restype = c_int32
    lib.mtp_session_step_sampled.argtypes = [c_void_p, c_int32, c_int32, c_int32, i32_p, i32_p]
    # mtp_status mtp_session_argmax(mtp_session * session, int32_t row, int32_t * out);
    lib.mtp_session_argmax.restype = c_int32
    lib.mtp_session_argmax.argtypes = [c_void_p, c_int32, i32_p]
    # mtp_status mtp_seq_rm(mtp_session * session, int32_t seq, int32_t p0, int32_t p1);
    lib.mtp_seq_rm.restype = c_int32
    lib.mtp_seq_rm.argtypes = [c_void_p, c_int32, c_int32, c_int32]
    # mtp_status mtp_session_sync(mtp_session * session, int32_t seq);
    lib.mtp_session_sync.restype = c_int32
    lib.mtp_session_sync.argtypes = [c_void_p, c_int32]
    # mtp_status mtp_session_skip(mtp_session * session, int32_t seq, int64_t length);
    lib.mtp_session_skip.restype = c_int32
    lib.mtp_session_skip.argtypes = [c_void_p, c_int32, c_int64]
    # mtp_status mtp_seq_cp(mtp_session * session, int32_t from, int32_t to);
    lib.mtp_seq_cp.restype = c_int32
    lib.mtp_seq_cp.argtypes = [c_void_p, c_int32, c_int32]

    # mtp_status mtp_checkpoint_save(mtp_session * session, int32_t seq, int32_t kind,
    #     mtp_checkpoint ** out);
    lib.mtp_checkpoint_save.restype = c_int32
    lib.mtp_checkpoint_save.argtypes = [c_void_p, c_int32, c_int32, POINTER(c_void_p)]
    # mtp_status mtp_checkpoint_restore(mtp_session * session, int32_t seq,
    #     const mtp_checkpoint * checkpoint);
    lib.mtp_checkpoint_restore.restype = c_int32
    lib.mtp_checkpoint_restore.argtypes = [c_void_p, c_int32, c_void_p]
    # mtp_status mtp_checkpoint_check(mtp_session * session, int32_t seq,
    #     const mtp_checkpoint * checkpoint);
    lib.mtp_checkpoint_check.restype = c_int32
    lib.mtp_checkpoint_check.argtypes = [c_void_p, c_int32, c_void_p]
    # mtp_status mtp_checkpoint_attach(mtp_session * session, int32_t seq,
    #     mtp_checkpoint * checkpoint);
    lib.mtp_checkpoint_attach.restype = c_int32
    lib.mtp_checkpoint_attach.argtypes = [c_void_p, c_int32, c_void_p]
    # void mtp_checkpoint_free(mtp_checkpoint * checkpoint);
    lib.mtp_checkpoint_free.restype = None
    lib.mtp_checkpoint_free.argtypes = [c_void_p]
    # mtp_status mtp_checkpoint_get_info(const mtp_checkpoint * checkpoint,
    #     mtp_checkpoint_info * out);
    lib.mtp_checkpoint_get_info.restype = c_int32
    lib.mtp_checkpoint_get_info.argtypes = [c_void_p, POINTER(CheckpointInfo)]
    # mtp_status mtp_checkpoint_write(const mtp_checkpoint * checkpoint, void * out, size_t n);
    lib.mtp_checkpoint_write.restype = c_int32
    lib.mtp_checkpoint_write.argtypes = [c_void_p, c_void_p, c_size_t]
    # mtp_status mtp_checkpoint_read(const void * data, size_t n, mtp_checkpoint ** out);
    lib.mtp_checkpoint_read.restype = c_int32
    lib.mtp_checkpoint_read.argtypes = [c_void_p, c_size_t, POINTER(c_void_p)]
    # mtp_status mtp_checkpoint_borrow(const void * data, size_t n, mtp_checkpoint ** out);
    lib.mtp_checkpoint_borrow.restype = c_int32
    lib.mtp_checkpoint_borrow.argtypes = [c_void_p, c_size_t, POINTER(c_void_p)]

    # mtp_status mtp_session_file_open(const char * path, mtp_session_file ** out);
    lib.mtp_session_file_open.restype = c_int32
    lib.mtp_session_file_open.argtypes = [c_char_p, POINTER(c_void_p)]
    # void mtp_session_file_close(mtp_session_file * file);
    lib.mtp_session_file_close.restype = None
    lib.mtp_session_file_close.argtypes = [c_void_p]
    # mtp_status mtp_session_file_get_info(const mtp_session_file * file,
    #     mtp_session_file_info * out);
    lib.mtp_session_file_get_info.restype = c_int32
    lib.mtp_session_file_get_info.argtypes = [c_void_p, POINTER(SessionFileInfo)]
    # mtp_status mtp_session_file_get_section(const mtp_session_file * file, int32_t i,
    #     mtp_session_section * out);
    lib.mtp_session_file_get_section.restype = c_int32
    lib.mtp_session_file_get_section.argtypes = [c_void_p, c_int32, POINTER(SessionSection)]
    # mtp_status mtp_session_file_get_field(const mtp_session_file * file, int32_t i,
    #     mtp_session_field * out);
    lib.mtp_session_file_get_field.restype = c_int32
    lib.mtp_session_file_get_field.argtypes = [c_void_p, c_int32, POINTER(SessionField)]
    # mtp_status mtp_session_file_read(const mtp_session_file * file, int32_t i, void * out,
    #     size_t n);
    lib.mtp_session_file_read.restype = c_int32
    lib.mtp_session_file_read.argtypes = [c_void_p, c_int32, c_void_p, c_size_t]
    # mtp_status mtp_session_file_header(const char * path, const mtp_session_file_info * info,
    #     mtp_session_section * sections, const mtp_session_field * fields, void * out, size_t n,
    #     size_t * out_n);
    lib.mtp_session_file_header.restype = c_int32
    lib.mtp_session_file_header.argtypes = [
        c_char_p,
        POINTER(SessionFileInfo),
        POINTER(SessionSection),
        POINTER(SessionField),
        c_void_p,
        c_size_t,
        POINTER(c_size_t),
    ]

    # const char * mtp_session_fields(void);
    lib.mtp_session_fields.restype = c_char_p
    lib.mtp_session_fields.argtypes = []

    # mtp_status mtp_depth_new(int32_t max_depth, mtp_depth ** out);
    lib.mtp_depth_new.restype = c_int32
    lib.mtp_depth_new.argtypes = [c_int32, POINTER(c_void_p)]
    # mtp_status mtp_depth_new_beside(const mtp_depth * other, mtp_depth ** out);
    lib.mtp_depth_new_beside.restype = c_int32
    lib.mtp_depth_new_beside.argtypes = [c_void_p, POINTER(c_void_p)]
    # mtp_status mtp_depth_expect(mtp_depth * depth, double acceptance);
    lib.mtp_depth_expect.restype = c_int32
    lib.mtp_depth_expect.argtypes = [c_void_p, c_double]
    # mtp_status mtp_depth_share(mtp_depth * depth, int32_t n_sequences);
    lib.mtp_depth_share.restype = c_int32
    lib.mtp_depth_share.argtypes = [c_void_p, c_int32]
    # mtp_status mtp_depth_report_batch(mtp_depth * depth, int32_t n_tokens, double ms);
    lib.mtp_depth_report_batch.restype = c_int32
    lib.mtp_depth_report_batch.argtypes = [c_void_p, c_int32, c_double]
    # void mtp_depth_free(mtp_depth * depth);
    lib.mtp_depth_free.restype = None
    lib.mtp_depth_free.argtypes = [c_void_p]
    # mtp_status mtp_depth_set_costs(mtp_depth * depth, const double * verify_ms, int32_t n_verify,
    #     const double * draft_ms, int32_t n_draft);
    lib.mtp_depth_set_costs.restype = c_int32
    lib.mtp_depth_set_costs.argtypes = [c_void_p, f64_p, c_int32, f64_p, c_int32]
    # mtp_status mtp_depth_report_draft(mtp_depth * depth, int32_t n_sequences, int32_t n_tokens,
    #     double ms);
    lib.mtp_depth_report_draft.restype = c_int32
    lib.mtp_depth_report_draft.argtypes = [c_void_p, c_int32, c_int32, c_double]
    # mtp_status mtp_depth_plan_batch(mtp_depth * const * depths, const int32_t * rooms, int32_t n,
    #     int32_t * out);
    lib.mtp_depth_plan_batch.restype = c_int32
    lib.mtp_depth_plan_batch.argtypes = [POINTER(c_void_p), i32_p, c_int32, i32_p]
    # mtp_status mtp_depth_keep_batch(mtp_depth * const * depths,
    #     const float * const * probabilities, const int32_t * n_drafted, int32_t n, int32_t others,
    #     int32_t * out);
    lib.mtp_depth_keep_batch.restype = c_int32
    lib.mtp_depth_keep_batch.argtypes = [
        POINTER(c_void_p),
        POINTER(f32_p),
        i32_p,
        c_int32,
        c_int32,
        i32_p,
    ]
    # mtp_status mtp_depth_plan(mtp_depth * depth, int32_t room, int32_t * out);
    lib.mtp_depth_plan.restype = c_int32
    lib.mtp_depth_plan.argtypes = [c_void_p, c_int32, i32_p]
    # mtp_status mtp_depth_keep(const mtp_depth * depth, const float * probabilities, int32_t n,
    #     bool drawn, int32_t * out);
    lib.mtp_depth_keep.restype = c_int32
    lib.mtp_depth_keep.argtypes = [c_void_p, f32_p, c_int32, c_bool, i32_p]
    # mtp_status mtp_depth_report(mtp_depth * depth, const mtp_cycle_outcome * outcome);
    lib.mtp_depth_report.restype = c_int32
    lib.mtp_depth_report.argtypes = [c_void_p, POINTER(CycleOutcome)]
    # mtp_status mtp_depth_state_size(const mtp_depth * depth, size_t * out);
    lib.mtp_depth_state_size.restype = c_int32
    lib.mtp_depth_state_size.argtypes = [c_void_p, POINTER(c_size_t)]
    # mtp_status mtp_depth_get_state(const mtp_depth * depth, void * out, size_t n);
    lib.mtp_depth_get_state.restype = c_int32
    lib.mtp_depth_get_state.argtypes = [c_void_p, c_void_p, c_size_t]
    # mtp_status mtp_depth_set_state(mtp_depth * depth, const void * data, size_t n);
    lib.mtp_depth_set_state.restype = c_int32
    lib.mtp_depth_set_state.argtypes = [c_void_p, c_void_p, c_size_t]
    # mtp_status mtp_session_set_costs(mtp_session * session, const double * verify_ms,
    #     int32_t n_verify, const double * draft_ms, int32_t n_draft);
    lib.mtp_session_set_costs.restype = c_int32
    lib.mtp_session_set_costs.argtypes = [c_void_p, f64_p, c_int32, f64_p, c_int32]
    # mtp_status mtp_session_remember_depth(mtp_session * session, const char * path);
    lib.mtp_session_remember_depth.restype = c_int32
    lib.mtp_session_remember_depth.argtypes = [c_void_p, c_char_p]

    # mtp_status mtp_text_drafts_new(mtp_text_drafts ** out);
    lib.mtp_text_drafts_new.restype = c_int32
    lib.mtp_text_drafts_new.argtypes = [POINTER(c_void_p)]
    # void mtp_text_drafts_free(mtp_text_drafts * text);
    lib.mtp_text_drafts_free.restype = None
    lib.mtp_text_drafts_free.argtypes = [c_void_p]
    # mtp_status mtp_text_drafts_set(mtp_text_drafts * text, const int32_t * tokens, int64_t n,
    #                                bool generated);
    lib.mtp_text_drafts_set.restype = c_int32
    lib.mtp_text_drafts_set.argtypes = [c_void_p, i32_p, c_int64, c_bool]
    # mtp_status mtp_text_drafts_set_corpus(mtp_text_drafts * text, const mtp_corpus * corpus);
    lib.mtp_text_drafts_set_corpus.restype = c_int32
    lib.mtp_text_drafts_set_corpus.argtypes = [c_void_p, c_void_p]
    # mtp_status mtp_text_drafts_plan(const mtp_text_drafts * text, mtp_depth * depth,
    #                                 int32_t head_depth, int32_t room, int32_t * out, int32_t n,
    #                                 int32_t * out_n);
    lib.mtp_text_drafts_plan.restype = c_int32
    lib.mtp_text_drafts_plan.argtypes = [
        c_void_p,
        c_void_p,
        c_int32,
        c_int32,
        i32_p,
        c_int32,
        i32_p,
    ]
    # mtp_status mtp_depth_report_text(mtp_depth * depth, int32_t n_verified, int32_t n_accepted,
    #                                  double verify_ms, double undo_ms);
    lib.mtp_depth_report_text.restype = c_int32
    lib.mtp_depth_report_text.argtypes = [c_void_p, c_int32, c_int32, c_double, c_double]
    # mtp_status mtp_corpus_write(const char * path, const int32_t * tokens, int64_t n,
    #                             int32_t n_vocab, uint64_t tokenizer);
    lib.mtp_corpus_write.restype = c_int32
    lib.mtp_corpus_write.argtypes = [c_char_p, i32_p, c_int64, c_int32, c_uint64]
    # mtp_status mtp_corpus_open(const char * path, int32_t n_vocab, uint64_t tokenizer,
    #                            mtp_corpus ** out);
    lib.mtp_corpus_open.restype = c_int32
    lib.mtp_corpus_open.argtypes = [c_char_p, c_int32, c_uint64, POINTER(c_void_p)]
    # void mtp_corpus_free(mtp_corpus * corpus);
    lib.mtp_corpus_free.restype = None
    lib.mtp_corpus_free.argtypes = [c_void_p]
    # mtp_status mtp_corpus_match(const mtp_corpus * corpus, const int32_t * tokens, int64_t n,
    #                             int64_t * out_length, int64_t * out_next);
    lib.mtp_corpus_match.restype = c_int32
    lib.mtp_corpus_match.argtypes = [c_void_p, i32_p, c_int64, POINTER(c_int64), POINTER(c_int64)]
    # mtp_status mtp_corpus_propose(const mtp_corpus * corpus, const int32_t * tokens, int64_t n,
    #                               int32_t * out, int32_t n_out, int32_t * out_n);
    lib.mtp_corpus_propose.restype = c_int32
    lib.mtp_corpus_propose.argtypes = [c_void_p, i32_p, c_int64, i32_p, c_int32, i32_p]
    # mtp_status mtp_session_set_corpus(mtp_session * session, const mtp_corpus * corpus);
    lib.mtp_session_set_corpus.restype = c_int32
    lib.mtp_session_set_corpus.argtypes = [c_void_p, c_void_p]
    # mtp_status mtp_tokenizer_fingerprint(const char * const * texts, int32_t n_vocab,
    #                                      uint64_t * out);
    lib.mtp_tokenizer_fingerprint.restype = c_int32
    lib.mtp_tokenizer_fingerprint.argtypes = [POINTER(c_char_p), c_int32, POINTER(c_uint64)]
    # mtp_status mtp_session_tokenizer(const mtp_session * session, uint64_t * out);
    lib.mtp_session_tokenizer.restype = c_int32
    lib.mtp_session_tokenizer.argtypes = [c_void_p, POINTER(c_uint64)]
    # mtp_status mtp_suffix_index_new(mtp_suffix_index ** out);
    lib.mtp_suffix_index_new.restype = c_int32
    lib.mtp_suffix_index_new.argtypes = [POINTER(c_void_p)]
    # void mtp_suffix_index_free(mtp_suffix_index * index);
    lib.mtp_suffix_index_free.restype = None
    lib.mtp_suffix_index_free.argtypes = [c_void_p]
    # mtp_status mtp_suffix_index_append(mtp_suffix_index * index, const int32_t * tokens,
    #     int64_t n);
    lib.mtp_suffix_index_append.restype = c_int32
    lib.mtp_suffix_index_append.argtypes = [c_void_p, i32_p, c_int64]
    # mtp_status mtp_suffix_index_truncate(mtp_suffix_index * index, int64_t size);
    lib.mtp_suffix_index_truncate.restype = c_int32
    lib.mtp_suffix_index_truncate.argtypes = [c_void_p, c_int64]
    # mtp_status mtp_suffix_index_match(const mtp_suffix_index * index, int64_t * out_length,
    #     int64_t * out_next, int32_t * out_agreeing);
    lib.mtp_suffix_index_match.restype = c_int32
    lib.mtp_suffix_index_match.argtypes = [c_void_p, POINTER(c_int64), POINTER(c_int64), i32_p]
    # mtp_status mtp_suffix_index_propose(const mtp_suffix_index * index, int32_t * out, int32_t n,
    #     int32_t * out_n);
    lib.mtp_suffix_index_propose.restype = c_int32
    lib.mtp_suffix_index_propose.argtypes = [c_void_p, i32_p, c_int32, i32_p]
    # mtp_status mtp_suffix_index_bytes(const mtp_suffix_index * index, size_t * out);
    lib.mtp_suffix_index_bytes.restype = c_int32
    lib.mtp_suffix_index_bytes.argtypes = [c_void_p, POINTER(c_size_t)]

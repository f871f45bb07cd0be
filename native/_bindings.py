"""ctypes declarations for every function of mtp.h, made from its C prototype.

`library()` loads libmtp once, after `runtime`, so that it resolves to the llama.cpp that llama_cpp
has loaded.
"""

import ctypes
import re
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
from typing import Any

from .errors import (
    ContextFullError,
    DeviceFailedError,
    HeadMissingError,
    LibraryMismatchError,
    ModelRefusedError,
    NativeError,
)
from .libraries.layouts import UNDERSTOOD

API_VERSION = 13
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


# The prototypes of mtp.h.
_PROTOTYPES = """
const char * mtp_last_error(void);
int32_t mtp_api_version(void);
const char * mtp_built_for(void);
mtp_status mtp_check_runtime(void);
mtp_status mtp_call_for_struct(void (*function)(void), void * out);

bool mtp_context_has_failed(struct llama_context * context);

const char * mtp_gpu_name(int32_t index);
void mtp_abort_decoding(void);
mtp_status mtp_log_listen(bool echo);
const char * mtp_log_last(void);
mtp_status mtp_tell_crashes(void);

mtp_head_params mtp_head_default_params(void);
mtp_status mtp_head_load(const char * path, const mtp_head_params * params, mtp_head ** out);
mtp_status mtp_head_check(const char * path, const mtp_head_params * params);
void mtp_head_free(mtp_head * head);
mtp_status mtp_head_get_info(const mtp_head * head, mtp_head_info * out);
mtp_status mtp_head_get_draft_ids(const mtp_head * head, int32_t * out, size_t n);
mtp_status mtp_head_next_position(const mtp_head * head, int32_t seq, int32_t * out);
mtp_status mtp_head_feed(mtp_head * head, int32_t seq, int32_t first, const int32_t * tokens,
    const float * hidden, int32_t n_rows);
mtp_status mtp_head_draft(mtp_head * head, int32_t seq, int32_t first, const int32_t * tokens,
    const float * hidden, int32_t n_rows, int32_t depth, int32_t * out_tokens, float * out_probs,
    float * out_logits);
mtp_status mtp_head_keep_hidden(mtp_head * head, struct ggml_tensor * tensor, struct ggml_backend
    * backend, mtp_kept_rows * parts, int32_t n);
mtp_status mtp_head_get_hidden(mtp_head * head, int32_t seq, int32_t n, float * out, size_t size);
mtp_status mtp_head_draft_batch(mtp_head * head, const mtp_draft_task * tasks, int32_t n);
mtp_status mtp_head_rollback(mtp_head * head, int32_t seq, int32_t position);
mtp_status mtp_head_rows_size(const mtp_head * head, int32_t seq, size_t * out);
mtp_status mtp_head_get_rows(const mtp_head * head, int32_t seq, void * out, size_t n);
mtp_status mtp_head_set_rows(mtp_head * head, int32_t seq, int32_t end, const void * rows, size_t
    n);
mtp_status mtp_head_ops(mtp_head * head, const char ** out);

mtp_status mtp_imatrix_new(bool with_output, mtp_imatrix ** out);
void mtp_imatrix_free(mtp_imatrix * imatrix);
bool mtp_imatrix_evaluate(struct ggml_tensor * node, bool ask, void * imatrix);
mtp_status mtp_imatrix_size(const mtp_imatrix * imatrix, int32_t * out);
mtp_status mtp_imatrix_get(const mtp_imatrix * imatrix, int32_t i, mtp_imatrix_entry * out);
mtp_status mtp_head_built_graphs(const mtp_head * head, int64_t * out);
mtp_status mtp_head_set_imatrix(mtp_head * head, mtp_imatrix * imatrix);

mtp_status mtp_model_matrix(const struct llama_model * model, bool output, const struct
    ggml_tensor ** out);
mtp_status mtp_session_new(struct llama_context * context, mtp_head * head, const
    mtp_session_params * params, mtp_session ** out);
void mtp_session_free(mtp_session * session);
mtp_status mtp_session_get_stats(const mtp_session * session, mtp_session_stats * out);
mtp_status mtp_session_reset_stats(mtp_session * session);
mtp_status mtp_session_length(const mtp_session * session, int32_t seq, int32_t * out);
mtp_status mtp_session_decode(mtp_session * session, int32_t seq, const int32_t * tokens, int32_t
    n, bool all_logits);
mtp_status mtp_session_want_hidden(mtp_session * session);
mtp_status mtp_session_get_hidden(mtp_session * session, int32_t n, float * out, size_t size);
mtp_status mtp_context_hidden(struct llama_context * context, const float ** out);
mtp_status mtp_cycle_begin(mtp_session * session, int32_t seq, int32_t token, int32_t depth,
    int32_t * out_tokens, float * out_probs, int32_t * out_n);
mtp_status mtp_cycle_row(mtp_session * session, int32_t row, int32_t * out);
mtp_status mtp_cycle_end(mtp_session * session, int32_t n_accepted);
mtp_status mtp_cycle_from_text(const mtp_session * session, bool * out);
mtp_status mtp_session_step(mtp_session * session, int32_t seq, int32_t token, int32_t depth,
    struct llama_sampler * sampler, int32_t * out, int32_t * out_n);
mtp_status mtp_session_set_sampling(mtp_session * session, const mtp_sampling * sampling);
mtp_status mtp_session_sample(mtp_session * session, int32_t row, int32_t * out);
mtp_status mtp_session_step_sampled(mtp_session * session, int32_t seq, int32_t token, int32_t
    depth, int32_t * out, int32_t * out_n);
mtp_status mtp_session_argmax(mtp_session * session, int32_t row, int32_t * out);
mtp_status mtp_session_choose(mtp_session * session, int32_t row, struct llama_sampler * sampler,
    int32_t * out);
mtp_status mtp_seq_rm(mtp_session * session, int32_t seq, int32_t p0, int32_t p1);
mtp_status mtp_session_sync(mtp_session * session, int32_t seq);
mtp_status mtp_session_skip(mtp_session * session, int32_t seq, int64_t length);
mtp_status mtp_seq_cp(mtp_session * session, int32_t from, int32_t to);

mtp_status mtp_checkpoint_save(mtp_session * session, int32_t seq, int32_t kind, mtp_checkpoint **
    out);
mtp_status mtp_checkpoint_restore(mtp_session * session, int32_t seq, const mtp_checkpoint *
    checkpoint);
mtp_status mtp_checkpoint_check(mtp_session * session, int32_t seq, const mtp_checkpoint *
    checkpoint);
mtp_status mtp_checkpoint_attach(mtp_session * session, int32_t seq, mtp_checkpoint * checkpoint);
void mtp_checkpoint_free(mtp_checkpoint * checkpoint);
mtp_status mtp_checkpoint_get_info(const mtp_checkpoint * checkpoint, mtp_checkpoint_info * out);
mtp_status mtp_checkpoint_write(const mtp_checkpoint * checkpoint, void * out, size_t n);
mtp_status mtp_checkpoint_read(const void * data, size_t n, mtp_checkpoint ** out);
mtp_status mtp_checkpoint_borrow(const void * data, size_t n, mtp_checkpoint ** out);

mtp_status mtp_session_file_open(const char * path, mtp_session_file ** out);
void mtp_session_file_close(mtp_session_file * file);
mtp_status mtp_session_file_get_info(const mtp_session_file * file, mtp_session_file_info * out);
mtp_status mtp_session_file_get_section(const mtp_session_file * file, int32_t i,
    mtp_session_section * out);
mtp_status mtp_session_file_get_field(const mtp_session_file * file, int32_t i, mtp_session_field
    * out);
mtp_status mtp_session_file_read(const mtp_session_file * file, int32_t i, void * out, size_t n);
mtp_status mtp_session_file_header(const char * path, const mtp_session_file_info * info,
    mtp_session_section * sections, const mtp_session_field * fields, void * out, size_t n, size_t
    * out_n);

const char * mtp_session_fields(void);

mtp_status mtp_depth_new(int32_t max_depth, mtp_depth ** out);
mtp_status mtp_depth_new_beside(const mtp_depth * other, mtp_depth ** out);
mtp_status mtp_depth_expect(mtp_depth * depth, double acceptance);
mtp_status mtp_depth_share(mtp_depth * depth, int32_t n_sequences);
mtp_status mtp_depth_report_batch(mtp_depth * depth, int32_t n_tokens, double ms);
void mtp_depth_free(mtp_depth * depth);
mtp_status mtp_depth_set_costs(mtp_depth * depth, const double * verify_ms, int32_t n_verify,
    const double * draft_ms, int32_t n_draft);
mtp_status mtp_depth_report_draft(mtp_depth * depth, int32_t n_sequences, int32_t n_tokens, double
    ms);
mtp_status mtp_depth_plan_batch(mtp_depth * const * depths, const int32_t * rooms, int32_t n,
    int32_t * out);
mtp_status mtp_depth_keep_batch(mtp_depth * const * depths, const float * const * probabilities,
    const int32_t * n_drafted, int32_t n, int32_t others, int32_t * out);
mtp_status mtp_depth_plan(mtp_depth * depth, int32_t room, int32_t * out);
mtp_status mtp_depth_keep(const mtp_depth * depth, const float * probabilities, int32_t n, bool
    drawn, int32_t * out);
mtp_status mtp_depth_report(mtp_depth * depth, const mtp_cycle_outcome * outcome);
mtp_status mtp_depth_state_size(const mtp_depth * depth, size_t * out);
mtp_status mtp_depth_get_state(const mtp_depth * depth, void * out, size_t n);
mtp_status mtp_depth_set_state(mtp_depth * depth, const void * data, size_t n);
mtp_status mtp_session_set_costs(mtp_session * session, const double * verify_ms, int32_t
    n_verify, const double * draft_ms, int32_t n_draft);
mtp_status mtp_session_remember_depth(mtp_session * session, const char * path);

mtp_status mtp_text_drafts_new(mtp_text_drafts ** out);
void mtp_text_drafts_free(mtp_text_drafts * text);
mtp_status mtp_text_drafts_set(mtp_text_drafts * text, const int32_t * tokens, int64_t n, bool
    generated);
mtp_status mtp_text_drafts_set_corpus(mtp_text_drafts * text, const mtp_corpus * corpus);
mtp_status mtp_text_drafts_plan(const mtp_text_drafts * text, mtp_depth * depth, int32_t
    head_depth, int32_t room, int32_t * out, int32_t n, int32_t * out_n);
mtp_status mtp_depth_report_text(mtp_depth * depth, int32_t n_verified, int32_t n_accepted, double
    verify_ms, double undo_ms);
mtp_status mtp_corpus_write(const char * path, const int32_t * tokens, int64_t n, int32_t n_vocab,
    uint64_t tokenizer);
mtp_status mtp_corpus_open(const char * path, int32_t n_vocab, uint64_t tokenizer, mtp_corpus **
    out);
void mtp_corpus_free(mtp_corpus * corpus);
mtp_status mtp_corpus_match(const mtp_corpus * corpus, const int32_t * tokens, int64_t n, int64_t
    * out_length, int64_t * out_next);
mtp_status mtp_corpus_propose(const mtp_corpus * corpus, const int32_t * tokens, int64_t n,
    int32_t * out, int32_t n_out, int32_t * out_n);
mtp_status mtp_session_set_corpus(mtp_session * session, const mtp_corpus * corpus);
mtp_status mtp_tokenizer_fingerprint(const char * const * texts, int32_t n_vocab, uint64_t * out);
mtp_status mtp_session_tokenizer(const mtp_session * session, uint64_t * out);
mtp_status mtp_suffix_index_new(mtp_suffix_index ** out);
void mtp_suffix_index_free(mtp_suffix_index * index);
mtp_status mtp_suffix_index_append(mtp_suffix_index * index, const int32_t * tokens, int64_t n);
mtp_status mtp_suffix_index_truncate(mtp_suffix_index * index, int64_t size);
mtp_status mtp_suffix_index_match(const mtp_suffix_index * index, int64_t * out_length, int64_t *
    out_next, int32_t * out_agreeing);
mtp_status mtp_suffix_index_propose(const mtp_suffix_index * index, int32_t * out, int32_t n,
    int32_t * out_n);
mtp_status mtp_suffix_index_bytes(const mtp_suffix_index * index, size_t * out);

mtp_status mtp_token_logprobs(const float * const * rows, const int32_t * tokens, int32_t n,
    int32_t n_vocab, int32_t n_top, int32_t n_threads, double * out, int32_t * out_top_ids, double
    * out_top);
"""

_SCALARS = {
    "bool": c_bool,
    "double": c_double,
    "float": c_float,
    "int32_t": c_int32,
    "int64_t": c_int64,
    "mtp_status": c_int32,
    "size_t": c_size_t,
    "uint64_t": c_uint64,
}


def _ctype(declared: str) -> Any:
    """Return the ctypes of a parameter or result; structs of other libraries are opaque."""
    name = next(w for w in re.findall(r"\w+", declared) if w not in ("const", "struct"))
    stars = declared.count("*")
    found: Any
    if name == "char":
        found, stars = c_char_p, stars - 1
    elif name in _SCALARS:
        found = _SCALARS[name]
    elif struct := globals().get("".join(part.title() for part in name.split("_")[1:])):
        found = struct
    else:
        found, stars = (c_void_p, stars - 1) if stars else (None, 0)
    for _ in range(stars):
        found = POINTER(found)
    return found


def _declare(lib: ctypes.CDLL) -> None:
    for result, name, parameters in re.findall(
        r"(.+?)(\w+)\((.*?)\);", " ".join(_PROTOTYPES.split())
    ):
        function = getattr(lib, name)
        function.restype = _ctype(result)
        function.argtypes = [_ctype(p) for p in parameters.split(", ") if p != "void"]

// The C functions of the head: they check arguments that need no object, then call it.

#include "error.h"
#include "head/head.h"
#include "head/imatrix.h"

using mtp::guard;
using mtp::require;

// Counts like llama.cpp: discrete GPUs, or integrated ones if there are no others.
const char * mtp_gpu_name(int32_t index) {
    for (const enum ggml_backend_dev_type type : {GGML_BACKEND_DEVICE_TYPE_GPU, GGML_BACKEND_DEVICE_TYPE_IGPU}) {
        int32_t n = 0;
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            ggml_backend_dev_t device = ggml_backend_dev_get(i);
            if (ggml_backend_dev_type(device) == type && n++ == index) {
                return ggml_backend_dev_name(device);
            }
        }
        if (n > 0) {
            break;
        }
    }
    return "CPU";
}

mtp_head_params mtp_head_default_params(void) {
    mtp_head_params params = {};
    params.n_threads = 2;
    params.n_ctx = 512;
    params.n_seq_max = 1;
    params.n_batch = 512;
    return params;
}

mtp_status mtp_head_load(const char * path, const mtp_head_params * params, mtp_head ** out) {
    return guard([&] {
        *require(out, "out") = nullptr;
        const std::string file = require(path, "path");
        mtp_head_params chosen = *require(params, "params");
        const auto load = [&] { *out = new mtp_head(file, chosen); };
        const mtp_status status = guard(load);
        if (status == MTP_OK) {
            return;
        }
        const std::string reason = mtp_last_error();
        // Where the rows of a list find no room, there may be room without them, because over the whole vocabulary the
        // trunk's matrices are used where they are.
        if (status == MTP_ERROR_MEMORY && chosen.fastmtp_size == 0) {
            chosen.fastmtp_size = -1;
            if (guard(load) == MTP_OK) {
                return;
            }
        }
        throw mtp::Error(status, reason);
    });
}

mtp_status mtp_head_check(const char * path, const mtp_head_params * params) {
    return guard([&] { mtp::Head::check(require(path, "path"), *require(params, "params")); });
}

void mtp_head_free(mtp_head * head) {
    delete head;
}

mtp_status mtp_head_get_info(const mtp_head * head, mtp_head_info * out) {
    return guard([&] { *require(out, "out") = require(head, "head")->info(); });
}

mtp_status mtp_head_get_draft_ids(const mtp_head * head, int32_t * out, size_t n) {
    return guard([&] {
        const mtp::DraftVocabulary & vocabulary = require(head, "head")->vocabulary();
        mtp::require_range((long long) n, vocabulary.size(), vocabulary.size(), "n");
        require(out, "out");
        for (size_t i = 0; i < n; ++i) {
            out[i] = vocabulary.target_id(int32_t(i));
        }
    });
}

mtp_status mtp_head_next_position(const mtp_head * head, int32_t seq, int32_t * out) {
    return guard([&] {
        require(head, "head")->check_seq(seq);
        *require(out, "out") = int32_t(head->cache().next(seq));
    });
}

mtp_status mtp_head_feed(mtp_head * head, int32_t seq, int32_t first, const int32_t * tokens, const float * hidden,
                         int32_t n_rows) {
    return guard([&] { require(head, "head")->feed(seq, first, tokens, hidden, n_rows); });
}

mtp_status mtp_head_draft(mtp_head * head, int32_t seq, int32_t first, const int32_t * tokens, const float * hidden,
                          int32_t n_rows, int32_t depth, int32_t * out_tokens, float * out_probs,
                          float * out_logits) {
    return guard([&] {
        require(head, "head");
        const mtp_draft_task task = {seq, first, tokens, require(hidden, "hidden"), n_rows, depth, out_tokens, out_probs};
        head->draft_batch(&task, 1, nullptr, out_logits);
    });
}

mtp_status mtp_head_keep_hidden(mtp_head * head, ggml_tensor * tensor, ggml_backend * backend, mtp_kept_rows * parts,
                                int32_t n) {
    return guard([&] {
        require(head, "head")->keep_hidden({require(backend, "backend"), require(tensor, "tensor")}, parts, n);
    });
}

mtp_status mtp_head_get_hidden(mtp_head * head, int32_t seq, int32_t n, float * out, size_t size) {
    return guard([&] {
        const long long wanted = (long long) n * require(head, "head")->width();
        mtp::require_range((long long) size, wanted, wanted, "size");
        head->get_hidden(seq, n, out);
    });
}

mtp_status mtp_head_draft_batch(mtp_head * head, const mtp_draft_task * tasks, int32_t n) {
    return guard([&] { require(head, "head")->draft_batch(tasks, n); });
}

mtp_status mtp_head_rollback(mtp_head * head, int32_t seq, int32_t position) {
    return guard([&] { require(head, "head")->rollback(seq, position); });
}

mtp_status mtp_head_rows_size(const mtp_head * head, int32_t seq, size_t * out) {
    return guard([&] { *require(out, "out") = require(head, "head")->rows_size(seq); });
}

mtp_status mtp_head_get_rows(const mtp_head * head, int32_t seq, void * out, size_t n) {
    return guard([&] { require(head, "head")->get_rows(seq, out, n); });
}

mtp_status mtp_head_set_rows(mtp_head * head, int32_t seq, int32_t end, const void * rows, size_t n) {
    return guard([&] { require(head, "head")->set_rows(seq, end, rows, n); });
}

mtp_status mtp_head_ops(mtp_head * head, const char ** out) {
    return guard([&] { *require(out, "out") = require(head, "head")->ops().c_str(); });
}

mtp_status mtp_head_built_graphs(const mtp_head * head, int64_t * out) {
    return guard([&] { *require(out, "out") = require(head, "head")->built_graphs(); });
}

mtp_status mtp_head_set_imatrix(mtp_head * head, mtp_imatrix * imatrix) {
    return guard([&] { require(head, "head")->set_imatrix(imatrix); });
}

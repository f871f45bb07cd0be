// The C functions of drafts from the text: they check arguments that need no object, then call it.

#include "depth/depth.h"
#include "error.h"
#include "lookup/corpus.h"
#include "lookup/text_drafts.h"

using mtp::guard;
using mtp::require;
using mtp::require_range;

struct mtp_text_drafts : mtp::TextDrafts {};

mtp_status mtp_text_drafts_new(mtp_text_drafts ** out) {
    return guard([&] {
        *require(out, "out") = nullptr;
        *out = new mtp_text_drafts();
    });
}

void mtp_text_drafts_free(mtp_text_drafts * text) {
    delete text;
}

mtp_status mtp_text_drafts_set(mtp_text_drafts * text, const int32_t * tokens, int64_t n, bool generated) {
    return guard([&] { require(text, "text")->set(tokens, n, generated); });
}

mtp_status mtp_text_drafts_set_corpus(mtp_text_drafts * text, const mtp_corpus * corpus) {
    return guard([&] { require(text, "text")->set_corpus(corpus); });
}

mtp_status mtp_text_drafts_plan(const mtp_text_drafts * text, mtp_depth * depth, int32_t head_depth, int32_t room,
                                int32_t * out, int32_t n, int32_t * out_n) {
    return guard([&] {
        require(text, "text");
        require_range(head_depth, MTP_DEPTH_AUTO, require(depth, "depth")->max_depth(), "head_depth");
        require_range(room, 0, INT32_MAX, "room");
        require_range(n, 0, MTP_MAX_DEPTH, "n");
        if (n > 0) {
            require(out, "out");
        }
        *require(out_n, "out_n") = text->plan(*depth, head_depth, room, out, n);
    });
}

mtp_status mtp_depth_report_text(mtp_depth * depth, int32_t n_verified, int32_t n_accepted, double verify_ms,
                                 double undo_ms) {
    return guard([&] {
        require(depth, "depth");
        require_range(n_verified, 1, MTP_MAX_DEPTH, "n_verified");
        require_range(n_accepted, 0, n_verified, "n_accepted");
        depth->report_free(n_verified, n_accepted, verify_ms, undo_ms);
    });
}

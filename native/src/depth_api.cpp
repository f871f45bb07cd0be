// The C functions of the depth chooser: they check arguments that need no object, then call it.

#include "depth_handle.h"
#include "error.h"

using mtp::guard;
using mtp::require;
using mtp::require_range;

mtp_status mtp_depth_new(int32_t max_depth, mtp_depth ** out) {
    return guard([&] {
        *require(out, "out") = nullptr;
        *out = new mtp_depth(max_depth);
    });
}

mtp_status mtp_depth_new_beside(const mtp_depth * other, mtp_depth ** out) {
    return guard([&] {
        *require(out, "out") = nullptr;
        *out = new mtp_depth(require(other, "other")->max_depth(), other->costs());
    });
}

void mtp_depth_free(mtp_depth * depth) {
    delete depth;
}

mtp_status mtp_depth_set_costs(mtp_depth * depth, const double * verify_ms, int32_t n_verify, const double * draft_ms,
                               int32_t n_draft) {
    return guard([&] { require(depth, "depth")->set_costs(verify_ms, n_verify, draft_ms, n_draft); });
}

mtp_status mtp_depth_share(mtp_depth * depth, int32_t n_sequences) {
    return guard([&] { require(depth, "depth")->share(n_sequences); });
}

mtp_status mtp_depth_report_batch(mtp_depth * depth, int32_t n_tokens, double ms) {
    return guard([&] { require(depth, "depth")->report_batch(n_tokens, ms); });
}

mtp_status mtp_depth_plan(mtp_depth * depth, int32_t room, int32_t * out) {
    return guard([&] {
        require_range(room, 0, MTP_MAX_DEPTH, "room");
        require(out, "out");
        *out = require(depth, "depth")->plan(room);
    });
}

mtp_status mtp_depth_keep(const mtp_depth * depth, const float * probabilities, int32_t n, bool drawn, int32_t * out) {
    return guard([&] {
        require(out, "out");
        require_range(n, 0, require(depth, "depth")->max_depth(), "n");
        *out = depth->keep(n > 0 ? require(probabilities, "probabilities") : nullptr, n, !drawn);
    });
}

mtp_status mtp_depth_report(mtp_depth * depth, const mtp_cycle_outcome * outcome) {
    return guard([&] { require(depth, "depth")->report(*require(outcome, "outcome")); });
}

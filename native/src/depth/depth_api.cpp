// The C functions of the depth chooser: they check arguments that need no object, then call it.

#include "depth/depth.h"
#include "error.h"

#include <algorithm>
#include <cstring>
#include <vector>

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

mtp_status mtp_depth_expect(mtp_depth * depth, double acceptance) {
    return guard([&] { require(depth, "depth")->expect(acceptance); });
}

mtp_status mtp_depth_share(mtp_depth * depth, int32_t n_sequences) {
    return guard([&] { require(depth, "depth")->share(n_sequences); });
}

mtp_status mtp_depth_report_batch(mtp_depth * depth, int32_t n_tokens, double ms) {
    return guard([&] { require(depth, "depth")->report_batch(n_tokens, ms); });
}

mtp_status mtp_depth_report_draft(mtp_depth * depth, int32_t n_sequences, int32_t n_tokens, double ms) {
    return guard([&] { require(depth, "depth")->report_draft(n_sequences, n_tokens, ms); });
}

// The choosers of a batch, which must share their costs.
static std::vector<mtp::Depth *> batch(mtp_depth * const * depths, int32_t n) {
    require_range(n, 1, MTP_MAX_SEQUENCES, "n");
    require(depths, "depths");
    std::vector<mtp::Depth *> out;
    for (int32_t i = 0; i < n; ++i) {
        out.push_back(require(depths[i], "depths"));
        if (out.back()->costs() != out.front()->costs()) {
            throw mtp::Error(MTP_ERROR_ARGUMENT, "depths: expected choosers made with mtp_depth_new_beside, found others");
        }
    }
    return out;
}

mtp_status mtp_depth_plan_batch(mtp_depth * const * depths, const int32_t * rooms, int32_t n, int32_t * out) {
    return guard([&] {
        const std::vector<mtp::Depth *> all = batch(depths, n);
        require(rooms, "rooms");
        require(out, "out");
        for (int32_t i = 0; i < n; ++i) {
            require_range(rooms[i], 0, MTP_MAX_DEPTH, "room");
        }
        const std::vector<int32_t> chosen = mtp::Depth::plan_batch(all, {rooms, rooms + n});
        std::copy(chosen.begin(), chosen.end(), out);
    });
}

mtp_status mtp_depth_keep_batch(mtp_depth * const * depths, const float * const * probabilities,
                                const int32_t * n_drafted, int32_t n, int32_t others, int32_t * out) {
    return guard([&] {
        require_range(others, 0, MTP_MAX_SEQUENCES * (MTP_MAX_DEPTH + 1), "others");
        const std::vector<mtp::Depth *> all = batch(depths, n);
        require(probabilities, "probabilities");
        require(n_drafted, "n_drafted");
        require(out, "out");
        for (int32_t i = 0; i < n; ++i) {
            require_range(n_drafted[i], 0, all[size_t(i)]->max_depth(), "n_drafted");
            if (n_drafted[i] > 0) {
                require(probabilities[i], "probabilities");
            }
        }
        const std::vector<int32_t> kept =
            mtp::Depth::keep_batch(all, {probabilities, probabilities + n}, {n_drafted, n_drafted + n}, others);
        std::copy(kept.begin(), kept.end(), out);
    });
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

mtp_status mtp_depth_state_size(const mtp_depth * depth, size_t * out) {
    return guard([&] { *require(out, "out") = require(depth, "depth")->save().size(); });
}

mtp_status mtp_depth_get_state(const mtp_depth * depth, void * out, size_t n) {
    return guard([&] {
        const std::vector<uint8_t> state = require(depth, "depth")->save();
        require_range((long long) n, (long long) state.size(), (long long) state.size(), "n");
        std::memcpy(require(out, "out"), state.data(), n);
    });
}

mtp_status mtp_depth_set_state(mtp_depth * depth, const void * data, size_t n) {
    return guard([&] {
        mtp::BoundedReader in("the state of a depth chooser", static_cast<const uint8_t *>(require(data, "data")), n);
        require(depth, "depth")->restore(in, true);
    });
}

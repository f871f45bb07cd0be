// The session's checkpoints: what they save of a sequence, and when they can be restored.

#include "error.h"
#include "session/session.h"
#include "session/trunk.h"

namespace mtp {

static bool in_place(mtp_checkpoint_kind kind) {
    return kind == MTP_CHECKPOINT_DEVICE || kind == MTP_CHECKPOINT_HOST;
}

Checkpoint Session::save(int32_t seq, int32_t kind) {
    check_idle();
    Sequence & s = sequence(seq);
    require_range(kind, MTP_CHECKPOINT_DEVICE, MTP_CHECKPOINT_WHOLE, "kind");
    if (s.length == 0) {
        throw Error(MTP_ERROR_STATE, format("sequence %d: expected tokens to save, found none", seq));
    }
    roll_back(seq);
    Checkpoint c;
    c.kind = mtp_checkpoint_kind(kind);
    c.length = s.length;
    if (drafting() || looking_up()) {
        c.head = drafter_->save(seq, !in_place(c.kind));
    }
    if (looking_up()) {
        c.text = drafter_->save_text(seq, !in_place(c.kind));
    }
    if (c.kind != MTP_CHECKPOINT_DEVICE) {
        c.trunk_fingerprint = trunk_.fingerprint();
        c.head_fingerprint = c.head.hidden.empty() ? 0 : head_->fingerprint();
    }
    if (in_place(c.kind)) {
        c.mark = s.marks.back();
        if (trunk_.recurrent()) {
            trunk_.save(seq, c.kind == MTP_CHECKPOINT_DEVICE, c.recurrent);
        }
        if (c.kind == MTP_CHECKPOINT_DEVICE) {
            s.checkpoint.clear(); // device memory holds one copy per sequence, which is now this one
        }
        return c;
    }
    if (c.kind == MTP_CHECKPOINT_HEAD && !drafting() && !looking_up()) {
        throw Error(MTP_ERROR_STATE, format("sequence %d: expected a session that drafts, found one without drafts", seq));
    }
    if (c.kind == MTP_CHECKPOINT_WHOLE) {
        const StateLayout layout = trunk_.state_layout();
        c.set_trunk(trunk_.save_whole(seq, c.length), layout);
    }
    return c;
}

// Whether a checkpoint has a state of this session's head.
bool Session::head_fits(const Checkpoint & c) const {
    return drafting() && c.head_fingerprint == head_->fingerprint(); // which is never 0
}

// Rejects the checkpoint of another model.
void Session::check_model(const Checkpoint & c) const {
    if (c.trunk_fingerprint != trunk_.fingerprint()) {
        throw Error(MTP_ERROR_STATE, format("checkpoint: expected one of this model (%016llx), found another's (%016llx)",
                                            (unsigned long long) trunk_.fingerprint(),
                                            (unsigned long long) c.trunk_fingerprint));
    }
}

// Rejects a state of this session's head with other sizes.
void Session::check_head(const Checkpoint & c, size_t row_bytes) const {
    const size_t hidden = size_t(trunk_.n_embd());
    if (c.head.hidden.size() != hidden || c.head.rows.size() != row_bytes || c.head.token >= trunk_.n_vocab()) {
        throw Error(MTP_ERROR_FORMAT,
                    format("checkpoint: expected %zu numbers, %zu bytes of rows and a token below %lld for the head, "
                           "found %zu, %zu and %d", hidden, row_bytes, (long long) trunk_.n_vocab(), c.head.hidden.size(),
                           c.head.rows.size(), c.head.token));
    }
}

// Rejects a checkpoint that does not fit this session, before anything is changed.
void Session::check_checkpoint(int32_t seq, const Checkpoint & c) const {
    const Sequence & s = sequences_[size_t(seq)];
    if (in_place(c.kind)) {
        if (size_t(c.length) > s.marks.size() || s.marks[size_t(c.length) - 1] != c.mark) {
            throw Error(MTP_ERROR_STATE,
                        format("checkpoint: expected its %lld tokens in the sequence, found that they have been removed; "
                               "use MTP_CHECKPOINT_WHOLE to survive that", (long long) c.length));
        }
        if (c.length < trunk_.shortest(seq)) {
            throw Error(MTP_ERROR_STATE,
                        format("checkpoint: expected %lld tokens or more, as the cache of a window has forgotten what was "
                               "before, found %lld; use MTP_CHECKPOINT_WHOLE to survive that",
                               (long long) trunk_.shortest(seq), (long long) c.length));
        }
        trunk_.check(c.recurrent);
        return;
    }
    const int64_t most = trunk_.n_ctx() - cells(seq);
    if (c.length > most) {
        throw Error(MTP_ERROR_FULL, format("checkpoint: expected at most %lld tokens, the context's free size, found %lld",
                                           (long long) most, (long long) c.length));
    }
    check_model(c);
    if (head_fits(c)) {
        check_head(c, head_->cache().rows_bytes(c.length - c.head.first));
    }
    if (c.kind == MTP_CHECKPOINT_WHOLE && !(c.trunk_layout == trunk_.state_layout())) {
        throw Error(MTP_ERROR_FORMAT, "checkpoint: expected the layout of this model's state in this version of llama.cpp, "
                                      "found another");
    }
    const bool has_text = looking_up() && !c.text.empty();
    if (has_text) {
        TextDrafts::check_saved(c.text, c.length, trunk_.n_vocab());
    }
    if (c.kind == MTP_CHECKPOINT_WHOLE || c.head.hidden.empty()) {
        return;
    }
    if (drafting() ? !head_fits(c) : !has_text) {
        throw Error(MTP_ERROR_STATE, "checkpoint: expected one of this session's head, found another's");
    }
}

// Sets a sequence to the `length` tokens in the trunk's memory and clears the head's rows.
void Session::set_length(int32_t seq, int64_t length) {
    Sequence & s = sequences_[size_t(seq)];
    s = Sequence();
    s.decoded = s.length = length;
    trunk_.forget_rows();
    drafter_->clear(seq, length);
    for (int64_t i = 0; i < length; ++i) {
        s.marks.push_back(next_stamp());
    }
}

void Session::check(int32_t seq, const Checkpoint & c) {
    check_idle();
    sequence(seq);
    check_checkpoint(seq, c);
    if (c.kind == MTP_CHECKPOINT_HEAD && trunk_.length(seq) != c.length) {
        throw Error(MTP_ERROR_STATE, format("checkpoint: expected a trunk that holds its %lld tokens, found %lld",
                                            (long long) c.length, (long long) trunk_.length(seq)));
    }
}

void Session::attach(int32_t seq, Checkpoint & c) {
    check_idle();
    const Sequence & s = sequence(seq);
    if (c.kind != MTP_CHECKPOINT_HOST || c.mark != 0) {
        throw Error(MTP_ERROR_STATE, "checkpoint: expected one in host memory that was read, found another");
    }
    check_model(c);
    if (c.length > s.length || !trunk_.recurrent()) {
        throw Error(MTP_ERROR_STATE, format("checkpoint: expected at most the %lld tokens of the sequence, found %lld",
                                            (long long) s.length, (long long) c.length));
    }
    if (!looking_up()) {
        c.text.clear();
    } else if (!c.text.empty()) {
        drafter_->check_learned(seq, c.length, c.text);
    }
    if (head_fits(c)) {
        check_head(c, 0);
    } else if (drafting()) {
        c.head = DrafterState();
    }
    c.mark = s.marks[size_t(c.length) - 1];
}

void Session::restore(int32_t seq, const Checkpoint & c) {
    check(seq, c);
    Sequence & s = sequences_[size_t(seq)];
    change(seq, [&] {
        if (!in_place(c.kind)) {
            if (c.kind == MTP_CHECKPOINT_WHOLE) {
                trunk_.restore_whole(seq, c.length, c.trunk);
            }
            set_length(seq, c.length);
            if (head_fits(c) || !drafting()) {
                drafter_->restore(seq, c.length, c.head);
            }
            if (looking_up() && !c.text.empty()) {
                drafter_->restore_text(seq, c.length, c.text);
            }
            return;
        }
        if (!c.recurrent.empty()) {
            trunk_.restore(seq, c.recurrent);
        }
        if (!trunk_.remove_tail(seq, c.length)) {
            throw Error(MTP_ERROR_BACKEND, format("llama.cpp could not remove the tokens from position %lld on",
                                                  (long long) c.length));
        }
        s.decoded = s.length = c.length;
        s.removable = 0;
        s.checkpoint.clear();
        s.marks.resize(size_t(c.length));
        drafter_->truncate(seq, c.length);
        drafter_->restore(seq, c.length, c.head);
        if (looking_up() && !c.text.empty()) {
            drafter_->restore_learned(seq, c.text);
        }
    });
}

void Session::copy(int32_t from, int32_t to) {
    check_idle();
    Sequence & source = sequence(from);
    Sequence & target = sequence(to);
    if (from == to) {
        return;
    }
    roll_back(from);
    clear_sequence(to);
    if (source.length == 0) {
        return;
    }
    change(to, [&] {
        trunk_.copy(from, to, source.length);
        target = source;
        drafter_->copy(from, to);
        target.removable = 0; // snapshots are not copied
        target.checkpoint.clear();
    });
}

} // namespace mtp

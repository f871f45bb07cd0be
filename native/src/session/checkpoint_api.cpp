// The C functions of checkpoints: they check arguments that need no object, then call the session.

#include "error.h"
#include "session/session.h"

using mtp::guard;
using mtp::require;

mtp_status mtp_checkpoint_save(mtp_session * session, int32_t seq, int32_t kind, mtp_checkpoint ** out) {
    return guard([&] {
        *require(out, "out") = nullptr;
        *out = new mtp_checkpoint{require(session, "session")->save(seq, kind)};
    });
}

mtp_status mtp_checkpoint_restore(mtp_session * session, int32_t seq, const mtp_checkpoint * checkpoint) {
    return guard([&] { require(session, "session")->restore(seq, *require(checkpoint, "checkpoint")); });
}

mtp_status mtp_checkpoint_check(mtp_session * session, int32_t seq, const mtp_checkpoint * checkpoint) {
    return guard([&] { require(session, "session")->check(seq, *require(checkpoint, "checkpoint")); });
}

mtp_status mtp_checkpoint_attach(mtp_session * session, int32_t seq, mtp_checkpoint * checkpoint) {
    return guard([&] { require(session, "session")->attach(seq, *require(checkpoint, "checkpoint")); });
}

void mtp_checkpoint_free(mtp_checkpoint * checkpoint) {
    delete checkpoint;
}

mtp_status mtp_checkpoint_get_info(const mtp_checkpoint * checkpoint, mtp_checkpoint_info * out) {
    return guard([&] {
        const mtp::Checkpoint & c = *require(checkpoint, "checkpoint");
        mtp_checkpoint_info info = {};
        info.kind = c.kind;
        info.length = int32_t(c.length);
        info.bytes = int64_t(c.recurrent.bytes.size() + c.head.rows.size() + c.trunk.size() + c.text.size() +
                             c.head.depth.size());
        info.written_bytes = int64_t(c.written_size());
        *require(out, "out") = info;
    });
}

mtp_status mtp_checkpoint_write(const mtp_checkpoint * checkpoint, void * out, size_t n) {
    return guard([&] {
        const mtp::Checkpoint & c = *require(checkpoint, "checkpoint");
        if (c.written_size() == 0) {
            throw mtp::Error(MTP_ERROR_STATE, "checkpoint: expected kind head or whole, or a recurrent state in host memory, "
                                              "found one that cannot leave its session");
        }
        mtp::require_range((long long) n, (long long) c.written_size(), (long long) c.written_size(), "n");
        c.write(static_cast<uint8_t *>(require(out, "out")));
    });
}

static mtp_status read(const void * data, size_t n, bool borrow, mtp_checkpoint ** out) {
    return guard([&] {
        *require(out, "out") = nullptr;
        *out = new mtp_checkpoint{mtp::Checkpoint::read(static_cast<const uint8_t *>(require(data, "data")), n, borrow)};
    });
}

mtp_status mtp_checkpoint_read(const void * data, size_t n, mtp_checkpoint ** out) {
    return read(data, n, false, out);
}

mtp_status mtp_checkpoint_borrow(const void * data, size_t n, mtp_checkpoint ** out) {
    return read(data, n, true, out);
}

mtp_status mtp_seq_cp(mtp_session * session, int32_t from, int32_t to) {
    return guard([&] { require(session, "session")->copy(from, to); });
}

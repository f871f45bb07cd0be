#pragma once
// The few things that a session asks of a llama.cpp context, one sequence at a time.

#include "llama.h"

#include <cstdint>
#include <vector>

namespace mtp {

class Trunk {
public:
    // min_rows: the most that decode() will be asked for; the positions that companions may need are
    // kept out of n_ctx.
    Trunk(llama_context * context, int64_t min_rows);
    ~Trunk();
    Trunk(const Trunk &) = delete;
    Trunk & operator=(const Trunk &) = delete;

    int64_t n_ctx() const { return n_ctx_; } // positions of one sequence
    int64_t n_batch() const { return n_batch_; } // most tokens that llama.cpp computes in one piece
    int64_t n_embd() const { return n_embd_; }
    int64_t n_vocab() const { return n_vocab_; }
    int64_t n_seq_max() const { return n_seq_max_; }
    int64_t n_snapshots() const { return n_snapshots_; } // n_rs_seq
    bool recurrent() const { return recurrent_; } // a part of the memory cannot be cut
    bool unified() const { return unified_; } // all sequences share the n_ctx() positions

    // Decodes n <= n_batch tokens at positions first, ... . Fewer than min_rows get companions after
    // them, which are computed alike and taken back: then no other token can be. MTP_ERROR_FULL when
    // there is no room, MTP_ERROR_BACKEND when llama.cpp fails.
    void decode(int32_t seq, int64_t first, const int32_t * tokens, int64_t n, bool all_logits, int64_t min_rows = 1);

    // Has llama.cpp hand out hidden states after each decode, until this object goes.
    void want_hidden();

    // Hidden states (after the final norm) of the tokens of the last decode, [n][n_embd]; valid
    // until the next one.
    const float * hidden() const;

    // Logits of a row of the last decode, [n_vocab]; -1: the last one.
    const float * logits(int32_t row) const;

    // Calls llama_memory_seq_rm for the tail from `first` on; what it says.
    bool remove_tail(int32_t seq, int64_t first);

    // Empties all sequences and zeroes the memory: llama.cpp begins a sequence with a state multiplied
    // by zero, which a NaN in the cell would outlive.
    void clear();

    // Positions in the memory: 0 when the sequence is empty.
    int64_t length(int32_t seq) const;

    // A copy of a sequence's recurrent state, which cannot be cut. In device memory the context keeps
    // one for each sequence, and a new one takes the place of the old.
    struct Copy {
        std::vector<uint8_t> bytes; // all of it, or what llama.cpp needs to find it on the device
        bool on_device = false;
        int32_t seq = 0;            // the one it was made of
        uint64_t stamp = 0;         // of the device memory when this was written

        bool empty() const { return bytes.empty(); }
        void clear() { *this = Copy(); }
    };
    void save(int32_t seq, bool on_device, Copy & out);

    // MTP_ERROR_STATE when a newer copy has taken its place in device memory.
    void check(const Copy & saved) const;

    // What check() refuses, and MTP_ERROR_BACKEND when llama.cpp fails: the sequence is then undefined.
    void restore(int32_t seq, const Copy & saved);

    // Everything that the context keeps of a sequence of `length` tokens, as trunk_state.h has it.
    // What comes back must have passed its check. When restoring fails the sequence is undefined.
    std::vector<uint8_t> save_whole(int32_t seq, int64_t length);
    void restore_whole(int32_t seq, int64_t length, const std::vector<uint8_t> & state);

    // Makes `to` hold what `from` holds, of `length` tokens, and nothing of it shared.
    void copy(int32_t from, int32_t to, int64_t length);

    // A number that models differ in: of the metadata and the size of the weights.
    uint64_t fingerprint() const;

    llama_context * context() const { return context_; }

private:
    // Forgets a sequence; the number of streams that llama.cpp's states have.
    uint32_t empty(int32_t seq);

    llama_context * context_;
    bool wants_hidden_ = false;
    bool recurrent_;
    bool unified_;
    int64_t n_ctx_;
    int64_t n_batch_;
    int64_t n_embd_;
    int64_t n_vocab_;
    int64_t n_seq_max_;
    int64_t n_snapshots_;

    // The arrays of a llama_batch.
    std::vector<llama_token> tokens_;
    std::vector<llama_pos> positions_;
    std::vector<int32_t> n_seq_ids_;
    std::vector<llama_seq_id *> seq_ids_;
    std::vector<int8_t> outputs_;
    llama_seq_id seq_ = 0;

    std::vector<uint64_t> stamps_; // of the copy in device memory, by sequence
};

} // namespace mtp

#pragma once
// The operations that a session needs from a llama.cpp context, one sequence at a time.

#include "head/hidden_rows.h"
#include "session/sampling.h"
#include "session/trunk_state.h"

#include "llama.h"

#include <atomic>
#include <cstdint>
#include <vector>

namespace mtp {

// Returns a number that is unique within this process, to detect that something was replaced.
inline uint64_t next_stamp() {
    static std::atomic<uint64_t> last{0};
    return ++last;
}

class Trunk {
public:
    // min_rows: the largest value that decode() will be called with. Positions that padding tokens may
    // need are excluded from n_ctx().
    Trunk(llama_context * context, int64_t min_rows);
    ~Trunk();
    Trunk(const Trunk &) = delete;
    Trunk & operator=(const Trunk &) = delete;

    // Makes every decode of the process fail soon, the running ones too. Any thread may call it.
    static void abort_decoding();

    int64_t n_ctx() const { return n_ctx_; } // positions of one sequence
    int64_t n_batch() const { return n_batch_; } // maximum tokens that llama.cpp computes at once
    int64_t n_embd() const { return n_embd_; }
    int64_t n_vocab() const { return n_vocab_; }
    int64_t n_seq_max() const { return n_seq_max_; }
    int64_t n_snapshots() const { return n_snapshots_; } // n_rs_seq
    bool recurrent() const { return layout_.memory == StateLayout::HYBRID; } // a part of the memory cannot be truncated
    // Throws MTP_ERROR_VERSION if the loaded llama.cpp writes states in another format than those of trunk_state.h.
    StateLayout state_layout() const;
    bool unified() const { return unified_; } // all sequences share the n_ctx() positions

    // Decodes n <= n_batch tokens at positions first, first + 1, ... . A batch of fewer than min_rows is
    // padded with tokens that are rolled back right away; after that no other token can be rolled back.
    // MTP_ERROR_FULL if there is no room, MTP_ERROR_BACKEND if llama.cpp fails.
    void decode(int32_t seq, int64_t first, const int32_t * tokens, int64_t n, bool all_logits, int64_t min_rows = 1);

    // Makes llama.cpp output hidden states after each decode, until this object is destroyed.
    void want_hidden();

    // Leaves logits and hidden states on a device until they are read, if llama.cpp can, until this object
    // is destroyed.
    void keep_on_device();

    // Hidden states (after the final norm) of the tokens of the last decode, [n][n_embd]; valid
    // until the next one.
    const float * hidden() const;

    // The hidden state of the token whose logits logits() returns for this row; nullptr if want_hidden() was not
    // called, if it is on a device, or after forget_rows().
    const float * hidden_of(int32_t row) const;

    // The index of a row for llama.cpp; -1: the last token of the last decode, or what llama.cpp takes for it after
    // forget_rows().
    int32_t row_of(int32_t row) const;

    // The last decode of the context was not that of this object.
    void forget_rows() { n_tokens_ = 0; }

    // The same where they were computed, if that is a device and hidden() has not been called; else its
    // tensor is nullptr.
    DeviceRows hidden_on_device() const;

    // Returns once the last decode is computed, and what was added to the backend of hidden_on_device().
    void wait();

    // The token with the largest logit of a row of the last decode; -1 if only logits() tells.
    int32_t largest(int32_t row) const;

    // The k largest logits of a row of the last decode, found on the device. Returns false if only logits() tells.
    bool candidates(int32_t row, int64_t k, RowCandidates & out) const;

    // Logits of a row of the last decode, [n_vocab]; -1: the last one.
    const float * logits(int32_t row) const;

    // Calls llama_memory_seq_rm for the positions from `first` on and returns its result.
    bool remove_tail(int32_t seq, int64_t first);

    // Clears all sequences and zeroes the memory. llama.cpp starts a sequence by multiplying its old state
    // by zero, which would keep NaNs.
    void clear();

    // The shortest length that a sequence can be truncated to, besides 0. Layers with a window may have
    // forgotten what a token after a shorter text would see.
    int64_t shortest(int32_t seq) const;

    // Number of positions in the memory; 0 if the sequence is empty.
    int64_t length(int32_t seq) const;

    // A copy of a sequence's recurrent state, which cannot be truncated. In device memory the context
    // keeps one copy per sequence, and a new copy overwrites the old one.
    struct Copy {
        Blob bytes;                 // the whole copy, or what llama.cpp needs to find it on the device
        bool on_device = false;
        int32_t seq = 0;            // the sequence that was copied
        uint64_t stamp = 0;         // identifies the content of device memory when this was saved

        bool empty() const { return bytes.empty(); }
        void clear() { *this = Copy(); }
    };
    void save(int32_t seq, bool on_device, Copy & out);

    // Throws MTP_ERROR_STATE if a newer copy has overwritten it in device memory.
    void check(const Copy & saved) const;

    // Throws like check(), or MTP_ERROR_BACKEND if llama.cpp fails, which leaves the sequence undefined.
    void restore(int32_t seq, const Copy & saved);

    // Saves and restores the whole state of a sequence of `length` tokens in the format of trunk_state.h.
    // A state must pass check_trunk_state() before it is restored. If restoring fails, the sequence is
    // undefined.
    std::vector<uint8_t> save_whole(int32_t seq, int64_t length);
    void restore_whole(int32_t seq, int64_t length, const Blob & state);

    // Copies sequence `from`, of `length` tokens, to `to`. Their recurrent states are independent.
    void copy(int32_t from, int32_t to, int64_t length);

    // A fingerprint of the model, from its metadata and the size of its weights.
    uint64_t fingerprint() const;

    // A fingerprint of the vocabulary: the texts of all tokens.
    uint64_t tokenizer() const;

    llama_context * context() const { return context_; }

private:
    // Clears a sequence and returns the number of streams in llama.cpp's states.
    uint32_t empty(int32_t seq);

    llama_context * context_;
    bool wants_hidden_ = false;
    bool keeps_on_device_ = false;
    StateLayout layout_; // without rotations: state_layout() has them
    uint32_t state_version_;
    int64_t window_; // 0 if all layers see all positions
    bool unified_;
    int64_t n_ctx_;
    int64_t n_batch_;
    int64_t n_embd_;
    int64_t n_vocab_;
    int64_t n_seq_max_;
    int64_t n_snapshots_;

    // The arrays of a llama_batch.
    std::vector<llama_token> tokens_;
    int64_t n_tokens_ = 0; // without padding; 0 if the rows of the last decode are unknown
    std::vector<llama_pos> positions_;
    std::vector<int32_t> n_seq_ids_;
    std::vector<llama_seq_id *> seq_ids_;
    std::vector<int8_t> outputs_;
    llama_seq_id seq_ = 0;

    std::vector<uint64_t> stamps_; // by sequence: stamp of its copy in device memory
};

} // namespace mtp

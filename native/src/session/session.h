#pragma once
// Verify and roll back what the drafter drafts: keeps it and a trunk in sync.
//
// For each sequence the session tracks two lengths: the tokens in the trunk's memory, and those that are
// valid. Rejected drafts are not, but stay in memory until they are rolled back.

#include "drafter.h"
#include "head/head.h"
#include "session/checkpoint.h"
#include "session/sampling.h"
#include "session/trunk.h"

#include "mtp.h"

#include <cstdint>
#include <memory>
#include <vector>

struct llama_sampler;

namespace mtp {

class Session {
public:
    Session(llama_context * context, Head * head, const mtp_session_params & params);

    const mtp_session_stats & stats() const { return stats_; }
    void reset_stats() { stats_ = {}; }

    // As the functions of the same names in mtp.h.
    int64_t length(int32_t seq) const;
    void decode(int32_t seq, const int32_t * tokens, int64_t n, bool all_logits);
    void want_hidden();
    void get_hidden(int64_t n, float * out, size_t size) const;
    int32_t begin(int32_t seq, int32_t token, int32_t depth, int32_t * out_tokens, float * out_probs,
                  const Drawing * drawing = nullptr);
    int32_t row(int32_t row);
    void end(int32_t n_accepted);
    bool from_text() const { return cycle_.from_text; }
    int32_t step(int32_t seq, int32_t token, int32_t depth, llama_sampler * sampler, int32_t * out);
    int32_t argmax(int32_t row);
    int32_t choose(int32_t row, llama_sampler * sampler); // nullptr: the most likely token
    void set_sampling(const mtp_sampling & params) { sampling_ = std::make_unique<Sampling>(params); }
    int32_t sample(int32_t row);
    int32_t step_sampled(int32_t seq, int32_t token, int32_t depth, int32_t * out);
    void remove(int32_t seq, int64_t p0, int64_t p1);
    void sync(int32_t seq);
    void skip(int32_t seq, int64_t length);
    Checkpoint save(int32_t seq, int32_t kind);
    void check(int32_t seq, const Checkpoint & checkpoint);
    void attach(int32_t seq, Checkpoint & checkpoint);
    void restore(int32_t seq, const Checkpoint & checkpoint);
    void copy(int32_t from, int32_t to);
    void set_corpus(const Corpus * corpus);
    uint64_t tokenizer() const { return trunk_.tokenizer(); }
    void set_costs(const double * verify_ms, int32_t n_verify, const double * draft_ms, int32_t n_draft) {
        drafter_->set_costs(verify_ms, n_verify, draft_ms, n_draft);
    }
    void remember_depth(const char * path) { drafter_->remember_depth(path); }

private:
    struct Sequence {
        int64_t decoded = 0;   // tokens in the trunk's memory
        int64_t length = 0;    // valid tokens; the others are rolled back before the next decode
        int64_t removable = 0; // how many of the last decoded tokens the memory can roll back

        Trunk::Copy checkpoint;       // the recurrent state before the last cycle
        int64_t checkpoint_first = 0; // the position where that cycle began
        std::vector<int32_t> replay;  // its tokens, which a rollback decodes again as far as they are valid

        // A unique number for each decoded token. It tells whether the token at a position is still
        // the one that was there when a checkpoint was made. A sequence and its copy share their
        // marks from position 0 to where they diverge.
        std::vector<uint64_t> marks;

        bool foreign = false; // the memory has rows that were decoded from outside
    };

    // The cycle between begin() and end().
    struct Cycle {
        bool open = false;
        bool from_text = false;       // the drafts come from the text, not from the head
        int32_t seq = 0;
        int64_t first = 0;            // position of tokens[0]
        std::vector<int32_t> tokens;  // the given token and the drafts
        int64_t rows = 0;             // tokens decoded so far
        int64_t batch_first = 0;      // row of the last batch's first token
        double verify_before = 0;     // stats_.verify_ms when the cycle began
    };

    Sequence & sequence(int32_t seq);
    void check_idle() const;
    bool drafting() const { return head_ != nullptr && params_.max_depth > 0; }
    bool looking_up() const { return params_.max_lookup > 0; }
    int64_t cells(int32_t without) const;
    int64_t cells_of_others(int32_t seq) const;
    int64_t room(int32_t seq) const;
    void require_room(int32_t seq, int64_t n) const;
    // Applies a change to a sequence. If it fails, the sequence is cleared, because it is unknown how
    // much of the change was done.
    template <typename Change>
    void change(int32_t seq, Change && change) {
        try {
            change();
        } catch (...) {
            clear_sequence(seq);
            throw;
        }
    }
    void roll_back(int32_t seq);
    void clear_sequence(int32_t seq);
    void run_trunk(int32_t seq, const int32_t * tokens, int64_t n, bool all_logits, int64_t min_rows = 1);
    void give_head(int32_t seq, int64_t first, const int32_t * tokens, int64_t n, bool on_device);
    void verify_more();
    // Runs a use of the head in a cycle, whose exchange with the head's device is counted.
    template <typename Use>
    void count_transfers(Use && use) {
        const Transfers before = head_ != nullptr ? head_->transfers() : Transfers();
        use();
        add_transfers(before);
    }
    void add_transfers(const Transfers & before);
    void read_distribution(int32_t row);
    void subtract_draft(int64_t step);
    int64_t reach(int32_t seq) const;
    void set_length(int32_t seq, int64_t length);
    bool head_fits(const Checkpoint & c) const;
    void check_checkpoint(int32_t seq, const Checkpoint & c) const;
    void check_model(const Checkpoint & c) const;
    void check_head(const Checkpoint & c, size_t row_bytes) const;

    Trunk trunk_;
    Head * head_;
    std::shared_ptr<void> claim_; // exclusive use of the head
    mtp_session_params params_;
    std::vector<Sequence> sequences_;
    Cycle cycle_;
    mtp_session_stats stats_ = {};
    std::unique_ptr<Drafter> drafter_;
    bool wants_hidden_ = false;         // mtp_session_want_hidden
    int64_t hidden_rows_ = 0;           // tokens of the last decode whose hidden states can be copied
    bool damaged_ = false; // a row was not finite; NaNs may remain in the memory's states

    std::unique_ptr<Sampling> sampling_;
    Distribution target_;              // the distribution of the current row
};

} // namespace mtp

// The opaque session of mtp.h.
struct mtp_session : mtp::Session {
    using Session::Session;
};

#pragma once
// Drafts for the sequences of a runtime that verifies them: the session's, or llama-server's slots.
//
// The runtime tells what the trunk has decoded and how many drafts it accepted. For each sequence the
// drafter keeps the tokens and hidden states that the head has not been fed, its text, and the outcome of
// the last cycle; from them it chooses the source and the number of the next drafts. It knows neither
// llama.h nor sampling, and its only clock is for the time that drafting takes. A cycle:
//
//   draft       for all sequences that draft together, in one graph
//   decoded     tells a sequence's part of a batch that the trunk has decoded
//   verified    tells what the batch took
//   accepted    tells how many drafts were right

#include "bytes.h"
#include "depth/depth.h"
#include "draft_ring.h"
#include "head/head.h"
#include "lookup/corpus.h"
#include "lookup/text_drafts.h"

#include "mtp.h"

#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <vector>

namespace mtp {

// The drafts of one sequence: what is asked of Drafter::draft, and its answer.
struct DraftRequest {
    int32_t seq = 0;
    int64_t position = 0; // of `token`, the next token, which the trunk has not decoded
    int32_t token = 0;
    int32_t depth = 0;    // how many tokens the head drafts, or MTP_DEPTH_AUTO for as many as pay
    int32_t room = 0;     // the most drafts that can be verified

    int32_t n = 0;         // drafts to verify
    int32_t n_drafted = 0; // drafts that the head made: those after the first n are not verified
    bool from_text = false;
    std::array<int32_t, MTP_MAX_DEPTH> tokens = {};
    std::array<float, MTP_MAX_DEPTH> probabilities = {}; // the head's; 1 if from_text
    std::exception_ptr failure; // why there are no drafts, if drafting failed; the head has no rows then
};

// Which drafts are worth offering, beside what they cost.
struct DraftLimits {
    float least_probability = 0; // drafts end before the first one below it,
    int32_t fewest = 0;          // and are dropped if fewer than this are left
};

// The state of a sequence without that of the trunk.
struct DrafterState {
    // The last token and the hidden state at it, [width]; empty if it is not known.
    int32_t token = 0;
    std::vector<float> hidden;
    // The head's rows from position `first` to the last token, as HeadCache::read_rows gives them.
    int64_t first = 0;
    Blob rows;
    // How the depth is chosen: what Depth::save gives, and the last cycle. Empty: it stays as it is.
    std::vector<uint8_t> depth;
    // Tokens of the sequence that were added to the draft vocabulary; empty without the rows.
    std::vector<DraftRing::Entry> ring;

    // Whether there is no NaN or infinity, which would spread from the head's cache to every draft.
    bool is_finite() const;
};

class Drafter {
public:
    // head: nullptr for drafts from the text alone. max_depth: the most tokens that the head drafts, at most
    // MTP_MAX_DEPTH. max_text: the most tokens that are drafted from the text, 0 for none.
    Drafter(Head * head, int32_t n_sequences, int32_t max_depth, int32_t max_text);
    ~Drafter();
    Drafter(const Drafter &) = delete;

    // The most tokens that the head drafts.
    int32_t max_depth() const { return max_depth_; }
    bool reads_text() const { return max_text_ > 0; }

    // The position after the last token that was decoded; without a head it is not known.
    int64_t end(int32_t seq) const { return at(seq).end(); }

    // Drafts for different sequences. Sequences that share a batch get the same number of drafts, as far as
    // they have room: llama.cpp computes those of different lengths in several graphs, each of which reads
    // all weights. One that cannot be drafted leaves the others alone. drawing: only for one sequence, whose
    // drafts are then sampled.
    void draft(std::vector<DraftRequest> & requests, const DraftLimits & limits = {}, const Drawing * drawing = nullptr);

    // Whether a batch that begins with this token verifies the last drafts of the sequence.
    bool continues(int32_t seq, int64_t first, int32_t token) const;

    // Copies n hidden states, of tokens from position `first` on, to the head's device after what is still to
    // be computed there. Returns false if they are not there, or if hidden states before them are on the host.
    bool keep_on_device(int32_t seq, int64_t first, int32_t token, int64_t n, const DeviceRows & rows);

    // n >= 1 tokens were decoded at positions first, first + 1, ... . hidden: [n][width], or nullptr if
    // keep_on_device has returned true for them. Tokens at these positions and after them are replaced; after
    // a gap the head starts anew.
    void decoded(int32_t seq, int64_t first, const int32_t * tokens, int64_t n, const float * hidden);

    // A batch of n_tokens, counted over its sequences, each with as many, took this time.
    void verified(int64_t n_tokens, double ms);

    // The sequence ends at position `end`: n_accepted of its last drafts were right. -1: unknown, because
    // other drafts were verified instead.
    void accepted(int32_t seq, int64_t end, int32_t n_accepted);

    // Rolling back the rejected drafts took this time.
    void rolled_back(int32_t seq, double ms);

    // The first draft that was not verified, or -1, and the probability that the trunk gave it. Without the
    // latter it is compared with the token that was generated in its place.
    int32_t unverified(int32_t seq) const { return at(seq).cycle.unverified; }
    void judge_unverified(int32_t seq, double probability);

    // Feeds the head with all tokens that were decoded, up to the last one.
    void feed(int32_t seq);

    // Removes what is at position `length` and after it, also from the text.
    void truncate(int32_t seq, int64_t length);

    // Forgets a sequence. Its text begins at position `length`.
    void clear(int32_t seq, int64_t length = 0);

    // Replaces a sequence by a copy of another one.
    void copy(int32_t from, int32_t to);

    // Tokens of a prompt, or generated ones, follow the text. draft() adds its token itself.
    void read(int32_t seq, const int32_t * tokens, int64_t n);
    void generated(int32_t seq, const int32_t * tokens, int64_t n);

    // Makes the text equal to `tokens`, as TextDrafts::set.
    void set_text(int32_t seq, const int32_t * tokens, int64_t n, bool are_generated);

    // Also drafts from an index of lookup files, which must outlive this object; nullptr: no longer.
    void set_corpus(const Corpus * corpus);

    // The state of a sequence. with_rows: with the head's rows, which it feeds before; without them it can
    // only be restored where they still are. The fingerprint of the head tells whether they fit.
    DrafterState save(int32_t seq, bool with_rows);

    // Restores a sequence of `length` tokens, of which the head keeps its rows if the state has none. Costs of drafting
    // are restored if they were measured on this machine, and none have been measured since.
    void restore(int32_t seq, int64_t length, const DrafterState & state);

    // Throws MTP_ERROR_FORMAT unless these bytes can be DrafterState::depth.
    static void check_depth(const std::vector<uint8_t> & saved);

    // TextDrafts::save, and the other way: all of it, or what was learned if the text is still there.
    std::vector<uint8_t> save_text(int32_t seq, bool with_tokens) const { return at(seq).text.save(with_tokens); }
    void restore_text(int32_t seq, int64_t length, const std::vector<uint8_t> & saved);
    void restore_learned(int32_t seq, const std::vector<uint8_t> & saved) { at(seq).text.restore_learned(saved); }

    // Throws MTP_ERROR_FORMAT unless restore_learned can follow after the sequence was truncated to `length`.
    void check_learned(int32_t seq, int64_t length, const std::vector<uint8_t> & saved) const;

    // As the function of the same name in mtp.h, for all sequences.
    void set_costs(const double * verify_ms, int32_t n_verify, const double * draft_ms, int32_t n_draft) {
        sequences_.front().depth.set_costs(verify_ms, n_verify, draft_ms, n_draft);
    }

    // Begins with what the choice of depths had learned in the process that wrote `path`, if it ran this head, and writes that
    // file when this object is destroyed. Before anything is drafted.
    void remember_depth(const std::string & path);

private:
    // The last cycle, reported to the depth chooser when the next one begins. Only then is it known which
    // token was generated in place of an unverified draft, and what the rollback took.
    struct Cycle {
        bool open = false;
        bool ended = false; // it is known how many drafts were accepted
        bool from_text = false;
        mtp_cycle_outcome outcome = {};
        std::array<float, MTP_MAX_DEPTH> probabilities = {};
        int32_t unverified = -1; // the first draft that was not verified
        int64_t end = 0;         // position after the cycle
    };

    struct Sequence {
        explicit Sequence(const Depth & chooser) : depth(chooser) {}

        // The tail: tokens at positions first, first + 1, ... and their hidden states. A row of the head needs
        // the hidden state before its token. If `on_device`, the hidden states are on the head's device, as
        // its first ones of the sequence.
        int64_t first = 0;
        std::vector<int32_t> tokens;
        std::vector<float> hidden;
        bool on_device = false;

        int32_t drafted_after = -1; // the token of the head's last row, if the last draft began with it

        Cycle cycle;
        Depth depth;
        TextDrafts text;
        int64_t text_first = 0; // position of the text's first token

        int64_t end() const { return first + int64_t(tokens.size()); }
    };

    using Requests = std::vector<DraftRequest *>;

    std::vector<uint8_t> save_depth(int32_t seq) const;
    void restore_depth(int32_t seq, const std::vector<uint8_t> & saved);
    static Cycle read_cycle(BoundedReader & in);
    void restore_head(int32_t seq, int64_t length, const DrafterState & state);

    Sequence & at(int32_t seq) { return sequences_[size_t(seq)]; }
    const Sequence & at(int32_t seq) const { return sequences_[size_t(seq)]; }
    size_t width() const { return size_t(head_->width()); }
    int32_t most_of_head(const DraftRequest & request) const;
    void report_cycle(const DraftRequest & request);
    void begin_cycle(const DraftRequest & request);
    bool draft_from_text(DraftRequest & request, int32_t fewest);
    void plan(const Requests & requests);
    void keep(const Requests & requests, int32_t others, const Drawing * drawing);
    void draft_with_head(Requests & requests, const Drawing * drawing);
    void run_head(const Requests & requests, const Drawing * drawing);
    int64_t next_row(int32_t seq);
    int64_t waiting(int32_t seq) const;
    void fetch(int32_t seq);
    void cut(int32_t seq, int64_t position);
    static void empty_tail(Sequence & s, int64_t first);

    Head * head_;
    int32_t max_depth_;
    int32_t max_text_;
    std::unique_ptr<DraftRing> ring_; // nullptr if the draft vocabulary does not follow the text
    std::vector<Sequence> sequences_;
    std::string depth_path_; // of remember_depth; empty: none
    uint64_t head_fingerprint_ = 0; // of the head, which may be gone before this object
    int64_t n_cycles_ = 0;   // that the choice of depths has learned from
    int32_t last_seq_ = 0;   // the sequence of the last of them
};

} // namespace mtp

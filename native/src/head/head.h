#pragma once
// A loaded MTP head: weights, cache and the graphs built so far.

#include "head/draft_graph.h"
#include "head/draft_vocabulary.h"
#include "head/gguf_file.h"
#include "head/head_cache.h"
#include "head/head_config.h"
#include "head/hidden_rows.h"
#include "head/weights.h"

#include "mtp.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace mtp {

class Head {
public:
    Head(const std::string & path, const mtp_head_params & params);
    ~Head();

    // Throws if such a head cannot be loaded for a reason that is known before anything is copied.
    static void check(const std::string & path, const mtp_head_params & params);

    const DraftVocabulary & vocabulary() const { return vocabulary_; }
    const HeadCache & cache() const { return *cache_; }
    mtp_head_info info() const;
    // The length of a hidden state.
    int64_t width() const { return layers_.front().n_embd; }

    // As the functions of the same names in mtp.h; arguments are checked here.
    void feed(int32_t seq, int64_t first, const int32_t * tokens, const float * hidden, int64_t n_rows);
    void keep_hidden(const DeviceRows & from, mtp_kept_rows * parts, int32_t n);
    void get_hidden(int32_t seq, int64_t n, float * out);
    // As keep_hidden for one part. Returns whether the rows are kept.
    bool keep_hidden(int32_t seq, int64_t at, const DeviceRows & from, int64_t n);
    // drawing: only for one sequence, whose drafts are then sampled. out_logits, too: as in mtp_head_draft.
    void draft_batch(const mtp_draft_task * tasks, int32_t n, const Drawing * drawing = nullptr,
                     float * out_logits = nullptr);
    void rollback(int32_t seq, int64_t position);

    // Makes these the last ids of the draft vocabulary, [n_ring], and copies the rows of those that are new.
    void set_ring(const std::vector<int32_t> & ids);

    const std::string & ops();
    void set_imatrix(Imatrix * imatrix) { imatrix_ = imatrix; }
    size_t rows_size(int32_t seq) const;
    void get_rows(int32_t seq, void * out, size_t n) const;
    void set_rows(int32_t seq, int64_t end, const void * rows, size_t n);

    // The most tokens that it can draft in a call.
    int64_t max_depth() const { return layers_.size() == 1 ? MTP_MAX_DEPTH : int64_t(layers_.size()); }

    // The acceptance of first drafts that the file states (docs/acceptance.md), 0 to 1; -1 if it states none.
    double stated_acceptance() const;

    // Whether the device can sample drafts, not only take the most likely tokens.
    bool draws() const { return draws_; }

    // The probabilities that the last sampled draft gave to these indices of the draft vocabulary in a step.
    std::vector<double> drawn_from(int64_t step, const std::vector<int32_t> & indices) {
        return last_drawn_->drawn_from(step, indices, transfers_);
    }

    // What has been exchanged with the device by feed and draft.
    const Transfers & transfers() const { return transfers_; }

    // The draft graphs built so far.
    int64_t built_graphs() const { return built_graphs_; }

    void check_seq(int32_t seq) const;

    // The cache, for checkpoints.
    HeadCache & cache() { return *cache_; }

    // A fingerprint, never 0, that differs between heads with incompatible caches.
    uint64_t fingerprint() const;

    // Claims the head for one session, until the returned pointer is released. Throws MTP_ERROR_STATE if
    // another session has claimed it.
    std::shared_ptr<void> claim();

private:
    void check_rows(int32_t seq, int64_t first, const int32_t * tokens, int64_t n_rows, int64_t least) const;
    void check_kept(int64_t n) const;
    void check_depth(int32_t depth) const;
    // A sequence's part of a run: the rows to feed and the depth to draft.
    struct Task {
        DraftGraph::Feed feed;
        int64_t depth;
    };
    DraftGraph & run(const std::vector<Task> & tasks, const Drawing * drawing = nullptr);
    std::pair<int32_t, int32_t> range_of(int32_t first, int32_t last) const;
    DraftGraph & graph(const std::vector<int> & seqs, const DraftGraph::Key & key);
    DraftGraph::Key smallest_key(int64_t rows, int64_t depth, bool draws) const;
    void read_drafts(const DraftGraph & graph, int64_t i, int32_t depth, int32_t * out_tokens, float * out_probs) const;

    struct CachedGraph {
        std::unique_ptr<DraftGraph> graph;
        uint64_t last_used;
    };

    GgufFile file_;
    std::unique_ptr<GgufFile> trunk_; // nullptr if everything is in file_
    std::vector<HeadConfig> layers_;
    DraftVocabulary vocabulary_;
    ggml_type type_; // that matrices are quantized to, or GGML_TYPE_COUNT
    ggml_backend_ptr backend_;
    bool in_place_; // the device computes in host memory
    bool masks_on_device_; // and not uploaded
    std::unique_ptr<Weights> weights_;
    std::unique_ptr<HeadCache> cache_;
    std::unique_ptr<HiddenRows> hidden_rows_;
    int64_t n_ctx_;
    int64_t n_seq_max_;
    int64_t n_batch_;
    std::vector<CachedGraph> graphs_; // the most recently used graphs
    size_t graph_bytes_ = 0;          // memory of graphs_
    uint64_t clock_ = 0;
    int64_t built_graphs_ = 0;
    DraftGraph * last_drawn_ = nullptr; // among graphs_, until the next call
    Transfers transfers_;
    Imatrix * imatrix_ = nullptr; // what the runs add to
    std::string ops_;
    std::weak_ptr<void> user_;
    bool draws_ = true;
};

} // namespace mtp

// The opaque head of mtp.h.
struct mtp_head : mtp::Head {
    using Head::Head;
};

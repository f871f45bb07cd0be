#include "session/session.h"

#include "error.h"
#include "session/trunk.h"

#include <algorithm>
#include <chrono>
#include <exception>

namespace mtp {

// Adds the duration of a scope, in milliseconds, to a sum.
class Stopwatch {
public:
    explicit Stopwatch(double & sum) : sum_(sum), start_(Clock::now()) {}
    ~Stopwatch() { sum_ += std::chrono::duration<double, std::milli>(Clock::now() - start_).count(); }

private:
    using Clock = std::chrono::steady_clock;
    double & sum_;
    Clock::time_point start_;
};

Session::Session(llama_context * context, Head * head, const mtp_session_params & params)
    : trunk_(context, params.min_rows == 2 ? 2 : 1), head_(head), params_(params),
      sequences_(size_t(trunk_.n_seq_max())) {
    require_range(params.rollback, MTP_ROLLBACK_SNAPSHOT, MTP_ROLLBACK_HOST, "rollback");
    require_range(params.max_depth, 0, MTP_MAX_DEPTH, "max_depth");
    require_range(params.max_lookup, 0, MTP_MAX_DEPTH, "max_lookup");
    require_range(params.max_rows, 0, MTP_MAX_DEPTH + 1, "max_rows");
    require_range(params.min_rows, 0, 2, "min_rows");
    params_.min_rows = std::max(params.min_rows, 1);
    if (params.max_rows == 0) {
        params_.max_rows = MTP_MAX_DEPTH + 1;
    }
    if (params.rollback == MTP_ROLLBACK_TWO_PHASE) {
        params_.max_rows = 1;
    }
    if (params_.min_rows > 1 && trunk_.recurrent() && trunk_.n_snapshots() < 1) {
        throw Error(MTP_ERROR_ARGUMENT, "min_rows=2: expected a context with n_rs_seq of 1 or more, found 0");
    }
    // llama.cpp keeps the last n_rs_seq + 1 tokens in one batch and asserts that a batch holds more.
    if (trunk_.recurrent() && trunk_.n_snapshots() > 0 && trunk_.n_batch() < trunk_.n_snapshots() + 2) {
        throw Error(MTP_ERROR_ARGUMENT,
                    format("n_batch and n_ubatch: expected %lld or more for a context with n_rs_seq=%lld, found %lld",
                           (long long) trunk_.n_snapshots() + 2, (long long) trunk_.n_snapshots(),
                           (long long) trunk_.n_batch()));
    }
    if (trunk_.n_batch() < params_.min_rows) {
        throw Error(MTP_ERROR_ARGUMENT, format("n_batch: expected %d or more for min_rows, found %lld", params_.min_rows,
                                               (long long) trunk_.n_batch()));
    }
    const int32_t most = std::max(drafting() ? params.max_depth : 0, params.max_lookup);
    if (params.rollback == MTP_ROLLBACK_SNAPSHOT && trunk_.recurrent() && trunk_.n_snapshots() < most) {
        throw Error(MTP_ERROR_ARGUMENT,
                    format("rollback by snapshot: expected a context with n_rs_seq of %d or more, found %lld", most,
                           (long long) trunk_.n_snapshots()));
    }
    if (most > 0 && trunk_.n_batch() < most + 1) {
        throw Error(MTP_ERROR_ARGUMENT, format("n_batch: expected %d or more for this depth, found %lld", most + 1,
                                               (long long) trunk_.n_batch()));
    }
    drafter_ = std::make_unique<Drafter>(drafting() ? head : nullptr, int32_t(trunk_.n_seq_max()), params.max_depth,
                                         params.max_lookup);
    if (!drafting()) {
        trunk_.keep_on_device();
        return;
    }
    const mtp_head_info info = head->info();
    if (info.n_embd != trunk_.n_embd() || info.n_vocab != trunk_.n_vocab()) {
        throw Error(MTP_ERROR_UNSUPPORTED,
                    format("the head does not fit the trunk: expected width %lld and %lld tokens, found %d and %d",
                           (long long) trunk_.n_embd(), (long long) trunk_.n_vocab(), info.n_embd, info.n_vocab));
    }
    if (info.n_seq_max < trunk_.n_seq_max() || info.n_ctx < trunk_.n_ctx()) {
        throw Error(MTP_ERROR_ARGUMENT,
                    format("the head's cache: expected %lld sequences of %lld positions or more, found %d of %d",
                           (long long) trunk_.n_seq_max(), (long long) trunk_.n_ctx(), info.n_seq_max, info.n_ctx));
    }
    claim_ = head->claim();
    trunk_.want_hidden(); // last, so that a rejected session leaves the context unchanged
    trunk_.keep_on_device();
}

Session::Sequence & Session::sequence(int32_t seq) {
    require_range(seq, 0, trunk_.n_seq_max() - 1, "seq");
    return sequences_[size_t(seq)];
}

void Session::check_idle() const {
    if (cycle_.open) {
        throw Error(MTP_ERROR_STATE, "a cycle is open: expected mtp_cycle_end first");
    }
}

int64_t Session::length(int32_t seq) const {
    require_range(seq, 0, trunk_.n_seq_max() - 1, "seq");
    return sequences_[size_t(seq)].length;
}

// The number of tokens two sequences share before they diverge.
static size_t count_shared(const std::vector<uint64_t> & a, const std::vector<uint64_t> & b) {
    size_t low = 0;
    size_t high = std::min(a.size(), b.size());
    while (low < high) {
        const size_t middle = (low + high) / 2;
        if (a[middle] == b[middle]) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

// KV cells that all sequences except `without` occupy in a unified cache, including rejected drafts.
int64_t Session::cells(int32_t without) const {
    size_t cells = 0;
    for (size_t i = 0; trunk_.unified() && i < sequences_.size(); ++i) {
        const std::vector<uint64_t> & marks = sequences_[i].marks;
        size_t counted = 0; // tokens shared with an earlier sequence
        for (size_t other = 0; other < i; ++other) {
            if (int32_t(other) != without) {
                counted = std::max(counted, count_shared(marks, sequences_[other].marks));
            }
        }
        if (int32_t(i) != without) {
            cells += marks.size() - counted;
        }
    }
    return int64_t(cells);
}

// KV cells of a unified cache that only other sequences occupy.
int64_t Session::cells_of_others(int32_t seq) const {
    return trunk_.unified() ? cells(-1) - sequences_[size_t(seq)].decoded : 0;
}

// The number of tokens that still fit into a sequence.
int64_t Session::room(int32_t seq) const {
    return trunk_.n_ctx() - sequences_[size_t(seq)].length - cells_of_others(seq);
}

void Session::require_room(int32_t seq, int64_t n) const {
    if (n <= room(seq)) {
        return;
    }
    const int64_t others = cells_of_others(seq);
    throw Error(MTP_ERROR_FULL,
                format("the context of %lld positions is full: %lld tokens after %lld%s", (long long) trunk_.n_ctx(),
                       (long long) n, (long long) sequences_[size_t(seq)].length,
                       others > 0 ? format(" and %lld of other sequences", (long long) others).c_str() : ""));
}

// Clears a sequence in the trunk, the head and the session.
void Session::clear_sequence(int32_t seq) {
    trunk_.remove_tail(seq, 0);
    drafter_->clear(seq);
    sequences_[size_t(seq)] = Sequence();
    cycle_.open = false;
    const auto empty = [](const Sequence & s) { return s.decoded == 0; };
    if (damaged_ && std::all_of(sequences_.begin(), sequences_.end(), empty)) {
        trunk_.clear();
        damaged_ = false;
    }
}

// The number of decoded tokens that can be rolled back.
int64_t Session::reach(int32_t seq) const {
    const Sequence & s = sequences_[size_t(seq)];
    return trunk_.recurrent() ? s.removable : s.decoded - trunk_.shortest(seq);
}

// Rolls back rejected drafts that are still in the trunk's memory.
void Session::roll_back(int32_t seq) {
    Sequence & s = sequences_[size_t(seq)];
    if (s.decoded == s.length) {
        return;
    }
    Stopwatch watch(stats_.rollback_ms);
    ++stats_.rollbacks;
    const bool copied = !s.checkpoint.empty();
    const int64_t start = copied ? s.checkpoint_first : s.length;
    change(seq, [&] {
        if (copied) {
            trunk_.restore(seq, s.checkpoint);
        }
        if (!trunk_.remove_tail(seq, start)) {
            throw Error(MTP_ERROR_BACKEND, format("llama.cpp could not remove the tokens from position %lld on",
                                                  (long long) start));
        }
        s.decoded = start;
        s.marks.resize(size_t(start));
        for (int64_t at = start; at < s.length; at += params_.max_rows) {
            const int64_t n = std::min<int64_t>(params_.max_rows, s.length - at);
            run_trunk(seq, s.replay.data() + (at - start), n, false, params_.min_rows);
            ++stats_.decodes;
        }
    });
    s.removable = 0; // a rollback uses up the older snapshots
    s.checkpoint.clear();
}

// Decodes tokens at the end of a sequence. The caller has checked that they fit; if they do not, the
// context's memory was changed from outside.
void Session::run_trunk(int32_t seq, const int32_t * tokens, int64_t n, bool all_logits, int64_t min_rows) {
    Sequence & s = sequences_[size_t(seq)];
    hidden_rows_ = 0;
    try {
        trunk_.decode(seq, s.decoded, tokens, n, all_logits, min_rows);
    } catch (const Error & error) {
        if (error.status == MTP_ERROR_FULL && !s.foreign) {
            throw Error(MTP_ERROR_STATE, format("%s, where the session counts %lld: expected mtp_session_sync after "
                                                "another change of its memory", error.what(), (long long) room(seq)));
        }
        throw;
    }
    s.decoded += n;
    for (int64_t i = 0; i < n; ++i) {
        s.marks.push_back(next_stamp());
    }
    // Snapshot i holds the state i tokens before the end, and a decode writes one for each of its n
    // tokens. Rolling back all n would restore a snapshot of an older decode, so at most n - 1 can go.
    // If the batch was padded, rolling back the padding has used up the snapshots.
    s.removable = n < min_rows ? 0 : std::min(n - 1, trunk_.n_snapshots());
}

// Gives the drafter the tokens of the last decode. on_device: their hidden states are on the head's device.
void Session::give_head(int32_t seq, int64_t first, const int32_t * tokens, int64_t n, bool on_device) {
    if (drafting()) {
        drafter_->decoded(seq, first, tokens, n, on_device ? nullptr : trunk_.hidden());
    }
}

void Session::decode(int32_t seq, const int32_t * tokens, int64_t n, bool all_logits) {
    check_idle();
    Sequence & s = sequence(seq);
    require_range(n, 1, INT32_MAX, "n");
    require(tokens, "tokens");
    for (int64_t i = 0; i < n; ++i) {
        if (tokens[i] < 0 || tokens[i] >= trunk_.n_vocab()) {
            throw Error(MTP_ERROR_ARGUMENT, format("tokens[%lld]: expected 0 to %lld, found %d", (long long) i,
                                                   (long long) trunk_.n_vocab() - 1, tokens[i]));
        }
    }
    require_room(seq, n);
    roll_back(seq);
    s.checkpoint.clear();
    change(seq, [&] {
        for (int64_t done = 0; done < n;) {
            const int64_t now = std::min(n - done, trunk_.n_batch());
            {
                Stopwatch watch(stats_.prefill_ms);
                run_trunk(seq, tokens + done, now, all_logits);
                hidden_rows_ = wants_hidden_ ? now : 0;
                if (drafting()) {
                    trunk_.hidden(); // waits for the trunk, which belongs to this time
                }
            }
            {
                Stopwatch watch(stats_.prefill_head_ms);
                give_head(seq, s.length, tokens + done, now, false);
                drafter_->feed(seq);
            }
            s.length += now;
            stats_.prefilled += now;
            done += now;
        }
        drafter_->read(seq, tokens, n);
    });
}

void Session::want_hidden() {
    check_idle();
    trunk_.want_hidden();
    wants_hidden_ = true;
}

void Session::get_hidden(int64_t n, float * out, size_t size) const {
    if (n < 1 || n > hidden_rows_) {
        throw Error(MTP_ERROR_STATE, format("n: expected 1 to %lld, the tokens of the last batch whose hidden states "
                                            "are available, found %lld", (long long) hidden_rows_, (long long) n));
    }
    const int64_t width = trunk_.n_embd();
    require_range((long long) size, n * width, n * width, "size");
    const float * last = trunk_.hidden() + (hidden_rows_ - n) * width;
    std::copy(last, last + n * width, out);
}

void Session::set_corpus(const Corpus * corpus) {
    if (!looking_up()) {
        throw Error(MTP_ERROR_STATE, "max_lookup: expected 1 or more for an index of lookup files, found 0");
    }
    if (corpus != nullptr && corpus->n_vocab() != trunk_.n_vocab()) {
        throw Error(MTP_ERROR_ARGUMENT, format("corpus: expected one of %lld tokens, found one of %d",
                                               (long long) trunk_.n_vocab(), corpus->n_vocab()));
    }
    drafter_->set_corpus(corpus);
}

// Adds what was exchanged with the head's device since `before`.
void Session::add_transfers(const Transfers & before) {
    if (head_ == nullptr) {
        return;
    }
    const Transfers & now = head_->transfers();
    stats_.draft_graphs += now.graphs - before.graphs;
    stats_.draft_syncs += now.syncs - before.syncs;
    stats_.draft_bytes_up += now.bytes_up - before.bytes_up;
    stats_.draft_bytes_down += now.bytes_down - before.bytes_down;
}

int32_t Session::begin(int32_t seq, int32_t token, int32_t depth, int32_t * out_tokens, float * out_probs,
                       const Drawing * drawing) {
    check_idle();
    Sequence & s = sequence(seq);
    require_range(token, 0, trunk_.n_vocab() - 1, "token");
    const bool automatic = depth == MTP_DEPTH_AUTO;
    if (automatic) {
        depth = params_.max_depth;
    }
    require_range(depth, 0, params_.max_depth, "depth");
    if (depth > 0 || looking_up()) {
        require(out_tokens, "out_tokens");
        require(out_probs, "out_probs");
    }
    require_room(seq, 1);
    const double rollback_before = stats_.rollback_ms;
    roll_back(seq);
    drafter_->rolled_back(seq, stats_.rollback_ms - rollback_before);
    std::vector<DraftRequest> requests(1);
    DraftRequest & request = requests.front();
    request.seq = seq;
    request.position = s.length;
    request.token = token;
    request.depth = automatic ? MTP_DEPTH_AUTO : depth;
    request.room = int32_t(std::min<int64_t>(MTP_MAX_DEPTH, room(seq) - 1));
    change(seq, [&] {
        {
            Stopwatch watch(stats_.draft_ms);
            count_transfers([&] { drafter_->draft(requests, {}, drawing); });
        }
        if (request.failure) {
            std::rethrow_exception(request.failure);
        }
        const int32_t known = std::max(request.n, request.n_drafted);
        std::copy_n(request.tokens.begin(), known, out_tokens);
        std::copy_n(request.probabilities.begin(), known, out_probs);

        cycle_ = Cycle();
        cycle_.from_text = request.from_text;
        cycle_.verify_before = stats_.verify_ms;
        cycle_.seq = seq;
        cycle_.first = s.length;
        cycle_.tokens.assign(1, token);
        cycle_.tokens.insert(cycle_.tokens.end(), request.tokens.begin(), request.tokens.begin() + request.n);
        s.checkpoint.clear();
        const bool copies = params_.rollback == MTP_ROLLBACK_CHECKPOINT || params_.rollback == MTP_ROLLBACK_HOST;
        if (request.n > 0 && copies && trunk_.recurrent()) {
            Stopwatch watch(stats_.verify_ms);
            trunk_.save(seq, params_.rollback == MTP_ROLLBACK_CHECKPOINT, s.checkpoint);
            s.checkpoint_first = s.length;
            s.replay = cycle_.tokens;
        }
        verify_more();
        cycle_.open = true;
    });
    return request.n;
}

// Decodes the cycle's next tokens, up to one batch. All tokens before them have been accepted.
void Session::verify_more() {
    Sequence & s = sequences_[size_t(cycle_.seq)];
    const int64_t n = std::min<int64_t>(params_.max_rows, int64_t(cycle_.tokens.size()) - cycle_.rows);
    const int32_t * tokens = cycle_.tokens.data() + cycle_.rows;
    const int64_t first = cycle_.first + cycle_.rows;
    bool on_device = false;
    {
        Stopwatch watch(stats_.verify_ms);
        run_trunk(cycle_.seq, tokens, n, true, params_.min_rows);
        ++stats_.decodes;
        if (drafting()) {
            on_device = drafter_->keep_on_device(cycle_.seq, first, tokens[0], n, trunk_.hidden_on_device());
        }
        trunk_.wait(); // the depth is chosen by what this takes
    }
    {
        Stopwatch watch(stats_.draft_ms);
        count_transfers([&] { give_head(cycle_.seq, first, tokens, n, on_device); });
    }
    cycle_.batch_first = cycle_.rows;
    cycle_.rows += n;
    s.length = cycle_.first + cycle_.batch_first + 1; // mtp_cycle_end adds the accepted drafts
}

int32_t Session::row(int32_t row) {
    if (!cycle_.open) {
        throw Error(MTP_ERROR_STATE, "no cycle is open: expected mtp_cycle_begin first");
    }
    require_range(row, 0, int64_t(cycle_.tokens.size()) - 1, "row");
    if (row < cycle_.batch_first || row > cycle_.rows) {
        throw Error(MTP_ERROR_STATE, format("row: expected rows in order, %lld to %lld, found %d",
                                            (long long) cycle_.batch_first, (long long) cycle_.rows, row));
    }
    if (row == cycle_.rows) { // the caller has accepted all drafts before this row
        change(cycle_.seq, [&] { verify_more(); });
    }
    return row - int32_t(cycle_.batch_first);
}

void Session::end(int32_t n_accepted) {
    if (!cycle_.open) {
        throw Error(MTP_ERROR_STATE, "no cycle is open: expected mtp_cycle_begin first");
    }
    const int64_t n_drafts = int64_t(cycle_.tokens.size()) - 1;
    require_range(n_accepted, 0, std::min(n_drafts, cycle_.rows - 1), "n_accepted");
    Sequence & s = sequences_[size_t(cycle_.seq)];
    s.length = cycle_.first + 1 + n_accepted;
    ++stats_.cycles;
    stats_.tokens += n_accepted + 1;
    if (cycle_.from_text) {
        ++stats_.text_cycles;
        stats_.text_drafted += n_drafts;
        stats_.text_accepted += n_accepted;
    }
    for (int64_t i = 0; i < n_drafts && !cycle_.from_text; ++i) {
        ++stats_.drafted[i];
        stats_.accepted[i] += i < n_accepted;
    }
    cycle_.open = false;
    change(cycle_.seq, [&] {
        drafter_->verified(n_drafts + 1, std::max(0.0, stats_.verify_ms - cycle_.verify_before));
        drafter_->accepted(cycle_.seq, s.length, n_accepted);
        drafter_->generated(cycle_.seq, cycle_.tokens.data() + 1, n_accepted);
    });
}

// The most likely token of a row. Every function that chooses a token calls this first, because it also
// checks the logits.
int32_t Session::argmax(int32_t row) {
    const int32_t largest = trunk_.largest(row);
    if (largest >= 0) {
        return largest;
    }
    const float * logits = trunk_.logits(row);
    try {
        const int32_t likeliest = mtp::argmax(logits, trunk_.n_vocab());
        if (const float * hidden = trunk_.hidden_of(row)) {
            check_hidden(hidden, trunk_.n_embd());
        }
        return likeliest;
    } catch (...) {
        damaged_ = true;
        throw;
    }
}

int32_t Session::choose(int32_t row, llama_sampler * sampler) {
    const int32_t likeliest = argmax(row);
    try {
        return sampler != nullptr ? llama_sampler_sample(sampler, trunk_.context(), trunk_.row_of(row)) : likeliest;
    } catch (const std::exception & error) { // of a grammar, which is told of a token that it does not allow
        throw Error(MTP_ERROR_STATE, format("no token that the samplers allow: %s", error.what()));
    }
}

int32_t Session::step(int32_t seq, int32_t token, int32_t depth, llama_sampler * sampler, int32_t * out) {
    require(out, "out");
    int32_t drafts[MTP_MAX_DEPTH];
    float probabilities[MTP_MAX_DEPTH];
    const int32_t n = begin(seq, token, depth, drafts, probabilities);
    for (int32_t i = 0;; ++i) {
        const int32_t at = row(i);
        try {
            Stopwatch watch(stats_.sample_ms);
            out[i] = choose(at, sampler);
        } catch (...) { // invalid logits, or a grammar that allows no token
            end(i);
            throw;
        }
        if (i == n || out[i] != drafts[i]) {
            end(i);
            return i + 1;
        }
    }
}

// Stores the distribution of a row (an index from mtp_cycle_row) in target_.
void Session::read_distribution(int32_t row) {
    if (!sampling_) {
        throw Error(MTP_ERROR_STATE, "no sampling is set: expected mtp_session_set_sampling first");
    }
    const int32_t likeliest = argmax(row);
    const int64_t k = sampling_->n_candidates(trunk_.n_vocab());
    RowCandidates candidates;
    if (k > 0 && trunk_.candidates(row, k, candidates) && sampling_->distribution(candidates, trunk_.n_vocab(), target_)) {
        return;
    }
    sampling_->distribution(trunk_.logits(row), trunk_.n_vocab(), likeliest, target_);
}

int32_t Session::sample(int32_t row) {
    read_distribution(row);
    return sampling_->draw(target_);
}

// Replaces p in target_ with max(0, p - q), where q is the distribution this draft step sampled from.
void Session::subtract_draft(int64_t step) {
    const DraftVocabulary & vocabulary = head_->vocabulary();
    Distribution & p = target_;
    std::vector<int32_t> indices; // of the tokens that could be drafted
    for (const int32_t token : p.tokens) {
        if (vocabulary.index_of(token) >= 0) {
            indices.push_back(vocabulary.index_of(token));
        }
    }
    std::vector<double> drawn_from;
    count_transfers([&] { drawn_from = head_->drawn_from(step, indices); });
    auto q = drawn_from.begin();
    double left = 0;
    for (size_t i = 0; i < p.tokens.size(); ++i) {
        const bool drafted = vocabulary.index_of(p.tokens[i]) >= 0;
        p.weights[i] = std::max(0.0, p.weights[i] / p.total - (drafted ? *q++ : 0.0));
        left += p.weights[i];
    }
    p.total = left;
    if (left <= 0) { // p and q differ only by rounding, which alone caused the rejection
        read_distribution(int32_t(step - cycle_.batch_first));
    }
}

int32_t Session::step_sampled(int32_t seq, int32_t token, int32_t depth, int32_t * out) {
    require(out, "out");
    if (!sampling_) {
        throw Error(MTP_ERROR_STATE, "no sampling is set: expected mtp_session_set_sampling first");
    }
    const int32_t most = depth == MTP_DEPTH_AUTO ? params_.max_depth : depth;
    require_range(most, 0, params_.max_depth, "depth");
    if (drafting() && most > 0 && !head_->draws()) {
        throw Error(MTP_ERROR_UNSUPPORTED, "the head's device cannot draw drafts: expected mtp_session_step, which "
                                           "accepts by equality");
    }
    // The drafts are cut off as far below the most likely token as the filters cut the trunk's last
    // row. Any q is correct as long as it does not depend on this cycle's logits.
    Drawing drawing = {1.0f / sampling_->params().temperature, sampling_->reach(), {}};
    for (int32_t i = 0; i < 2 * most; ++i) {
        drawing.uniforms.push_back(sampling_->uniform());
    }
    int32_t drafts[MTP_MAX_DEPTH];
    float q[MTP_MAX_DEPTH];
    const int32_t n = begin(seq, token, depth, drafts, q, most > 0 ? &drawing : nullptr);
    for (int32_t i = 0;; ++i) {
        const int32_t at = row(i);
        try {
            Stopwatch watch(stats_.sample_ms);
            read_distribution(at);
            if (i < n && q[i] > 0 && sampling_->uniform() * q[i] < target_.of(drafts[i])) {
                out[i] = drafts[i];
                continue;
            }
            const int32_t unverified = drafter_->unverified(seq);
            if (i < n && cycle_.from_text) {
                target_.remove(drafts[i]); // q is 1 for the draft and 0 for every other token
            } else if (i < n) {
                subtract_draft(i);
            } else if (unverified >= 0 && q[n] > 0) {
                drafter_->judge_unverified(seq, std::min(1.0, target_.of(unverified) / q[n]));
            }
            out[i] = sampling_->draw(target_);
        } catch (...) { // invalid logits
            end(i);
            throw;
        }
        end(i);
        return i + 1;
    }
}

void Session::remove(int32_t seq, int64_t p0, int64_t p1) {
    Sequence & s = sequence(seq);
    require_range(p0, 0, s.length, "p0");
    if (p0 != 0 || cycle_.seq != seq) {
        check_idle();
    }
    if (p1 >= 0 && p1 < s.length) {
        throw Error(MTP_ERROR_ARGUMENT,
                    format("p1: expected the end of the sequence (%lld or -1), found %lld: only the end of a sequence can be removed",
                           (long long) s.length, (long long) p1));
    }
    if (p0 == 0) {
        clear_sequence(seq);
        return;
    }
    if (p0 == s.length) {
        roll_back(seq);
        return;
    }
    const int64_t n = s.decoded - p0;
    const bool copied = !s.checkpoint.empty() && p0 > s.checkpoint_first;
    if (n > reach(seq) && !copied) {
        throw Error(MTP_ERROR_STATE,
                    format("p0: expected %lld or more, found %lld: the %s can roll back only %lld of "
                           "the %lld tokens after that; remove from 0 and decode again",
                           (long long) (s.decoded - reach(seq)), (long long) p0,
                           trunk_.recurrent() ? "recurrent state" : "cache of a window", (long long) reach(seq),
                           (long long) n));
    }
    s.length = p0;
    drafter_->truncate(seq, p0);
    roll_back(seq);
}

void Session::sync(int32_t seq) {
    check_idle();
    sequence(seq);
    set_length(seq, trunk_.length(seq));
}

void Session::skip(int32_t seq, int64_t length) {
    check_idle();
    Sequence & s = sequence(seq);
    const int64_t held = trunk_.length(seq);
    require_range(length, std::max<int64_t>(held, 1), trunk_.n_ctx(), "length");
    if (s.decoded != s.length) {
        clear_sequence(seq); // rejected drafts are below the new rows
        throw Error(MTP_ERROR_STATE, "the memory was changed from outside while rejected drafts were in it: expected "
                                     "mtp_seq_rm first");
    }
    set_length(seq, length);
    s.foreign = true;
}

} // namespace mtp

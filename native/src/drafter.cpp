#include "drafter.h"

#include "depth_file.h"
#include "error.h"
#include "fingerprint.h"

#include "ggml-backend.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <iterator>
#include <thread>
#include <utility>

namespace mtp {

namespace {

// A head that does not draft is fed once so many rows wait.
constexpr int64_t kLateRows = 64;

// The token of a tail whose hidden state is unknown, and zeros.
constexpr int32_t kUnknown = -1;

constexpr uint32_t OPEN = 1, ENDED = 2, FROM_TEXT = 4; // flags of a saved cycle
constexpr double kMostMs = 1e9;
constexpr int64_t kLeastCycles = 16; // from which on it is worth a file what was learned
const char kDepthState[] = "checkpoint: the state of the depth";

// Identifies what costs depend on: the devices, by their names.
uint64_t this_machine() {
    static const uint64_t machine = [] {
        Fingerprint out;
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            const char * name = ggml_backend_dev_description(ggml_backend_dev_get(i));
            out.add(name, std::strlen(name));
        }
        out.add(std::thread::hardware_concurrency());
        return out.value();
    }();
    return machine;
}

// Heads that accept fewer first drafts begin with what their file states; docs/decisions.md says why others do not.
constexpr double kBadHead = 0.3;

} // namespace

Drafter::Drafter(Head * head, int32_t n_sequences, int32_t max_depth, int32_t max_text)
    : head_(head), max_depth_(head != nullptr ? int32_t(std::min<int64_t>(max_depth, head->max_depth())) : 0),
      max_text_(max_text), sequences_(size_t(n_sequences), Sequence(Depth(max_depth_))) {
    if (head_ != nullptr && head_->vocabulary().n_ring > 0) {
        ring_ = std::make_unique<DraftRing>(head_->vocabulary(), n_sequences);
    }
    const double stated = head != nullptr ? head->stated_acceptance() : -1;
    for (Sequence & sequence : sequences_) {
        if (stated >= 0 && stated < kBadHead) {
            sequence.depth.expect(stated);
        }
    }
}

Drafter::~Drafter() {
    if (!depth_path_.empty() && n_cycles_ >= kLeastCycles) {
        write_depth_file(depth_path_, this_machine(), head_fingerprint_, at(last_seq_).depth);
    }
}

void Drafter::remember_depth(const std::string & path) {
    if (head_ == nullptr) {
        return;
    }
    depth_path_ = path;
    head_fingerprint_ = head_->fingerprint();
    for (Sequence & s : sequences_) {
        read_depth_file(path, this_machine(), head_fingerprint_, s.depth);
    }
}

// ---- drafting ----

void Drafter::draft(std::vector<DraftRequest> & requests, const DraftLimits & limits, const Drawing * drawing) {
    const int32_t n = int32_t(requests.size());
    Requests from_text;
    Requests by_head;
    for (DraftRequest & request : requests) {
        report_cycle(request);
        at(request.seq).depth.share(std::min(n, MTP_MAX_SEQUENCES));
        // Beside others these drafts are cut to the depth of the head's.
        (draft_from_text(request, n > 1 ? max_depth_ : 1) ? from_text : by_head).push_back(&request);
    }
    plan(by_head);
    Requests drafted;
    std::copy_if(by_head.begin(), by_head.end(), std::back_inserter(drafted),
                 [](const DraftRequest * request) { return request->n_drafted > 0; });
    const int32_t others = int32_t(by_head.size() - drafted.size());
    draft_with_head(drafted, drawing);
    keep(drafted, others, drawing);
    int32_t sure = 0; // as many of each sequence as of the surest one
    for (const DraftRequest * request : drafted) {
        const auto & chances = request->probabilities;
        const auto end = chances.begin() + request->n;
        const auto unsure = std::find_if(chances.begin(), end, [&](float p) { return p < limits.least_probability; });
        sure = std::max(sure, int32_t(unsure - chances.begin()));
    }
    for (DraftRequest * request : drafted) {
        request->n = std::min(request->n, sure);
        request->n = request->n < limits.fewest ? 0 : request->n;
    }
    for (DraftRequest * request : from_text) {
        request->n = sure > 0 ? std::min(request->n, sure) : request->n;
    }
    for (const DraftRequest & request : requests) {
        if (!request.failure) {
            begin_cycle(request);
        }
    }
}

// The most tokens that the head can draft for a request: none without a hidden state to begin with.
int32_t Drafter::most_of_head(const DraftRequest & request) const {
    const Sequence & s = at(request.seq);
    if (head_ == nullptr || s.tokens.empty() || s.end() != request.position) {
        return 0;
    }
    const int32_t most = std::clamp(request.room, 0, max_depth_);
    return request.depth == MTP_DEPTH_AUTO ? most : std::min(most, request.depth);
}

// Reports a sequence's last cycle, which the request's token follows.
void Drafter::report_cycle(const DraftRequest & request) {
    Sequence & s = at(request.seq);
    Cycle cycle = s.cycle;
    s.cycle = Cycle();
    if (!cycle.open || !cycle.ended) {
        return;
    }
    n_cycles_++;
    last_seq_ = request.seq;
    mtp_cycle_outcome & outcome = cycle.outcome;
    if (cycle.from_text) {
        s.depth.report_free(outcome.n_verified, outcome.n_accepted, 0, outcome.undo_ms);
        return;
    }
    outcome.probabilities = cycle.probabilities.data();
    if (outcome.next_right < 0 && cycle.unverified >= 0 && cycle.end == request.position) {
        outcome.next_right = request.token == cycle.unverified;
    }
    s.depth.report(outcome);
}

void Drafter::begin_cycle(const DraftRequest & request) {
    Cycle & cycle = at(request.seq).cycle;
    cycle.open = true;
    cycle.from_text = request.from_text;
    cycle.ended = request.n == 0; // then there is nothing to accept
    cycle.end = cycle.ended ? request.position + 1 : 0;
    cycle.outcome = {request.n_drafted, request.n, 0, nullptr, -1, 0, 0, 0};
    cycle.probabilities = request.probabilities;
    cycle.unverified = request.n < request.n_drafted ? request.tokens[size_t(request.n)] : -1;
}

// Drafts from the text if that promises more than the head, and at least `fewest` tokens.
bool Drafter::draft_from_text(DraftRequest & request, int32_t fewest) {
    if (!reads_text()) {
        return false;
    }
    Sequence & s = at(request.seq);
    s.text.generated(request.token);
    const int32_t most = most_of_head(request);
    const int32_t n = s.text.plan(s.depth, head_ != nullptr && request.depth == MTP_DEPTH_AUTO ? MTP_DEPTH_AUTO : most, most,
                                  request.tokens.data(), std::clamp(request.room, 0, max_text_));
    request.from_text = n >= std::max(fewest, 1);
    if (request.from_text) {
        request.n = n;
        std::fill_n(request.probabilities.begin(), n, 1.0f);
    }
    return request.from_text;
}

// Chooses how many tokens the head drafts for each sequence.
void Drafter::plan(const Requests & requests) {
    std::vector<Depth *> choosers;
    std::vector<int32_t> rooms;
    Requests automatic;
    for (DraftRequest * request : requests) {
        request->n_drafted = most_of_head(*request);
        if (head_ != nullptr && request->depth == MTP_DEPTH_AUTO) {
            automatic.push_back(request);
            choosers.push_back(&at(request->seq).depth);
            rooms.push_back(request->n_drafted);
        }
    }
    if (automatic.empty()) {
        return;
    }
    const std::vector<int32_t> depths = Depth::plan_batch(choosers, rooms);
    for (size_t i = 0; i < automatic.size(); ++i) {
        automatic[i]->n_drafted = depths[i];
    }
}

// Chooses how many of the head's drafts to verify. others: further sequences in the batch, with a token each.
void Drafter::keep(const Requests & requests, int32_t others, const Drawing * drawing) {
    std::vector<Depth *> choosers;
    std::vector<const float *> probabilities;
    std::vector<int32_t> drafted;
    Requests automatic;
    for (DraftRequest * request : requests) {
        request->n = request->n_drafted;
        if (request->depth == MTP_DEPTH_AUTO) {
            automatic.push_back(request);
            choosers.push_back(&at(request->seq).depth);
            probabilities.push_back(request->probabilities.data());
            drafted.push_back(request->n_drafted);
        }
    }
    if (automatic.empty()) {
        return;
    }
    if (drawing != nullptr) { // a draft's own probability must not decide
        automatic[0]->n = choosers[0]->keep(probabilities[0], drafted[0], false);
        return;
    }
    const std::vector<int32_t> kept = Depth::keep_batch(choosers, probabilities, drafted, others);
    for (size_t i = 0; i < automatic.size(); ++i) {
        automatic[i]->n = kept[i];
    }
}

// Drafts for all of these sequences in one graph. Those that cannot be drafted are removed.
void Drafter::draft_with_head(Requests & requests, const Drawing * drawing) {
    using Clock = std::chrono::steady_clock;
    if (requests.empty()) {
        return;
    }
    const auto attempt = [&](const Requests & some) {
        try {
            run_head(some, drawing);
            return true;
        } catch (...) {
            some.front()->failure = std::current_exception();
            return false;
        }
    };
    const Clock::time_point start = Clock::now();
    if (!attempt(requests)) {
        const bool several = requests.size() > 1;
        Requests drafted;
        for (DraftRequest * request : requests) {
            if (several && attempt({request})) {
                request->failure = nullptr;
                drafted.push_back(request);
            } else {
                request->n_drafted = 0;
                head_->rollback(request->seq, 0);
                empty_tail(at(request->seq), request->position);
            }
        }
        requests = std::move(drafted);
    }
    if (requests.empty()) {
        return;
    }
    const auto deepest = std::max_element(requests.begin(), requests.end(), [](const DraftRequest * a, const DraftRequest * b) {
        return a->n_drafted < b->n_drafted;
    });
    const double ms = std::chrono::duration<double, std::milli>(Clock::now() - start).count();
    at(requests.front()->seq).depth.report_draft(int32_t(requests.size()), (*deepest)->n_drafted, ms);
}

void Drafter::run_head(const Requests & requests, const Drawing * drawing) {
    if (ring_) { // here only, so that it is known until the next drafts which tokens could be drafted
        for (const DraftRequest * request : requests) {
            ring_->truncate(request->seq, request->position); // of a draft that was not verified
            ring_->follow(request->seq, request->position, &request->token, 1);
        }
        head_->set_ring(ring_->ids());
    }
    std::vector<std::vector<int32_t>> tokens; // of the rows to feed
    std::vector<mtp_draft_task> tasks;
    for (DraftRequest * request : requests) {
        const int32_t seq = request->seq;
        const Sequence & s = at(seq);
        const int64_t next = next_row(seq);
        const int64_t row = next - s.first; // >= 1
        if (row != 1) {
            fetch(seq);
        }
        tokens.emplace_back(s.tokens.begin() + row, s.tokens.end());
        tokens.back().push_back(request->token);
        tasks.push_back({seq, int32_t(next), tokens.back().data(),
                         s.on_device ? nullptr : s.hidden.data() + size_t(row - 1) * width(), int32_t(tokens.back().size()),
                         request->n_drafted, request->tokens.data(), request->probabilities.data()});
    }
    head_->draft_batch(tasks.data(), int32_t(tasks.size()), drawing);
    for (const DraftRequest * request : requests) {
        Sequence & s = at(request->seq);
        empty_tail(s, request->position);
        s.drafted_after = request->token;
    }
}

// ---- what the trunk decoded ----

bool Drafter::continues(int32_t seq, int64_t first, int32_t token) const {
    const Sequence & s = at(seq);
    return head_ != nullptr && s.drafted_after == token && s.first == first && !head_->cache().empty(seq) &&
           head_->cache().next(seq) == first + 1;
}

bool Drafter::keep_on_device(int32_t seq, int64_t first, int32_t token, int64_t n, const DeviceRows & rows) {
    if (head_ == nullptr) {
        return false;
    }
    const Sequence & s = at(seq);
    const bool begins = continues(seq, first, token) || (first == s.end() && s.tokens.empty());
    return (begins || (first == s.end() && s.on_device)) && head_->keep_hidden(seq, begins ? 0 : int64_t(s.tokens.size()), rows, n);
}

void Drafter::decoded(int32_t seq, int64_t first, const int32_t * tokens, int64_t n, const float * hidden) {
    if (head_ == nullptr) {
        return;
    }
    Sequence & s = at(seq);
    if (continues(seq, first, tokens[0])) {
        empty_tail(s, first); // which has this batch if it is decoded again after a rollback
        s.drafted_after = tokens[0];
    } else if (first > s.end()) {
        head_->rollback(seq, 0);
        empty_tail(s, first);
    } else {
        cut(seq, first);
    }
    if (ring_) {
        ring_->follow(seq, first, tokens, n);
    }
    if (waiting(seq) + n > kLateRows) {
        feed(seq);
    }
    if (hidden == nullptr) {
        s.on_device = true;
    } else {
        fetch(seq);
        s.hidden.insert(s.hidden.end(), hidden, hidden + size_t(n) * width());
    }
    s.tokens.insert(s.tokens.end(), tokens, tokens + n);
    if (waiting(seq) > kLateRows) {
        feed(seq);
    }
}

void Drafter::verified(int64_t n_tokens, double ms) {
    if (n_tokens <= MTP_MAX_SEQUENCES * (MTP_MAX_DEPTH + 1)) {
        sequences_.front().depth.report_batch(int32_t(n_tokens), ms);
    }
}

void Drafter::accepted(int32_t seq, int64_t end, int32_t n_accepted) {
    cut(seq, end);
    Cycle & cycle = at(seq).cycle;
    cycle.open = cycle.open && n_accepted >= 0 && n_accepted <= cycle.outcome.n_verified;
    cycle.ended = true;
    cycle.end = end;
    cycle.outcome.n_accepted = n_accepted;
}

void Drafter::rolled_back(int32_t seq, double ms) {
    at(seq).cycle.outcome.undo_ms = ms;
}

void Drafter::judge_unverified(int32_t seq, double probability) {
    at(seq).cycle.outcome.next_right = float(probability);
}

// ---- the head's rows ----

// The position of the head's next row. The tail must hold the hidden state before it; if there is a gap, the
// head's rows are dropped and it starts again after the gap. The row at position 0 would need the hidden
// state of position -1, so the cache starts at position 1, as in training.
int64_t Drafter::next_row(int32_t seq) {
    const Sequence & s = at(seq);
    if (head_->cache().empty(seq) || head_->cache().next(seq) <= s.first) {
        head_->rollback(seq, 0);
        return s.first + 1;
    }
    return head_->cache().next(seq);
}

// How many tokens of the tail the head has not been fed.
int64_t Drafter::waiting(int32_t seq) const {
    const Sequence & s = at(seq);
    const int64_t next = head_->cache().empty(seq) ? 0 : head_->cache().next(seq);
    return s.end() - std::clamp(next, s.first, s.end());
}

void Drafter::feed(int32_t seq) {
    Sequence & s = at(seq);
    if (head_ == nullptr || s.tokens.empty()) {
        return;
    }
    fetch(seq);
    const int64_t next = next_row(seq);
    const int64_t row = next - s.first; // >= 1
    if (next < s.end()) {
        head_->feed(seq, next, s.tokens.data() + row, s.hidden.data() + size_t(row - 1) * width(), s.end() - next);
        s.drafted_after = -1;
    }
    // The last hidden state pairs with the token that comes next, and those before it with the next one if
    // tokens are removed.
    const size_t most = size_t(std::max(max_depth_, max_text_)) + 1;
    const size_t drop = s.tokens.size() - std::min(s.tokens.size(), most);
    s.tokens.erase(s.tokens.begin(), s.tokens.begin() + int64_t(drop));
    s.hidden.erase(s.hidden.begin(), s.hidden.begin() + int64_t(drop * width()));
    s.first += int64_t(drop);
}

// Reads hidden states of the tail that are on the device.
void Drafter::fetch(int32_t seq) {
    Sequence & s = at(seq);
    if (s.on_device) {
        std::vector<float> hidden(s.tokens.size() * width());
        head_->get_hidden(seq, int64_t(s.tokens.size()), hidden.data());
        s.hidden = std::move(hidden);
        s.on_device = false;
    }
}

void Drafter::empty_tail(Sequence & s, int64_t first) {
    s.first = first;
    s.tokens.clear();
    s.hidden.clear();
    s.on_device = false;
    s.drafted_after = -1;
}

// Removes what is at a position and after it, but for the text.
void Drafter::cut(int32_t seq, int64_t position) {
    Sequence & s = at(seq);
    if (position < s.cycle.end) {
        s.cycle.unverified = -1; // another token comes at its position
    }
    if (head_ == nullptr) {
        return;
    }
    if (ring_) {
        ring_->truncate(seq, position);
    }
    if (head_->cache().next(seq) > position) {
        head_->rollback(seq, position);
        s.drafted_after = -1;
    }
    if (position > s.first && position < s.end()) {
        s.tokens.resize(size_t(position - s.first));
        s.hidden.resize(s.on_device ? 0 : s.tokens.size() * width());
    } else if (position <= s.first) {
        empty_tail(s, position);
        if (!head_->cache().empty(seq) && head_->cache().next(seq) == position) {
            // The head goes on with a row whose hidden state is not known, rather than without all before it.
            s.first = position - 1;
            s.tokens.assign(1, kUnknown);
            s.hidden.assign(width(), 0.0f);
        }
    }
}

void Drafter::truncate(int32_t seq, int64_t length) {
    cut(seq, length);
    Sequence & s = at(seq);
    if (length < s.text_first) {
        s.text.clear();
        s.text_first = length;
    } else {
        s.text.truncate(std::min(s.text.size(), length - s.text_first));
    }
}

void Drafter::clear(int32_t seq, int64_t length) {
    Sequence & s = at(seq);
    if (head_ != nullptr) {
        head_->rollback(seq, 0);
    }
    if (ring_) {
        ring_->truncate(seq, 0);
    }
    empty_tail(s, length);
    s.cycle = Cycle();
    s.text.clear();
    s.text_first = length;
}

void Drafter::copy(int32_t from, int32_t to) {
    if (head_ != nullptr) {
        fetch(from); // the copy has no hidden states on the head's device
        head_->cache().copy(from, to);
    }
    if (ring_) {
        ring_->truncate(to, 0); // the tokens of the copy are there as those of the source
    }
    Sequence copied = at(from);
    copied.depth = at(to).depth; // each sequence has its own
    copied.cycle = Cycle();      // the outcome belongs to the source
    at(to) = std::move(copied);
}

// ---- the text ----

void Drafter::read(int32_t seq, const int32_t * tokens, int64_t n) {
    if (reads_text()) {
        at(seq).text.read(tokens, n);
    }
}

void Drafter::generated(int32_t seq, const int32_t * tokens, int64_t n) {
    for (int64_t i = 0; i < n && reads_text(); ++i) {
        at(seq).text.generated(tokens[i]);
    }
}

void Drafter::set_text(int32_t seq, const int32_t * tokens, int64_t n, bool are_generated) {
    at(seq).text.set(tokens, n, are_generated);
}

void Drafter::set_corpus(const Corpus * corpus) {
    for (Sequence & s : sequences_) {
        s.text.set_corpus(corpus);
    }
}

// ---- states ----

DrafterState Drafter::save(int32_t seq, bool with_rows) {
    DrafterState state;
    const Sequence & s = at(seq);
    state.first = s.end();
    state.depth = save_depth(seq);
    if (head_ == nullptr || s.tokens.empty() || s.tokens.back() == kUnknown) {
        return state;
    }
    if (with_rows) {
        feed(seq);
        const HeadCache & cache = head_->cache();
        state.first = cache.empty(seq) ? s.end() : cache.first(seq);
        std::vector<uint8_t> rows(cache.rows_bytes(s.end() - state.first));
        cache.read_rows(seq, state.first, s.end() - state.first, rows.data());
        state.rows = std::move(rows);
        if (ring_) {
            state.ring = ring_->save(seq);
        }
    }
    fetch(seq);
    state.token = s.tokens.back();
    state.hidden.assign(s.hidden.end() - int64_t(width()), s.hidden.end());
    if (!state.is_finite()) { // as of a head that is damaged: no reader accepts it
        DrafterState rest;
        rest.first = s.end();
        rest.depth = std::move(state.depth);
        return rest;
    }
    return state;
}

bool DrafterState::is_finite() const {
    uint32_t unsound = 0; // without a branch, so that compilers take vectors
    for (size_t i = 0; i + 1 < rows.size(); i += sizeof(ggml_fp16_t)) {
        ggml_fp16_t x;
        std::memcpy(&x, rows.data() + i, sizeof(x));
        unsound |= (x & 0x7c00) == 0x7c00; // the exponent of infinities and NaNs
    }
    return unsound == 0 && std::all_of(hidden.begin(), hidden.end(), [](float x) { return std::isfinite(x); });
}

void Drafter::restore(int32_t seq, int64_t length, const DrafterState & state) {
    if (head_ != nullptr) {
        restore_head(seq, length, state);
    }
    if (!state.depth.empty()) {
        restore_depth(seq, state.depth);
    }
}

void Drafter::restore_head(int32_t seq, int64_t length, const DrafterState & state) {
    if (!state.rows.empty()) {
        head_->cache().reserve(seq, length); // fails before anything is changed
        head_->rollback(seq, 0);
        head_->cache().write_rows(seq, state.first, length - state.first, state.rows.data());
    }
    if (ring_ && !state.ring.empty()) {
        ring_->restore(seq, state.ring);
    }
    cut(seq, length);
    Sequence & s = at(seq);
    if (state.hidden.empty()) {
        return;
    }
    if (s.tokens.empty() || s.end() != length) {
        empty_tail(s, length - 1);
        s.tokens.assign(1, state.token);
        s.hidden = state.hidden;
        return;
    }
    fetch(seq);
    s.tokens.back() = state.token;
    std::copy(state.hidden.begin(), state.hidden.end(), s.hidden.end() - int64_t(width()));
}

// u64 machine; of the last cycle: u32 flags, i32 drafted, verified and accepted tokens, f64 time of rolling back, f32
// next_right, i32 first draft that was not verified, i64 end, f32 probabilities; then what Depth::save gives.
std::vector<uint8_t> Drafter::save_depth(int32_t seq) const {
    const Cycle & cycle = at(seq).cycle;
    std::vector<uint8_t> out;
    put(out, this_machine());
    put(out, (cycle.open ? OPEN : 0) | (cycle.ended ? ENDED : 0) | (cycle.from_text ? FROM_TEXT : 0));
    put(out, cycle.outcome.n_drafted);
    put(out, cycle.outcome.n_verified);
    put(out, cycle.outcome.n_accepted);
    put(out, cycle.outcome.undo_ms);
    put(out, cycle.outcome.next_right);
    put(out, cycle.unverified);
    put(out, cycle.end);
    put(out, cycle.probabilities);
    const std::vector<uint8_t> chooser = at(seq).depth.save();
    out.insert(out.end(), chooser.begin(), chooser.end());
    return out;
}

Drafter::Cycle Drafter::read_cycle(BoundedReader & in) {
    Cycle cycle;
    const uint32_t flags = in.integer<uint32_t>("flags of a cycle", 0, OPEN | ENDED | FROM_TEXT);
    cycle.open = flags & OPEN;
    cycle.ended = flags & ENDED;
    cycle.from_text = flags & FROM_TEXT;
    mtp_cycle_outcome & outcome = cycle.outcome;
    outcome.n_drafted = in.integer<int32_t>("drafted tokens", 0, MTP_MAX_DEPTH);
    outcome.n_verified = in.integer<int32_t>("verified tokens", 0, cycle.from_text ? MTP_MAX_DEPTH : outcome.n_drafted);
    outcome.n_accepted = in.integer<int32_t>("accepted tokens", -1, outcome.n_verified); // -1: of a cycle that is not open
    outcome.undo_ms = in.number("time of rolling back", 0, kMostMs);
    outcome.next_right = in.take<float>("next_right");
    cycle.unverified = in.integer<int32_t>("first draft that was not verified", -1, INT32_MAX);
    cycle.end = in.integer<int64_t>("end of a cycle", 0, INT32_MAX);
    cycle.probabilities = in.take<decltype(cycle.probabilities)>("probabilities");
    const auto is_share = [](float p) { return p >= 0 && p <= 1.001f; }; // rounded
    if (!(outcome.next_right >= -1 && outcome.next_right <= 1) || (cycle.open && outcome.n_accepted < 0) ||
        !std::all_of(cycle.probabilities.begin(), cycle.probabilities.end(), is_share)) {
        in.refuse("expected probabilities from 0 to 1, found others");
    }
    return cycle;
}

void Drafter::check_depth(const std::vector<uint8_t> & saved) {
    BoundedReader in(kDepthState, saved.data(), saved.size());
    in.take<uint64_t>("machine");
    read_cycle(in);
    Depth::check_saved(in);
}

void Drafter::restore_depth(int32_t seq, const std::vector<uint8_t> & saved) {
    BoundedReader in(kDepthState, saved.data(), saved.size());
    const bool same_machine = in.take<uint64_t>("machine") == this_machine();
    Cycle cycle = read_cycle(in);
    Sequence & s = at(seq);
    s.depth.restore(in, same_machine);
    cycle.open = cycle.open && cycle.outcome.n_drafted <= max_depth_; // else it is of a session that drafts more
    s.cycle = cycle;
}

void Drafter::restore_text(int32_t seq, int64_t length, const std::vector<uint8_t> & saved) {
    Sequence & s = at(seq);
    s.text.restore(saved);
    s.text_first = length - s.text.size();
}

void Drafter::check_learned(int32_t seq, int64_t length, const std::vector<uint8_t> & saved) const {
    const Sequence & s = at(seq);
    TextDrafts::check_learned(saved, std::max<int64_t>(std::min(s.text.size(), length - s.text_first), 0));
}

} // namespace mtp

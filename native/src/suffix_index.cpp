#include "suffix_index.h"

#include <algorithm>

namespace mtp {

namespace {

// The number of suffixes, longest first, whose recent position is updated per token. This bounds the
// work; shorter suffixes keep an older position, which is also correct.
constexpr int kRecorded = 8;

constexpr size_t kFirstSlots = 64;

// SplitMix64's finalizer: neighbouring states and tokens spread over the table.
uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

} // namespace

SuffixIndex::SuffixIndex() : slots_(kFirstSlots, -1) {
    states_.push_back({0, -1, -1, -1, 0, -1}); // the empty string
}

size_t SuffixIndex::bytes() const {
    return tokens_.capacity() * sizeof(int32_t) + states_.capacity() * sizeof(State) +
           edges_.capacity() * sizeof(Edge) + slots_.capacity() * sizeof(int32_t) +
           changes_.capacity() * sizeof(Change) + marks_.capacity() * sizeof(Mark) +
           truncations_.capacity() * sizeof(Truncation);
}

int32_t SuffixIndex::add_state(int32_t length, int32_t first_end) {
    states_.push_back({length, 0, first_end, first_end, n_truncations_, -1});
    return int32_t(states_.size()) - 1;
}

size_t SuffixIndex::slot_of(int32_t from, int32_t token) const {
    const size_t mask = slots_.size() - 1;
    size_t slot = size_t(mix(uint64_t(uint32_t(from)) << 32 | uint32_t(token))) & mask;
    for (; slots_[slot] >= 0; slot = (slot + 1) & mask) {
        const Edge & edge = edges_[size_t(slots_[slot])];
        if (edge.from == from && edge.token == token) {
            break;
        }
    }
    return slot;
}

int32_t SuffixIndex::find_edge(int32_t from, int32_t token) const {
    return slots_[slot_of(from, token)];
}

void SuffixIndex::insert_slot(int32_t edge) {
    slots_[slot_of(edges_[size_t(edge)].from, edges_[size_t(edge)].token)] = edge;
}

// Edges are inserted into the table in the order of their numbers and removed in reverse order, so a
// freed slot never interrupts the probe sequence of another edge.
void SuffixIndex::add_edge(int32_t from, int32_t token, int32_t to) {
    State & state = states_[size_t(from)];
    edges_.push_back({from, token, to, state.edges});
    state.edges = int32_t(edges_.size()) - 1;
    if (edges_.size() * 2 > slots_.size()) {
        slots_.assign(slots_.size() * 2, -1);
        for (int32_t i = 0; i < int32_t(edges_.size()); ++i) {
            insert_slot(i);
        }
    } else {
        insert_slot(state.edges);
    }
}

void SuffixIndex::set_target(int32_t edge, int32_t to) {
    changes_.push_back({edge, edges_[size_t(edge)].to, false});
    edges_[size_t(edge)].to = to;
}

void SuffixIndex::set_link(int32_t state, int32_t link) {
    changes_.push_back({state, states_[size_t(state)].link, true});
    states_[size_t(state)].link = link;
}

// Records the end of the sequence as the recent position of its repeated suffixes. Called before
// the next token, so that `match` finds the occurrence before this one.
void SuffixIndex::record_recent() {
    const int32_t end = int32_t(tokens_.size()) - 1;
    int32_t state = states_[size_t(last_)].link;
    for (int i = 0; i < kRecorded && state > 0; ++i) {
        states_[size_t(state)].recent_end = end;
        states_[size_t(state)].recent_truncations = n_truncations_;
        state = states_[size_t(state)].link;
    }
}

void SuffixIndex::append(int32_t token) {
    marks_.push_back({last_, int32_t(states_.size()), int32_t(edges_.size()), int32_t(changes_.size())});
    try {
        extend(token);
    } catch (...) { // out of memory
        revert(int64_t(marks_.size()) - 1);
        throw;
    }
}

// Adds a token whose mark is set.
void SuffixIndex::extend(int32_t token) {
    record_recent();
    const int32_t position = int32_t(tokens_.size());
    tokens_.push_back(token);

    const int32_t current = add_state(position + 1, position);
    int32_t state = last_;
    int32_t edge = -1;
    while (state >= 0 && (edge = find_edge(state, token)) < 0) {
        add_edge(state, token, current);
        state = states_[size_t(state)].link;
    }
    last_ = current;
    if (state < 0) {
        return; // a new token: the link stays at the empty string
    }
    const int32_t target = edges_[size_t(edge)].to;
    const int32_t length = states_[size_t(state)].length + 1;
    if (states_[size_t(target)].length == length) {
        states_[size_t(current)].link = target;
        return;
    }
    // The suffix is shorter than the strings of its state: it gets a state of its own.
    const State original = states_[size_t(target)];
    const int32_t clone = add_state(length, original.first_end);
    states_[size_t(clone)].link = original.link;
    states_[size_t(clone)].recent_end = original.recent_end;
    states_[size_t(clone)].recent_truncations = original.recent_truncations;
    for (int32_t i = original.edges; i >= 0; i = edges_[size_t(i)].next) {
        const Edge copied = edges_[size_t(i)];
        add_edge(clone, copied.token, copied.to);
    }
    for (; state >= 0; state = states_[size_t(state)].link) {
        edge = find_edge(state, token);
        if (edge < 0 || edges_[size_t(edge)].to != target) {
            break;
        }
        set_target(edge, clone);
    }
    set_link(target, clone);
    states_[size_t(current)].link = clone;
}

// Removes all tokens whose marks follow the first `size` ones, also one that is not complete. Allocates
// nothing.
void SuffixIndex::revert(int64_t size) {
    if (size_t(size) == marks_.size()) {
        return;
    }
    const Mark mark = marks_[size_t(size)];
    while (int32_t(changes_.size()) > mark.changes) {
        const Change change = changes_.back();
        changes_.pop_back();
        (change.is_link ? states_[size_t(change.index)].link : edges_[size_t(change.index)].to) = change.before;
    }
    while (int32_t(edges_.size()) > mark.edges) {
        const Edge edge = edges_.back();
        slots_[slot_of(edge.from, edge.token)] = -1;
        states_[size_t(edge.from)].edges = edge.next;
        edges_.pop_back();
    }
    states_.resize(size_t(mark.states));
    last_ = mark.last;
    marks_.resize(size_t(size));
    tokens_.resize(size_t(size));
}

void SuffixIndex::truncate(int64_t size) {
    if (size >= this->size()) {
        return;
    }
    if (size == 0) { // nothing that was recorded is left
        revert(0);
        truncations_.clear();
        return;
    }
    reserve_truncation();
    revert(size);
    while (!truncations_.empty() && truncations_.back().size >= size) {
        truncations_.pop_back();
    }
    truncations_.push_back({++n_truncations_, size});
}

void SuffixIndex::reserve_truncation() {
    truncations_.push_back({});
    truncations_.pop_back(); // keeps the memory
}

// Positions recorded after that many truncations still hold the same tokens before this one.
int64_t SuffixIndex::valid_before(uint32_t truncations) const {
    const auto later = std::upper_bound(truncations_.begin(), truncations_.end(), truncations,
                                        [](uint32_t n, const Truncation & t) { return n < t.number; });
    return later == truncations_.end() ? size() : later->size;
}

SuffixIndex::Match SuffixIndex::match() const {
    const int32_t index = states_[size_t(last_)].link;
    if (index <= 0) {
        return {};
    }
    const State & state = states_[size_t(index)];
    const bool recent = state.recent_end + 1 < size() && state.recent_end < valid_before(state.recent_truncations);
    return {state.length, int64_t(recent ? state.recent_end : state.first_end) + 1};
}

int32_t SuffixIndex::propose(const Match & match, int32_t * out, int32_t n) const {
    if (match.length == 0) {
        return 0;
    }
    for (int32_t i = 0; i < n; ++i) {
        const int64_t position = match.next + i;
        out[i] = position < size() ? tokens_[size_t(position)] : out[position - size()];
    }
    return n;
}

} // namespace mtp

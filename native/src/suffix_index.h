#pragma once
// Finds the longest suffix of a token sequence that also occurs earlier in it, and what follows there.
//
// A suffix automaton (Blumer et al., 1985), built online: at most 2 n states and 3 n transitions for
// n tokens, appended in amortized constant time, with at most 150 bytes per token. Truncation reverts
// the appends in reverse order and costs at most what they cost. A call that runs out of memory changes
// nothing, and truncating to 0 needs none. Independent of ggml and llama.cpp.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mtp {

class SuffixIndex {
public:
    // The longest suffix that also ends before the last token. length: its number of tokens, 0 if
    // there is none. next: position of the token that follows its earlier occurrence, the most
    // recent known one.
    struct Match {
        int64_t length = 0;
        int64_t next = 0;
    };

    SuffixIndex();

    int64_t size() const { return int64_t(tokens_.size()); }
    int32_t token(int64_t position) const { return tokens_[size_t(position)]; }
    const int32_t * tokens() const { return tokens_.data(); }
    size_t bytes() const;

    void append(int32_t token);
    void truncate(int64_t size); // 0 <= size <= size()
    void reserve_truncation();   // allocates what the next truncation needs, so that it cannot fail
    Match match() const;

    // Copies up to n tokens that follow the match. A match that reaches the end of the sequence is
    // continued periodically, since its continuation then contains the copied tokens themselves.
    int32_t propose(const Match & match, int32_t * out, int32_t n) const;

private:
    // A set of strings that end at the same positions. length: the length of the longest one. link: the
    // state of its longest suffix that ends at more positions. first_end: the smallest position.
    // recent_end: a later one, recorded after `recent_truncations` truncations.
    struct State {
        int32_t length;
        int32_t link;
        int32_t first_end;
        int32_t recent_end;
        uint32_t recent_truncations;
        int32_t edges; // the first edge of its list, -1: none
    };

    struct Edge {
        int32_t from;
        int32_t token;
        int32_t to;
        int32_t next; // the next edge of the same state
    };

    // A change of an older state or edge, reverted when the token that caused it is removed.
    struct Change {
        int32_t index;
        int32_t before;
        bool is_link; // of states_[index]; else the target of edges_[index]
    };

    // The sizes before a token was appended.
    struct Mark {
        int32_t last;
        int32_t states;
        int32_t edges;
        int32_t changes;
    };

    struct Truncation {
        uint32_t number;
        int64_t size;
    };

    void extend(int32_t token);
    void revert(int64_t size);
    int32_t add_state(int32_t length, int32_t first_end);
    void add_edge(int32_t from, int32_t token, int32_t to);
    void insert_slot(int32_t edge);
    size_t slot_of(int32_t from, int32_t token) const;
    int32_t find_edge(int32_t from, int32_t token) const;
    void set_target(int32_t edge, int32_t to);
    void set_link(int32_t state, int32_t link);
    void record_recent();
    int64_t valid_before(uint32_t truncations) const;

    std::vector<int32_t> tokens_;
    std::vector<State> states_;
    std::vector<Edge> edges_;
    std::vector<int32_t> slots_; // hash table of edges by (from, token), -1: free
    std::vector<Change> changes_;
    std::vector<Mark> marks_; // one per token
    std::vector<Truncation> truncations_; // with increasing sizes
    uint32_t n_truncations_ = 0;
    int32_t last_ = 0; // the state of the whole sequence
};

} // namespace mtp

#pragma once
// Finds the longest suffix of a token sequence that also occurs earlier in it, and what follows there.
//
// A tree of the contexts of all positions: the up to kMostContext tokens before each, read backwards
// (a suffix tree of the reversed sequence, truncated in depth). Contexts with the same last tokens share
// a path from the root, so the longest suffix that occurred before ends where the path of the sequence's
// own end leaves the tree. A position adds at most two nodes: its leaf, and one that splits an edge.
//
// Bounds: each append, each removed token and each match visits at most kMostContext tokens and nodes,
// whatever the tokens are and whatever was appended and removed before, apart from the growth of arrays
// and the hash table, which is amortized: they never shrink. At most 110 bytes per token, half of them
// reserved for growth. A call that runs out of memory changes nothing, and truncation needs none.
// Independent of ggml and llama.cpp.

#include <cstddef>
#include <cstdint>
#include <vector>

namespace mtp {

class SuffixIndex {
public:
    // Tokens before a position that are compared: a longer match counts as one of this length. It bounds the
    // work; from 21 tokens on a longer match is not estimated to be more likely (text_drafts.cpp).
    static constexpr int32_t kMostContext = 64;

    static constexpr int32_t kMostCounted = 4;

    // The longest suffix that also ends before the last token. length: its number of tokens, 0 if
    // there is none. next: position of the token that follows its most recent earlier occurrence, or the
    // first one if that was truncated. agreeing: how many occurrences in a row up to the most recent one were
    // followed by the same token, at most kMostCounted; 0 if there was only one occurrence. After a truncation
    // it may count what is not there any more.
    struct Match {
        int64_t length = 0;
        int64_t next = 0;
        int32_t agreeing = 0;
    };

    SuffixIndex();

    int64_t size() const { return int64_t(tokens_.size()); }
    int32_t token(int64_t position) const { return tokens_[size_t(position)]; }
    const int32_t * tokens() const { return tokens_.data(); }
    size_t bytes() const;

    void append(int32_t token);
    void truncate(int64_t size); // 0 <= size <= size()
    Match match() const;

    // Copies up to n tokens that follow the match. A match that reaches the end of the sequence is
    // continued periodically, since its continuation then contains the copied tokens themselves.
    int32_t propose(const Match & match, int32_t * out, int32_t n) const;

private:
    // The contexts that begin with the same `depth` tokens. Its edge from the parent has the tokens from the
    // parent's depth on, which are those before `first`.
    struct Node {
        int32_t parent;
        int16_t depth;
        int16_t agreeing; // as in Match, but 1 if there is only one position
        int32_t first;    // the first position with such a context
        int32_t recent;   // the position that was inserted last; it may have been truncated since
    };

    // How far a context leads from the root.
    struct Path {
        int32_t node = 0;   // the deepest node on it
        int32_t below = -1; // the node at whose edge it leaves the tree, -1: at `node`
        int32_t depth = 0;  // tokens
    };

    int32_t before(int64_t position, int32_t i) const { return tokens_[size_t(position - 1 - i)]; }
    Path descend() const;
    void insert(int32_t position, int32_t token);
    void remove(int32_t position);
    void reserve();

    // The hash table of nodes by parent and first token of the edge.
    size_t home_of(int32_t parent, int32_t token) const;
    size_t slot_of(int32_t parent, int32_t token) const;
    size_t slot_of(int32_t node) const;
    void free_slot(size_t slot);

    std::vector<int32_t> tokens_;
    std::vector<Node> nodes_;
    std::vector<uint8_t> added_; // by position: nodes that it added, 0 to 2
    std::vector<int32_t> slots_; // -1: free
    Path end_;                   // of the context of the next token, which is not inserted yet
};

} // namespace mtp

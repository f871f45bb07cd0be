#include "lookup/suffix_index.h"

#include <algorithm>

namespace mtp {

namespace {

constexpr size_t kFirstSlots = 64;
constexpr size_t kMostAdded = 2; // nodes per token

// SplitMix64's finalizer: neighbouring nodes and tokens spread over the table.
uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Makes room for n more elements; grows as push_back does.
template <typename T> void make_room(std::vector<T> & all, size_t n) {
    if (all.capacity() - all.size() < n) {
        all.reserve(2 * all.size() + n);
    }
}

} // namespace

SuffixIndex::SuffixIndex() : slots_(kFirstSlots, -1) {
    nodes_.push_back({-1, 0, 0, 0, 0}); // the root
}

size_t SuffixIndex::bytes() const {
    return tokens_.capacity() * sizeof(int32_t) + nodes_.capacity() * sizeof(Node) + added_.capacity() +
           slots_.capacity() * sizeof(int32_t);
}

size_t SuffixIndex::home_of(int32_t parent, int32_t token) const {
    return size_t(mix(uint64_t(uint32_t(parent)) << 32 | uint32_t(token))) & (slots_.size() - 1);
}

// The slot of a node, or the free one that it belongs into.
size_t SuffixIndex::slot_of(int32_t parent, int32_t token) const {
    const int32_t depth = nodes_[size_t(parent)].depth;
    size_t slot = home_of(parent, token);
    for (; slots_[slot] >= 0; slot = (slot + 1) & (slots_.size() - 1)) {
        const Node & node = nodes_[size_t(slots_[slot])];
        if (node.parent == parent && before(node.first, depth) == token) {
            break;
        }
    }
    return slot;
}

size_t SuffixIndex::slot_of(int32_t index) const {
    const Node & node = nodes_[size_t(index)];
    return slot_of(node.parent, before(node.first, nodes_[size_t(node.parent)].depth));
}

// Frees a slot and moves those behind it that would not be found any more.
void SuffixIndex::free_slot(size_t slot) {
    const size_t mask = slots_.size() - 1;
    for (size_t next = (slot + 1) & mask; slots_[next] >= 0; next = (next + 1) & mask) {
        const Node & node = nodes_[size_t(slots_[next])];
        const size_t home = home_of(node.parent, before(node.first, nodes_[size_t(node.parent)].depth));
        if (((next - home) & mask) >= ((next - slot) & mask)) {
            slots_[slot] = slots_[next];
            slot = next;
        }
    }
    slots_[slot] = -1;
}

// Allocates what the next token needs, so that nothing fails later.
void SuffixIndex::reserve() {
    make_room(tokens_, 1);
    make_room(added_, 1);
    make_room(nodes_, kMostAdded);
    if ((nodes_.size() + kMostAdded) * 2 > slots_.size()) {
        slots_ = std::vector<int32_t>(slots_.size() * 2, -1);
        for (int32_t node = 1; node < int32_t(nodes_.size()); ++node) {
            slots_[slot_of(node)] = node;
        }
    }
}

// Follows the context of the next token. No node is deeper than it, since contexts of later positions are
// at least as long.
SuffixIndex::Path SuffixIndex::descend() const {
    const int32_t most = int32_t(std::min<int64_t>(size(), kMostContext));
    Path path;
    while (path.depth < most) {
        const int32_t child = slots_[slot_of(path.node, before(size(), path.depth))];
        if (child < 0) {
            return path;
        }
        const Node & node = nodes_[size_t(child)];
        do {
            ++path.depth;
        } while (path.depth < node.depth && before(node.first, path.depth) == before(size(), path.depth));
        if (path.depth < node.depth) {
            path.below = child;
            return path;
        }
        path.node = child;
    }
    return path;
}

// Inserts the context of the next token, whose path is known.
void SuffixIndex::insert(int32_t position, int32_t token) {
    int32_t deepest = end_.node;
    if (end_.below >= 0) { // a node splits the edge
        Node split = nodes_[size_t(end_.below)];
        split.depth = int16_t(end_.depth);
        const size_t slot = slot_of(end_.below);
        deepest = int32_t(nodes_.size());
        nodes_.push_back(split);
        slots_[slot] = deepest;
        nodes_[size_t(end_.below)].parent = deepest;
        slots_[slot_of(end_.below)] = end_.below;
    }
    for (int32_t i = deepest; i > 0; i = nodes_[size_t(i)].parent) {
        Node & node = nodes_[size_t(i)];
        if (node.recent < position) { // else it was truncated and counted
            const bool agrees = tokens_[size_t(node.recent)] == token;
            node.agreeing = int16_t(agrees ? std::min(node.agreeing + 1, kMostCounted) : 1);
        }
        node.recent = position;
    }
    const int32_t depth = int32_t(std::min<int64_t>(position, kMostContext));
    if (end_.depth < depth) { // else all of it occurred before
        const int32_t leaf = int32_t(nodes_.size());
        nodes_.push_back({deepest, int16_t(depth), 1, position, position});
        slots_[slot_of(leaf)] = leaf;
    }
}

// Reverts the insertion of the last position.
void SuffixIndex::remove(int32_t position) {
    const int32_t added = added_[size_t(position)];
    if (added > 0) {
        free_slot(slot_of(int32_t(nodes_.size()) - 1)); // the leaf
        nodes_.pop_back();
    }
    if (added > 1) {
        const int32_t split = int32_t(nodes_.size()) - 1;
        const Node & node = nodes_.back();
        const size_t slot_below = slot_of(split, before(node.first, node.depth));
        const int32_t below = slots_[slot_below];
        free_slot(slot_below);
        slots_[slot_of(split)] = below;
        nodes_[size_t(below)].parent = node.parent;
        nodes_.pop_back();
    }
}

void SuffixIndex::append(int32_t token) {
    reserve();
    const size_t nodes = nodes_.size();
    insert(int32_t(size()), token);
    added_.push_back(uint8_t(nodes_.size() - nodes));
    tokens_.push_back(token);
    end_ = descend();
}

void SuffixIndex::truncate(int64_t size) {
    for (int64_t position = this->size() - 1; position >= size; --position) {
        remove(int32_t(position));
        added_.pop_back();
        tokens_.pop_back();
    }
    end_ = descend();
}

SuffixIndex::Match SuffixIndex::match() const {
    if (end_.depth == 0) {
        return {};
    }
    const Node & node = nodes_[size_t(end_.below >= 0 ? end_.below : end_.node)];
    // After a truncation the recent position may be followed by nothing or by other tokens.
    bool recent = node.recent < size();
    for (int32_t i = 0; recent && i < end_.depth; ++i) {
        recent = before(node.recent, i) == before(size(), i);
    }
    const bool repeated = recent && node.recent != node.first;
    return {end_.depth, recent ? node.recent : node.first, repeated ? node.agreeing : 0};
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

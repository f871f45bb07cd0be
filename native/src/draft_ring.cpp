#include "draft_ring.h"

#include <algorithm>

namespace mtp {

DraftRing::DraftRing(const DraftVocabulary & vocabulary, int32_t n_sequences)
    : list_(vocabulary.ids.end() - vocabulary.n_ring, vocabulary.ids.end()), ids_(list_),
      places_(size_t(vocabulary.n_vocab), NOWHERE), ends_(size_t(n_sequences), 0) {
    for (const int32_t id : vocabulary.ids) {
        places_[size_t(id)] = BEFORE;
    }
    empty();
}

// Begins again with the ids of the list.
void DraftRing::empty() {
    for (const int32_t id : ids_) {
        places_[size_t(id)] = NOWHERE;
    }
    ids_ = list_;
    for (size_t i = 0; i < ids_.size(); ++i) {
        places_[size_t(ids_[i])] = int32_t(i);
    }
    added_.assign(ids_.size(), false);
    additions_.clear();
    std::fill(ends_.begin(), ends_.end(), 0);
}

void DraftRing::add(const Addition & addition) {
    const int32_t token = addition.entry.token;
    if (token < 0 || size_t(token) >= places_.size()) {
        return;
    }
    const int32_t before = places_[size_t(token)];
    if (before == BEFORE || (before >= 0 && added_[size_t(before)])) {
        return;
    }
    const size_t place = ids_.size() - 1 - additions_.size() % ids_.size();
    const int32_t replaced = ids_[place];
    places_[size_t(replaced)] = before;
    if (before >= 0) { // an id of the list that has not been in a text yet
        ids_[size_t(before)] = replaced;
        added_[size_t(before)] = false;
    }
    ids_[place] = token;
    added_[place] = true;
    places_[size_t(token)] = int32_t(place);
    additions_.push_back(addition);
    int64_t & end = ends_[size_t(addition.seq)];
    end = std::max<int64_t>(end, addition.entry.position + 1);
}

void DraftRing::follow(int32_t seq, int64_t first, const int32_t * tokens, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        add({seq, {int32_t(first + i), tokens[i]}});
    }
}

void DraftRing::truncate(int32_t seq, int64_t position) {
    if (ends_[size_t(seq)] <= position) {
        return;
    }
    const std::vector<Addition> before = additions_;
    empty();
    for (const Addition & addition : before) {
        if (addition.seq != seq || addition.entry.position < position) {
            add(addition);
        }
    }
}

std::vector<DraftRing::Entry> DraftRing::save(int32_t seq) const {
    std::vector<Entry> out;
    for (const Addition & addition : additions_) {
        if (addition.seq == seq) {
            out.push_back(addition.entry);
        }
    }
    return out;
}

void DraftRing::restore(int32_t seq, const std::vector<Entry> & entries) {
    truncate(seq, 0);
    for (const Entry & entry : entries) {
        add({seq, entry});
    }
}

} // namespace mtp

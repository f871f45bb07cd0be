#include "draft_ring.h"

#include <algorithm>
#include <cstdint>
#include <iterator>

namespace mtp {

// By how many additions the likeliest tokens are found: so many, and each time half as many more, so that the
// rows of a long text are seldom replaced.
static const size_t FIRST_RANKED = 32;

static size_t n_ranked(size_t n_additions) {
    size_t n = n_additions < FIRST_RANKED ? 0 : FIRST_RANKED;
    while (n > 0 && n + n / 2 <= n_additions) {
        n += n / 2;
    }
    return n;
}

DraftRing::DraftRing(const DraftVocabulary & vocabulary, int32_t n_sequences)
    : n_like_(size_t(vocabulary.n_like)), list_(vocabulary.ids.end() - vocabulary.n_ring, vocabulary.ids.end()),
      sequences_(size_t(n_sequences)), ranked_(list_), ids_(list_), places_(size_t(vocabulary.n_vocab), NOWHERE) {
    for (size_t i = 0; i + list_.size() < vocabulary.ids.size(); ++i) {
        places_[size_t(vocabulary.ids[i])] = BEFORE;
    }
    if (n_like_ > 0) {
        for (size_t id = 0; id < places_.size(); ++id) {
            if (places_[id] != BEFORE) {
                candidates_.push_back(int32_t(id));
            }
        }
        likeness_.emplace(vocabulary.symbols);
    }
    empty();
}

// ---- the texts ----

void DraftRing::add(int32_t seq, const Entry & entry) {
    if (entry.token < 0 || size_t(entry.token) >= places_.size() ||
        (n_like_ == 0 && places_[size_t(entry.token)] == BEFORE)) {
        return;
    }
    Sequence & s = sequences_[size_t(seq)];
    const int32_t index = int32_t(additions_.size());
    const auto [latest, is_new] = s.latest.try_emplace(entry.token, index);
    // What came before so many others may have made room.
    if (!is_new && size_t(index - latest->second) < list_.size() - n_like_) {
        return;
    }
    additions_.push_back({seq, entry, is_new ? -1 : latest->second});
    latest->second = index;
    s.end = std::max<int64_t>(s.end, entry.position + 1);
}

void DraftRing::remove_last() {
    const Addition & last = additions_.back();
    std::unordered_map<int32_t, int32_t> & latest = sequences_[size_t(last.seq)].latest;
    if (last.earlier < 0) {
        latest.erase(last.entry.token);
    } else {
        latest[last.entry.token] = last.earlier;
    }
    additions_.pop_back();
}

void DraftRing::follow(int32_t seq, int64_t first, const int32_t * tokens, int64_t n) {
    for (int64_t i = 0; i < n; ++i) {
        add(seq, {int32_t(first + i), tokens[i]});
    }
}

void DraftRing::truncate(int32_t seq, int64_t position) {
    Sequence & s = sequences_[size_t(seq)];
    if (s.end <= position) {
        return;
    }
    // From the first one to go, all are removed, and the others come again.
    const auto goes = [&](const Addition & one) { return one.seq == seq && one.entry.position >= position; };
    const auto first = std::find_if(additions_.begin(), additions_.end(), goes);
    const std::vector<Addition> after(first, additions_.end());
    const size_t n = additions_.size() - after.size();
    while (additions_.size() > n) {
        remove_last();
    }
    if (n_built_ > n) {
        n_built_ = SIZE_MAX; // what is here has tokens that went
    }
    s.end = position;
    for (const Addition & one : after) {
        if (!goes(one)) {
            add(one.seq, one.entry);
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
        add(seq, entry);
    }
}

// ---- what is made of them ----

// Begins again with the ids before any tokens of a text.
void DraftRing::empty() {
    for (const int32_t id : ids_) {
        places_[size_t(id)] = NOWHERE;
    }
    ids_ = ranked_;
    for (size_t i = 0; i < ids_.size(); ++i) {
        places_[size_t(ids_[i])] = int32_t(i);
    }
    added_.assign(ids_.size(), false);
    n_built_ = n_put_ = 0;
}

// Puts a token in the next of the last places, unless it is in the list to stay or was brought by a text.
void DraftRing::put(int32_t token) {
    const int32_t before = places_[size_t(token)];
    if (before == BEFORE || (before >= 0 && (size_t(before) < n_like_ || added_[size_t(before)]))) {
        return;
    }
    const size_t place = ids_.size() - 1 - n_put_++ % (ids_.size() - n_like_);
    const int32_t replaced = ids_[place];
    places_[size_t(replaced)] = before;
    if (before >= 0) { // an id that no text has had yet
        ids_[size_t(before)] = replaced;
        added_[size_t(before)] = false;
    }
    ids_[place] = token;
    added_[place] = true;
    places_[size_t(token)] = int32_t(place);
}

// Finds the likeliest tokens again if there are other texts or many more tokens. The first n_like_ of them that are in the
// same part of the list stay in their places, so that fewer rows are copied.
bool DraftRing::rank() {
    const size_t n = n_like_ == 0 ? 0 : n_ranked(additions_.size());
    const auto same = [](const Addition & addition, int32_t token) { return addition.entry.token == token; };
    if (n == ranked_by_.size() && std::equal(additions_.begin(), additions_.begin() + std::ptrdiff_t(n), ranked_by_.begin(), same)) {
        return false;
    }
    ranked_by_.clear();
    std::transform(additions_.begin(), additions_.begin() + std::ptrdiff_t(n), std::back_inserter(ranked_by_),
                   [](const Addition & addition) { return addition.entry.token; });
    ranked_ = list_;
    if (n == 0) {
        return true;
    }
    const std::vector<int32_t> best = likeness_->best(ranked_by_, candidates_, list_.size());
    std::vector<bool> stays(places_.size(), false);
    for (size_t i = 0; i < n_like_; ++i) {
        stays[size_t(best[i])] = true;
    }
    std::vector<size_t> free;
    for (size_t i = 0; i < n_like_; ++i) {
        if (stays[size_t(list_[i])]) {
            stays[size_t(list_[i])] = false;
        } else {
            free.push_back(i);
        }
    }
    size_t next = 0;
    for (size_t id = 0; id < stays.size(); ++id) {
        if (stays[id]) {
            ranked_[free[next++]] = int32_t(id);
        }
    }
    std::copy(best.begin() + std::ptrdiff_t(n_like_), best.end(), ranked_.begin() + std::ptrdiff_t(n_like_));
    return true;
}

const std::vector<int32_t> & DraftRing::ids() {
    if (rank() || n_built_ == SIZE_MAX) {
        empty();
    }
    for (; n_built_ < additions_.size(); ++n_built_) {
        put(additions_[n_built_].entry.token);
    }
    return ids_;
}

} // namespace mtp

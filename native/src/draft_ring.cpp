#include "draft_ring.h"

#include <algorithm>

namespace mtp {

// How many tokens of its script come with a token of the text.
static const size_t BROUGHT = 32;

DraftRing::DraftRing(const DraftVocabulary & vocabulary, int32_t n_sequences)
    : list_(vocabulary.ids.end() - vocabulary.n_ring, vocabulary.ids.end()), ids_(list_),
      places_(size_t(vocabulary.n_vocab), NOWHERE), scripts_of_(vocabulary.scripts),
      script_area_{0, size_t(vocabulary.n_script)},
      text_area_{size_t(vocabulary.n_script), size_t(vocabulary.n_ring - vocabulary.n_script)},
      ends_(size_t(n_sequences), 0) {
    for (const int32_t id : vocabulary.ids) {
        places_[size_t(id)] = BEFORE;
    }
    for (size_t id = 0; id < scripts_of_.size(); ++id) {
        if (scripts_of_[id] != 0) {
            scripts_[scripts_of_[id]].tokens.push_back(int32_t(id));
        }
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
    for (auto & [number, script] : scripts_) {
        script.next = script.brought = 0;
    }
    script_area_.count = text_area_.count = 0;
    additions_.clear();
    std::fill(ends_.begin(), ends_.end(), 0);
}

// Whether a token is in the list to stay, or was brought here by a text.
bool DraftRing::has(int32_t token) const {
    const int32_t place = places_[size_t(token)];
    return place == BEFORE || (place >= 0 && added_[size_t(place)]);
}

// Puts a token that is not here yet in the next place of an area.
void DraftRing::put(int32_t token, Area & area) {
    const size_t place = area.first + area.size - 1 - area.count++ % area.size;
    const int32_t replaced = ids_[place];
    const int32_t before = places_[size_t(token)];
    places_[size_t(replaced)] = before;
    if (before >= 0) { // an id of the list that no text has had yet
        ids_[size_t(before)] = replaced;
        added_[size_t(before)] = false;
    }
    ids_[place] = token;
    added_[place] = true;
    places_[size_t(token)] = int32_t(place);
}

// Half of the area is left for another script.
bool DraftRing::is_complete(const Script & script) const {
    return script.next == script.tokens.size() || script.brought >= script_area_.size / 2;
}

void DraftRing::bring(Script & script) {
    for (size_t n = 0; n < BROUGHT && !is_complete(script);) {
        const int32_t token = script.tokens[script.next++];
        if (!has(token)) {
            put(token, script_area_);
            ++script.brought;
            ++n;
        }
    }
}

void DraftRing::add(const Addition & addition) {
    const int32_t token = addition.entry.token;
    if (token < 0 || size_t(token) >= places_.size()) {
        return;
    }
    const auto script = scripts_of_.empty() ? scripts_.end() : scripts_.find(scripts_of_[size_t(token)]);
    const bool brings = script != scripts_.end() && !is_complete(script->second);
    if (has(token) && !brings) {
        return;
    }
    if (!has(token)) {
        put(token, text_area_);
    }
    if (brings) {
        bring(script->second);
    }
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

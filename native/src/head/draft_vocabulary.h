#pragma once
// The draft vocabulary: which tokens a head can draft, and where their rows are stored.
//
// A file without a list gets one when it is loaded, if its vocabulary is large: special tokens, then by id. The last
// ids of a list whose rows are gathered can be replaced while it is in use (draft_ring.h).
//
// All three FastMTP layouts and a head without one are represented in the same way: target ids in rank
// order, with their rows of the output and of the embedding. The graph works with indices into the draft
// vocabulary, which are mapped to target ids at the end. All layers of a head share it; each may have tables of
// its own.

#include "head/gguf_file.h"
#include "head/head_config.h"
#include "head/token_symbols.h"

#include "mtp.h"

#include <cstdint>
#include <vector>

namespace mtp {

// Where the rows of a layer are.
struct DraftTables {
    StoredTensor embedding; // [n_embd, n_vocab]
    StoredTensor output;    // [n_embd, n_vocab], or [n_embd, >= ids] if output_is_short
    bool tied;              // output and embedding are one tensor
};

struct DraftVocabulary {
    mtp_draft_layout layout = MTP_DRAFT_NONE;
    int64_t n_vocab = 0;          // of the target
    std::vector<int32_t> ids;     // target ids in rank order; empty means the identity
    std::vector<int32_t> indices; // the inverse, for index_of(); empty like ids
    int64_t n_ring = 0;           // how many ids at the end can be replaced
    int64_t n_like = 0;           // how many of these, the first ones, by tokens that are like those of a text
    TokenSymbols symbols;         // of the target's tokens; empty if n_like is 0

    std::vector<DraftTables> tables; // of each layer
    bool output_is_short = false;    // row i of an output belongs to ids[i]; else row ids[i] does

    int64_t size() const { return ids.empty() ? n_vocab : int64_t(ids.size()); }
    int32_t target_id(int32_t index) const { return ids.empty() ? index : ids[size_t(index)]; }
    // -1 if the target id is not in it.
    int32_t index_of(int32_t id) const { return ids.empty() ? id : indices[size_t(id)]; }

    // head: the file with the MTP blocks. trunk: the file with token_embd.weight (and the output) if the
    // head's file has none; may be nullptr. layers: one or more. fastmtp_size, n_ring: as in mtp_head_params.
    static DraftVocabulary read(const GgufFile & head, const GgufFile * trunk, const std::vector<HeadConfig> & layers,
                                int32_t fastmtp_size, int32_t n_ring);

    // Replaces the ids from `first` on. None of the new ones is elsewhere in the list.
    void replace(int64_t first, const int32_t * replacements, int64_t n);
};

} // namespace mtp

#pragma once
// Which tokens a head can draft, and where the rows for them come from.
//
// All three FastMTP layouts and the plain head come down to the same thing: target ids in rank
// order, the rows of the output for them, the rows of the embedding for them. The graph works in
// the draft vocabulary's own index space; ids are mapped when they leave.

#include "gguf_file.h"
#include "head_config.h"

#include "mtp.h"

#include <cstdint>
#include <memory>
#include <vector>

namespace mtp {

struct DraftVocabulary {
    mtp_draft_layout layout = MTP_DRAFT_NONE;
    int64_t n_vocab = 0;          // of the target
    std::vector<int32_t> ids;     // target ids in rank order; empty: every id stands for itself

    std::unique_ptr<StoredTensor> embedding; // [n_embd, n_vocab]
    std::unique_ptr<StoredTensor> output;    // [n_embd, n_vocab], or [n_embd, >= ids] where short
    bool output_is_short = false; // row i of `output` belongs to ids[i]; else row ids[i] does
    bool tied = false;            // output and embedding are one tensor

    int64_t size() const { return ids.empty() ? n_vocab : int64_t(ids.size()); }
    int32_t target_id(int32_t index) const { return ids.empty() ? index : ids[size_t(index)]; }

    // head: the file with the MTP block. trunk: where token_embd.weight (and the output) are looked
    // for when the head's file has none; may be nullptr. fastmtp_size: as mtp_head_params has it.
    static DraftVocabulary read(const GgufFile & head, const GgufFile * trunk, const HeadConfig & config,
                                int32_t fastmtp_size);
};

} // namespace mtp

#include "head/draft_vocabulary.h"

#include "error.h"

#include "ggml.h"

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace mtp {

static const char * IDS_KEY = "mtp_gguf.fastmtp.token_ids"; // docs/fastmtp.md
static const char * ID_MAP = "d2t";

// The list of a file without one. Of a smaller vocabulary the whole output costs as little. gguf_tools/heads/fastmtp.py has
// the same numbers.
static const int64_t SMALL_VOCABULARY = 32768;
static const int64_t DEFAULT_SIZE = 32768;

// The default number of ids that can be replaced by tokens of a text; at most a quarter of the list. Three eighths
// of a list that was made can be replaced by others that are like them.
static const int64_t DEFAULT_RING = 2048;

// Checks that all ids are in range and unique. A wrong map causes no error, only an acceptance of zero.
static void check_ids(const GgufFile & file, const char * field, const std::vector<int64_t> & ids,
                      int64_t n_vocab) {
    std::vector<bool> seen(size_t(n_vocab), false);
    for (size_t i = 0; i < ids.size(); ++i) {
        if (ids[i] < 0 || ids[i] >= n_vocab) {
            file.refuse(format("%s[%zu]: expected a token id from 0 to %lld, found %lld", field, i,
                               (long long) n_vocab - 1, (long long) ids[i]));
        }
        if (seen[size_t(ids[i])]) {
            file.refuse(format("%s[%zu]: expected absolute ids, each once, found %lld again", field, i,
                               (long long) ids[i]));
        }
        seen[size_t(ids[i])] = true;
    }
}

static std::vector<int64_t> read_id_map(const GgufFile & file, const StoredTensor & map) {
    if ((map.type != GGML_TYPE_I64 && map.type != GGML_TYPE_I32) || map.ne[1] * map.ne[2] * map.ne[3] != 1) {
        file.refuse(format("%s: expected one dimension of I64, found %s", ID_MAP, describe(map).c_str()));
    }
    std::vector<int64_t> ids(size_t(map.ne[0]));
    for (size_t i = 0; i < ids.size(); ++i) {
        if (map.type == GGML_TYPE_I64) {
            std::memcpy(&ids[i], map.data + i * sizeof(int64_t), sizeof(int64_t));
        } else {
            int32_t id;
            std::memcpy(&id, map.data + i * sizeof(id), sizeof(id));
            ids[i] = id;
        }
    }
    return ids;
}

// A matrix with n_embd columns whose rows can be read as floats.
static void check_rows(const GgufFile & file, const StoredTensor & tensor, int64_t n_embd, int64_t n_rows) {
    const bool shape = tensor.ne[0] == n_embd && tensor.ne[1] >= 1 && tensor.ne[2] == 1 && tensor.ne[3] == 1 &&
                       (n_rows < 0 || tensor.ne[1] == n_rows);
    if (!shape || tensor.ne[1] > INT32_MAX) {
        const std::string rows = n_rows < 0 ? std::string("rows") : std::to_string(n_rows);
        file.refuse(format("%s: expected [%lld, %s], found %s", tensor.name.c_str(), (long long) n_embd,
                           rows.c_str(), describe(tensor).c_str()));
    }
    const ggml_type_traits * traits = ggml_get_type_traits(tensor.type);
    if (tensor.type != GGML_TYPE_F32 && traits->to_float == nullptr) {
        file.refuse(format("%s: expected a type of floats, found %s", tensor.name.c_str(),
                           ggml_type_name(tensor.type)));
    }
}

// A tensor and the file that it is in.
struct Found {
    const GgufFile * file;
    std::unique_ptr<StoredTensor> tensor;
};

// The block's own table, or the model's, or that of the trunk's file; no tensor if there is none.
static Found find_table(const GgufFile & head, const GgufFile * trunk, const std::string & own, const char * model) {
    Found out = {&head, head.find(own)};
    if (!out.tensor) {
        out.tensor = head.find(model);
    }
    if (!out.tensor && trunk != nullptr) {
        out = {trunk, trunk->find(model)};
    }
    return out;
}

static Found find_embedding(const GgufFile & head, const GgufFile * trunk, const HeadConfig & layer) {
    Found out = find_table(head, trunk, layer.name("nextn.embed_tokens.weight"), "token_embd.weight");
    if (!out.tensor) {
        head.refuse("token_embd.weight: expected this tensor here or in the trunk's file, found none");
    }
    check_rows(*out.file, *out.tensor, layer.n_embd, -1);
    return out;
}

// No tensor if the output is tied to the embedding.
static Found find_output(const GgufFile & head, const GgufFile * trunk, const HeadConfig & layer) {
    return find_table(head, trunk, layer.name("nextn.shared_head_head.weight"), "output.weight");
}

// A layer's tables. n_short: rows of an output with only the draft vocabulary, or -1.
static DraftTables find_tables(const GgufFile & head, const GgufFile * trunk, const HeadConfig & layer, int64_t n_short) {
    const Found embedding = find_embedding(head, trunk, layer);
    // A file with the model's embedding has its output, too, or they are tied.
    const bool from_trunk = n_short < 0 && embedding.file == trunk;
    Found output = find_output(head, from_trunk ? trunk : nullptr, layer);
    if (output.tensor) {
        check_rows(*output.file, *output.tensor, layer.n_embd, n_short < 0 ? embedding.tensor->ne[1] : n_short);
        return {*embedding.tensor, *output.tensor, false};
    }
    if (n_short >= 0) {
        head.refuse(format("%s: expected the short output that d2t maps, found no such tensor",
                           layer.name("nextn.shared_head_head.weight").c_str()));
    }
    // Tied to the model's embedding, even if the block has its own.
    const bool own = embedding.tensor->name != "token_embd.weight";
    output = own ? Found{&head, head.find("token_embd.weight")}
                 : Found{embedding.file, std::make_unique<StoredTensor>(*embedding.tensor)};
    if (!output.tensor) {
        head.refuse("output.weight: expected this tensor or token_embd.weight, found neither");
    }
    check_rows(*output.file, *output.tensor, layer.n_embd, embedding.tensor->ne[1]);
    return {*embedding.tensor, *output.tensor, !own};
}

// The ids that a list begins with: of tokens that are not text, and of those that end a turn.
static std::vector<int64_t> special_ids(const GgufFile & file, int64_t n_vocab) {
    std::vector<bool> special(size_t(n_vocab), false);
    const std::string types_key = "tokenizer.ggml.token_type";
    if (file.has_key(types_key)) {
        const std::vector<int32_t> types = file.integers(types_key, SIZE_MAX, INT32_MIN, INT32_MAX);
        for (size_t id = 0; id < std::min(types.size(), special.size()); ++id) {
            special[id] = types[id] == 3 || types[id] == 4; // control, user-defined (enum llama_token_type)
        }
    }
    for (const char * role : {"eos", "eot", "eom"}) {
        const int64_t id = file.integer_or(format("tokenizer.ggml.%s_token_id", role), INT64_MIN, INT64_MAX, -1);
        if (id >= 0 && id < n_vocab) {
            special[size_t(id)] = true;
        }
    }
    std::vector<int64_t> out;
    for (int64_t id = 0; id < n_vocab; ++id) {
        if (special[size_t(id)]) {
            out.push_back(id);
        }
    }
    return out;
}

// The list of a file without one: `size` ids, or as many as special_ids() if those are more; 0 for the default. No ids for a
// small vocabulary, unless a size is given.
static std::vector<int64_t> make_ids(const GgufFile & file, int64_t n_vocab, int64_t size) {
    if (size == 0 && n_vocab < SMALL_VOCABULARY) {
        return {};
    }
    size = size == 0 ? std::min(DEFAULT_SIZE, n_vocab / 4) : size;
    std::vector<int64_t> ids = special_ids(file, n_vocab);
    std::vector<bool> listed(size_t(n_vocab), false);
    for (const int64_t id : ids) {
        listed[size_t(id)] = true;
    }
    for (int64_t id = 0; id < n_vocab && int64_t(ids.size()) < size; ++id) {
        if (!listed[size_t(id)]) {
            ids.push_back(id);
        }
    }
    return ids;
}

DraftVocabulary DraftVocabulary::read(const GgufFile & head, const GgufFile * trunk,
                                      const std::vector<HeadConfig> & layers, int32_t fastmtp_size, int32_t n_ring) {
    DraftVocabulary v;
    v.n_vocab = find_embedding(head, trunk, layers.front()).tensor->ne[1];
    const GgufFile & tokenizer = trunk == nullptr || head.has_key("tokenizer.ggml.tokens") ? head : *trunk;
    std::vector<int64_t> ids;
    if (const std::unique_ptr<StoredTensor> map = head.find(ID_MAP)) {
        ids = read_id_map(head, *map);
        check_ids(head, ID_MAP, ids, v.n_vocab);
        const bool own = head.find(layers.front().name("nextn.shared_head_head.weight")) != nullptr;
        v.layout = own ? MTP_DRAFT_TABLE : MTP_DRAFT_SIDECAR;
        v.output_is_short = true;
    } else {
        const GgufFile * list_file = head.has_key(IDS_KEY) ? &head : trunk;
        if (fastmtp_size >= 0 && list_file != nullptr && list_file->has_key(IDS_KEY)) {
            const std::vector<int32_t> list = list_file->integers(IDS_KEY, size_t(v.n_vocab), 0, v.n_vocab - 1);
            ids.assign(list.begin(), list.end());
            check_ids(*list_file, IDS_KEY, ids, v.n_vocab);
            v.layout = MTP_DRAFT_IDS;
        } else if (fastmtp_size >= 0) {
            if (fastmtp_size >= v.n_vocab) {
                throw Error(MTP_ERROR_ARGUMENT, format("fastmtp_size: expected less than the %lld tokens of the vocabulary, "
                                                       "found %d", (long long) v.n_vocab, fastmtp_size));
            }
            ids = make_ids(tokenizer, v.n_vocab, fastmtp_size);
            v.layout = ids.empty() ? MTP_DRAFT_NONE : MTP_DRAFT_MADE;
        }
    }
    for (const HeadConfig & layer : layers) {
        v.tables.push_back(find_tables(head, trunk, layer, v.output_is_short ? int64_t(ids.size()) : -1));
        const StoredTensor & embedding = v.tables.back().embedding;
        if (embedding.ne[1] != v.n_vocab) {
            head.refuse(format("%s: expected %lld rows, as the first layer's, found %lld", embedding.name.c_str(),
                               (long long) v.n_vocab, (long long) embedding.ne[1]));
        }
    }

    if (fastmtp_size < 0 && v.layout != MTP_DRAFT_NONE) {
        throw Error(MTP_ERROR_ARGUMENT, "fastmtp_size: expected 0 or more, found -1: the file holds only the "
                                        "rows of its draft vocabulary");
    }
    if (fastmtp_size > 0 && v.layout != MTP_DRAFT_MADE) {
        if (size_t(fastmtp_size) > ids.size()) {
            throw Error(MTP_ERROR_ARGUMENT,
                        format("fastmtp_size: expected at most the list's %zu, found %d", ids.size(), fastmtp_size));
        }
        ids.resize(size_t(fastmtp_size));
    }
    v.ids.assign(ids.begin(), ids.end());
    v.indices.assign(v.ids.empty() ? 0 : size_t(v.n_vocab), -1);
    for (size_t i = 0; i < v.ids.size(); ++i) {
        v.indices[size_t(v.ids[i])] = int32_t(i);
    }
    if (!v.ids.empty() && !v.output_is_short && n_ring >= 0) { // else only the rows of the list are there
        v.n_ring = std::min(n_ring == 0 ? DEFAULT_RING : n_ring, v.size() / 4);
        if (v.layout == MTP_DRAFT_MADE && v.n_ring > 0) {
            v.n_like = v.size() * 3 / 8;
            v.n_ring += v.n_like;
            v.symbols = TokenSymbols::read(tokenizer, v.n_vocab);
        }
    }
    return v;
}

void DraftVocabulary::replace(int64_t first, const int32_t * replacements, int64_t n) {
    for (int64_t i = first; i < first + n; ++i) {
        indices[size_t(ids[size_t(i)])] = -1;
    }
    for (int64_t i = 0; i < n; ++i) {
        ids[size_t(first + i)] = replacements[i];
        indices[size_t(replacements[i])] = int32_t(first + i);
    }
}

} // namespace mtp

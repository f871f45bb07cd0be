#include "head/draft_vocabulary.h"

#include "error.h"

#include "ggml.h"

#include <cstring>

namespace mtp {

static const char * IDS_KEY = "mtp_gguf.fastmtp.token_ids"; // docs/fastmtp.md
static const char * ID_MAP = "d2t";

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

DraftVocabulary DraftVocabulary::read(const GgufFile & head, const GgufFile * trunk,
                                      const std::vector<HeadConfig> & layers, int32_t fastmtp_size) {
    DraftVocabulary v;
    v.n_vocab = find_embedding(head, trunk, layers.front()).tensor->ne[1];
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
    if (fastmtp_size > 0) {
        if (v.layout == MTP_DRAFT_NONE) {
            throw Error(MTP_ERROR_ARGUMENT,
                        format("fastmtp_size: expected 0 (%s has no draft vocabulary), found %d",
                               head.path().c_str(), fastmtp_size));
        }
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
    return v;
}

} // namespace mtp

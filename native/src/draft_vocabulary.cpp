#include "draft_vocabulary.h"

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

DraftVocabulary DraftVocabulary::read(const GgufFile & head, const GgufFile * trunk, const HeadConfig & config,
                                      int32_t fastmtp_size) {
    DraftVocabulary v;
    const std::string head_name = config.name("nextn.shared_head_head.weight");

    // The block's own embedding, or the model's, or that of the trunk's file.
    const GgufFile * embedding_file = &head;
    v.embedding = head.find(config.name("nextn.embed_tokens.weight"));
    const bool own_embedding = v.embedding != nullptr;
    if (!v.embedding) {
        v.embedding = head.find("token_embd.weight");
    }
    if (!v.embedding && trunk != nullptr) {
        embedding_file = trunk;
        v.embedding = trunk->find("token_embd.weight");
    }
    if (!v.embedding) {
        head.refuse("token_embd.weight: expected this tensor here or in the trunk's file, found none");
    }
    check_rows(*embedding_file, *v.embedding, config.n_embd, -1);
    v.n_vocab = v.embedding->ne[1];

    std::vector<int64_t> ids;
    const std::unique_ptr<StoredTensor> map = head.find(ID_MAP);
    if (map) {
        ids = read_id_map(head, *map);
        check_ids(head, ID_MAP, ids, v.n_vocab);
        v.output = head.find(head_name);
        v.layout = v.output ? MTP_DRAFT_TABLE : MTP_DRAFT_SIDECAR;
        if (!v.output) {
            v.output = head.find("output.weight");
        }
        if (!v.output) {
            head.refuse(format("%s: expected the short output that d2t maps, found no such tensor",
                               head_name.c_str()));
        }
        check_rows(head, *v.output, config.n_embd, int64_t(ids.size()));
        v.output_is_short = true;
    } else {
        const GgufFile * list_file = head.has_key(IDS_KEY) ? &head : trunk;
        if (fastmtp_size >= 0 && list_file != nullptr && list_file->has_key(IDS_KEY)) {
            const std::vector<int32_t> list = list_file->integers(IDS_KEY, size_t(v.n_vocab), 0, v.n_vocab - 1);
            ids.assign(list.begin(), list.end());
            check_ids(*list_file, IDS_KEY, ids, v.n_vocab);
            v.layout = MTP_DRAFT_IDS;
        }
        const GgufFile * output_file = &head;
        v.output = head.find(head_name);
        if (!v.output) {
            v.output = head.find("output.weight");
        }
        if (!v.output && trunk != nullptr && embedding_file == trunk) {
            output_file = trunk;
            v.output = trunk->find("output.weight");
        }
        if (!v.output) { // tied to the model's embedding, even if the block has its own
            std::unique_ptr<StoredTensor> tied =
                own_embedding ? head.find("token_embd.weight") : std::make_unique<StoredTensor>(*v.embedding);
            if (!tied) {
                head.refuse("output.weight: expected this tensor or token_embd.weight, found neither");
            }
            v.output = std::move(tied);
            v.tied = !own_embedding;
            output_file = embedding_file;
        }
        check_rows(*output_file, *v.output, config.n_embd, v.n_vocab);
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

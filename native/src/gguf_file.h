#pragma once
// A GGUF model, whole or in shards, with every value and tensor checked before it is handed out.

#include "file_map.h"

#include "gguf.h"

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <vector>

namespace mtp {

// A tensor's description and its bytes in the mapped file.
struct StoredTensor {
    std::string name;
    ggml_type type;
    int64_t ne[GGML_MAX_DIMS]; // in ggml's order, 1 beyond the last dimension
    const uint8_t * data;      // inside the mapping, size bytes
    size_t size;

    size_t row_bytes() const;

    // Rows first to first + n of this matrix, which must have them, in place.
    StoredTensor rows(int64_t first, int64_t n) const;
};

class GgufFile {
public:
    // path: of the file, or of the first shard, whose name tells those of the others. Metadata are the
    // first shard's. MTP_ERROR_FILE or MTP_ERROR_FORMAT when a file is missing or not sound.
    explicit GgufFile(const std::string & path);

    const std::string & path() const { return path_; }

    bool has_key(const std::string & key) const;

    // The value of a key, converted from any integer (or float) type of GGUF. MTP_ERROR_FORMAT
    // names key, expectation and finding. An array stands for one value per block: its element at
    // `block` is taken.
    int64_t integer(const std::string & key, int64_t lowest, int64_t highest, int block = -1) const;
    int64_t integer_or(const std::string & key, int64_t lowest, int64_t highest, int64_t otherwise) const;
    float number(const std::string & key) const;
    float number_or(const std::string & key, float otherwise) const;
    std::string text(const std::string & key) const;

    // An array of integers of 4 bytes (signed or not), each within bounds.
    std::vector<int32_t> integers(const std::string & key, size_t most, int64_t lowest, int64_t highest) const;

    // nullptr when the file has no such tensor; MTP_ERROR_FORMAT when it is empty, or when its bytes lie
    // past the end.
    std::unique_ptr<StoredTensor> find(const std::string & name) const;

    // The tensor with exactly this shape (trailing dimensions are 1); `want` describes it in errors.
    StoredTensor get(const std::string & name, std::initializer_list<int64_t> shape) const;

    // Names of all tensors, in file order.
    std::vector<std::string> tensor_names() const;

    // Throws MTP_ERROR_FORMAT: "<path>: <what>".
    [[noreturn]] void refuse(const std::string & what) const;

private:
    struct Free {
        void operator()(gguf_context * context) const { gguf_free(context); }
    };

    struct File {
        explicit File(const std::string & path);

        std::string path;
        FileMap map;
        std::unique_ptr<gguf_context, Free> context;
    };

    // One shard, to be asked about itself.
    explicit GgufFile(std::unique_ptr<File> file) : path_(file->path) { files_.push_back(std::move(file)); }

    int64_t require_key(const std::string & key) const;
    void open_shards(int64_t count);
    const gguf_context * metadata() const { return files_.front()->context.get(); }

    std::string path_;
    std::vector<std::unique_ptr<File>> files_; // one, or the shards in their order
};

// "[1024, 2048] Q4_K"
std::string describe(const StoredTensor & tensor);

} // namespace mtp

#pragma once
// A GGUF model, in one file or in shards. Every value and tensor is checked before it is returned.

#include "file_map.h"

#include "ggml.h"
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

    // A view of rows first .. first + n - 1 of this matrix, which must exist.
    StoredTensor rows(int64_t first, int64_t n) const;
};

class GgufFile {
public:
    // path: the file or the first shard, whose name determines the others. Metadata comes from the first
    // shard. Throws MTP_ERROR_FILE or MTP_ERROR_FORMAT if a file is missing or malformed.
    explicit GgufFile(const std::string & path);

    const std::string & path() const { return path_; }

    bool has_key(const std::string & key) const;

    // The value of a key, converted from any integer (or float) type of GGUF. MTP_ERROR_FORMAT names the
    // key, the expected and the found value. An array has one value per block; `block` selects one.
    int64_t integer(const std::string & key, int64_t lowest, int64_t highest, int block = -1) const;
    int64_t integer_or(const std::string & key, int64_t lowest, int64_t highest, int64_t otherwise) const;
    float number(const std::string & key, int block = -1) const;
    float number_or(const std::string & key, float otherwise, int block = -1) const;
    bool flag_or(const std::string & key, bool otherwise) const;
    // One value of an array with one for each block: a bool, or an integer from 0 to 1.
    bool flag_of(const std::string & key, int block) const;
    std::string text(const std::string & key) const;

    // An array of integers of 4 bytes (signed or not), each within bounds.
    std::vector<int32_t> integers(const std::string & key, size_t most, int64_t lowest, int64_t highest) const;

    // An array of texts, valid as long as this object; empty if there is none under this key.
    std::vector<const char *> texts(const std::string & key) const;

    // Returns nullptr if there is no such tensor; throws MTP_ERROR_FORMAT if it is empty or extends past
    // the end of the file.
    std::unique_ptr<StoredTensor> find(const std::string & name) const;

    // The tensor with exactly this shape (trailing dimensions are 1).
    StoredTensor get(const std::string & name, std::initializer_list<int64_t> shape) const;

    // Names of all tensors, in file order.
    std::vector<std::string> tensor_names() const;

    // Throws MTP_ERROR_FORMAT: "<path>: <what>".
    [[noreturn]] void refuse(const std::string & what) const;

private:
    struct Free {
        void operator()(gguf_context * context) const { gguf_free(context); }
        void operator()(ggml_context * context) const { ggml_free(context); }
    };

    struct File {
        explicit File(const std::string & path);

        std::string path;
        FileMap map;
        std::unique_ptr<gguf_context, Free> context;
        std::unique_ptr<ggml_context, Free> shapes; // its tensors, without data
    };

    // A single shard by itself.
    explicit GgufFile(std::unique_ptr<File> file) : path_(file->path) { files_.push_back(std::move(file)); }

    // A number as it is stored: element `index` of an array of this type.
    struct Number {
        gguf_type type;
        const void * data;
        size_t index;
    };

    int64_t require_key(const std::string & key) const;
    // what: the type that is expected, for messages. block: as for integer().
    Number find_number(const std::string & key, const char * what, int block) const;
    void open_shards(int64_t count);
    const gguf_context * metadata() const { return files_.front()->context.get(); }

    std::string path_;
    std::vector<std::unique_ptr<File>> files_; // one, or the shards in their order
};

// "[1024, 2048] Q4_K"
std::string describe(const StoredTensor & tensor);

} // namespace mtp

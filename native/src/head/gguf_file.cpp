#include "head/gguf_file.h"

#include "error.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <set>

namespace mtp {

size_t StoredTensor::row_bytes() const {
    return ggml_row_size(type, ne[0]);
}

StoredTensor StoredTensor::rows(int64_t first, int64_t n) const {
    StoredTensor part = *this;
    part.ne[1] = n;
    part.data = data + size_t(first) * row_bytes();
    part.size = size_t(n) * row_bytes();
    return part;
}

static std::string shape_text(const int64_t * ne, size_t n) {
    std::string text = "[";
    for (size_t i = 0; i < n; ++i) {
        text += (i ? ", " : "") + std::to_string(ne[i]);
    }
    return text + "]";
}

std::string describe(const StoredTensor & tensor) {
    size_t n = GGML_MAX_DIMS;
    while (n > 1 && tensor.ne[n - 1] == 1) {
        --n;
    }
    return shape_text(tensor.ne, n) + " " + ggml_type_name(tensor.type);
}

GgufFile::File::File(const std::string & path) : path(path), map(path) {
    ggml_context * tensors = nullptr;
    gguf_init_params params = {/*no_alloc*/ true, /*ctx*/ &tensors};
    context.reset(gguf_init_from_file(path.c_str(), params));
    shapes.reset(tensors);
    if (!context) {
        throw Error(MTP_ERROR_FORMAT, path + ": expected a GGUF file, found a file that ggml cannot read");
    }
}

// Keys of split models, as llama-gguf-split writes them.
static const char * SHARD_KEY = "split.no";
static const char * SHARDS_KEY = "split.count";

GgufFile::GgufFile(const std::string & path) : path_(path) {
    files_.push_back(std::make_unique<File>(path));
    const int64_t count = integer_or(SHARDS_KEY, 0, 1 << 16, 0);
    if (count > 1) {
        open_shards(count);
    }
}

void GgufFile::open_shards(int64_t count) {
    const int64_t number = integer_or(SHARD_KEY, 0, 1 << 16, 0);
    if (number != 0) {
        refuse(format("expected the first shard, found number %lld of %lld; give the first one's name",
                      (long long) number + 1, (long long) count));
    }
    const std::string ending = format("-00001-of-%05lld.gguf", (long long) count);
    if (path_.size() < ending.size() || path_.compare(path_.size() - ending.size(), ending.size(), ending) != 0) {
        refuse(format("expected a name that ends in %s, by which the other shards are found", ending.c_str()));
    }
    const std::string stem = path_.substr(0, path_.size() - ending.size());
    std::set<std::string> seen;
    const auto add_names = [&](const GgufFile & shard) {
        for (const std::string & name : shard.tensor_names()) {
            if (!seen.insert(name).second) {
                shard.refuse(name + ": expected each tensor in one shard, found it again");
            }
        }
    };
    add_names(*this);
    for (int64_t i = 1; i < count; ++i) {
        const std::string path = stem + format("-%05lld-of-%05lld.gguf", (long long) i + 1, (long long) count);
        GgufFile shard(std::make_unique<File>(path));
        const int64_t found = shard.integer_or(SHARD_KEY, 0, 1 << 16, 0);
        const int64_t of = shard.integer_or(SHARDS_KEY, 0, 1 << 16, 0);
        if (found != i || of != count) {
            shard.refuse(format("expected shard %lld of %lld, found %lld of %lld", (long long) i + 1, (long long) count,
                                (long long) found + 1, (long long) of));
        }
        add_names(shard);
        files_.push_back(std::move(shard.files_.front()));
    }
}

void GgufFile::refuse(const std::string & what) const {
    throw Error(MTP_ERROR_FORMAT, path_ + ": " + what);
}

bool GgufFile::has_key(const std::string & key) const {
    return gguf_find_key(metadata(), key.c_str()) >= 0;
}

int64_t GgufFile::require_key(const std::string & key) const {
    const int64_t id = gguf_find_key(metadata(), key.c_str());
    if (id < 0) {
        refuse(key + ": expected this key, found none");
    }
    return id;
}

// Reads one integer of any GGUF integer type; returns false for other types.
static bool read_integer(gguf_type type, const void * data, size_t index, int64_t & out) {
    const char * at = static_cast<const char *>(data);
    auto take = [&](auto sample) {
        std::memcpy(&sample, at + index * sizeof(sample), sizeof(sample));
        out = int64_t(sample);
        return true;
    };
    switch (type) {
        case GGUF_TYPE_UINT8:  return take(uint8_t());
        case GGUF_TYPE_INT8:   return take(int8_t());
        case GGUF_TYPE_UINT16: return take(uint16_t());
        case GGUF_TYPE_INT16:  return take(int16_t());
        case GGUF_TYPE_UINT32: return take(uint32_t());
        case GGUF_TYPE_INT32:  return take(int32_t());
        case GGUF_TYPE_UINT64: {
            uint64_t value;
            std::memcpy(&value, at + index * sizeof(value), sizeof(value));
            out = value > uint64_t(INT64_MAX) ? INT64_MAX : int64_t(value); // above every limit used here
            return true;
        }
        case GGUF_TYPE_INT64: return take(int64_t());
        default:              return false;
    }
}

GgufFile::Number GgufFile::find_number(const std::string & key, const char * what, int block) const {
    const int64_t id = require_key(key);
    const gguf_type type = gguf_get_kv_type(metadata(), id);
    if (type == GGUF_TYPE_ARRAY && block >= 0) {
        const gguf_type kind = gguf_get_arr_type(metadata(), id);
        const size_t n = gguf_get_arr_n(metadata(), id);
        if (kind == GGUF_TYPE_STRING || size_t(block) >= n) {
            refuse(format("%s: expected %s for block %d, found %zu values of %s", key.c_str(), what, block, n,
                          gguf_type_name(kind)));
        }
        return {kind, gguf_get_arr_data(metadata(), id), size_t(block)};
    }
    if (type == GGUF_TYPE_ARRAY || type == GGUF_TYPE_STRING) {
        refuse(format("%s: expected %s, found %s", key.c_str(), what, gguf_type_name(type)));
    }
    return {type, gguf_get_val_data(metadata(), id), 0};
}

int64_t GgufFile::integer(const std::string & key, int64_t lowest, int64_t highest, int block) const {
    const Number found = find_number(key, "an integer", block);
    int64_t value = 0;
    if (!read_integer(found.type, found.data, found.index, value)) {
        refuse(format("%s: expected an integer, found %s", key.c_str(), gguf_type_name(found.type)));
    }
    if (value < lowest || value > highest) {
        refuse(format("%s: expected %lld to %lld, found %lld", key.c_str(), (long long) lowest,
                      (long long) highest, (long long) value));
    }
    return value;
}

int64_t GgufFile::integer_or(const std::string & key, int64_t lowest, int64_t highest,
                             int64_t otherwise) const {
    return has_key(key) ? integer(key, lowest, highest) : otherwise;
}

float GgufFile::number(const std::string & key, int block) const {
    const Number found = find_number(key, "a float", block);
    float value = 0;
    if (found.type == GGUF_TYPE_FLOAT32) {
        value = static_cast<const float *>(found.data)[found.index];
    } else if (found.type == GGUF_TYPE_FLOAT64) {
        value = float(static_cast<const double *>(found.data)[found.index]);
    } else {
        refuse(format("%s: expected a float, found %s", key.c_str(), gguf_type_name(found.type)));
    }
    if (!std::isfinite(value)) {
        refuse(format("%s: expected a finite number, found %g", key.c_str(), double(value)));
    }
    return value;
}

float GgufFile::number_or(const std::string & key, float otherwise, int block) const {
    return has_key(key) ? number(key, block) : otherwise;
}

bool GgufFile::flag_or(const std::string & key, bool otherwise) const {
    if (!has_key(key)) {
        return otherwise;
    }
    const int64_t id = require_key(key);
    const gguf_type type = gguf_get_kv_type(metadata(), id);
    if (type != GGUF_TYPE_BOOL) {
        refuse(format("%s: expected true or false, found %s", key.c_str(), gguf_type_name(type)));
    }
    return gguf_get_val_bool(metadata(), id);
}

bool GgufFile::flag_of(const std::string & key, int block) const {
    const Number found = find_number(key, "true or false", block);
    if (found.type == GGUF_TYPE_BOOL) {
        return static_cast<const int8_t *>(found.data)[found.index] != 0;
    }
    return integer(key, 0, 1, block) != 0;
}

std::string GgufFile::text(const std::string & key) const {
    const int64_t id = require_key(key);
    const gguf_type type = gguf_get_kv_type(metadata(), id);
    if (type != GGUF_TYPE_STRING) {
        refuse(format("%s: expected a string, found %s", key.c_str(), gguf_type_name(type)));
    }
    return gguf_get_val_str(metadata(), id);
}

std::vector<int32_t> GgufFile::integers(const std::string & key, size_t most, int64_t lowest,
                                        int64_t highest) const {
    const int64_t id = require_key(key);
    const gguf_type kind = gguf_get_kv_type(metadata(), id);
    if (kind != GGUF_TYPE_ARRAY) {
        refuse(format("%s: expected an array, found %s", key.c_str(), gguf_type_name(kind)));
    }
    const gguf_type type = gguf_get_arr_type(metadata(), id);
    const size_t n = gguf_get_arr_n(metadata(), id);
    if ((type != GGUF_TYPE_UINT32 && type != GGUF_TYPE_INT32) || n == 0 || n > most) {
        refuse(format("%s: expected 1 to %zu integers of 32 bits, found %zu of %s", key.c_str(), most, n,
                      gguf_type_name(type)));
    }
    const void * data = gguf_get_arr_data(metadata(), id);
    std::vector<int32_t> out(n);
    for (size_t i = 0; i < n; ++i) {
        int64_t value = 0;
        read_integer(type, data, i, value);
        if (value < lowest || value > highest) {
            refuse(format("%s[%zu]: expected %lld to %lld, found %lld", key.c_str(), i, (long long) lowest,
                          (long long) highest, (long long) value));
        }
        out[i] = int32_t(value);
    }
    return out;
}

std::vector<const char *> GgufFile::texts(const std::string & key) const {
    const int64_t id = gguf_find_key(metadata(), key.c_str());
    if (id < 0 || gguf_get_kv_type(metadata(), id) != GGUF_TYPE_ARRAY ||
        gguf_get_arr_type(metadata(), id) != GGUF_TYPE_STRING) {
        return {};
    }
    std::vector<const char *> out(gguf_get_arr_n(metadata(), id));
    for (size_t i = 0; i < out.size(); ++i) {
        out[i] = gguf_get_arr_str(metadata(), id, i);
    }
    return out;
}

std::unique_ptr<StoredTensor> GgufFile::find(const std::string & name) const {
    for (const std::unique_ptr<File> & file : files_) {
        const gguf_context * context = file->context.get();
        const int64_t id = gguf_find_tensor(context, name.c_str());
        if (id < 0) {
            continue;
        }
        auto out = std::make_unique<StoredTensor>();
        out->name = name;
        out->type = gguf_get_tensor_type(context, id);
        std::copy_n(ggml_get_tensor(file->shapes.get(), name.c_str())->ne, GGML_MAX_DIMS, out->ne);
        if (std::find(out->ne, out->ne + GGML_MAX_DIMS, 0) != out->ne + GGML_MAX_DIMS) {
            throw Error(MTP_ERROR_FORMAT, format("%s: %s: expected dimensions from 1, found %s",
                                                 file->path.c_str(), name.c_str(), describe(*out).c_str()));
        }
        out->size = gguf_get_tensor_size(context, id);
        const size_t start = gguf_get_data_offset(context);
        const size_t offset = gguf_get_tensor_offset(context, id);
        const size_t end = file->map.size();
        // Written so that no sum can wrap around.
        if (start > end || offset > end - start || out->size > end - start - offset) {
            throw Error(MTP_ERROR_FORMAT,
                        format("%s: %s: expected %zu bytes at %zu + %zu, found the end of the file at %zu",
                               file->path.c_str(), name.c_str(), out->size, start, offset, end));
        }
        out->data = file->map.data() + start + offset;
        return out;
    }
    return nullptr;
}

StoredTensor GgufFile::get(const std::string & name, std::initializer_list<int64_t> shape) const {
    const std::unique_ptr<StoredTensor> found = find(name);
    const std::string want = shape_text(shape.begin(), shape.size());
    if (!found) {
        refuse(name + ": expected " + want + ", found no such tensor");
    }
    size_t i = 0;
    bool fits = true;
    for (const int64_t n : shape) {
        fits = fits && found->ne[i++] == n;
    }
    for (; i < GGML_MAX_DIMS; ++i) {
        fits = fits && found->ne[i] == 1;
    }
    if (!fits) {
        refuse(name + ": expected " + want + ", found " + describe(*found));
    }
    return *found;
}

std::vector<std::string> GgufFile::tensor_names() const {
    std::vector<std::string> names;
    for (const std::unique_ptr<File> & file : files_) {
        for (int64_t i = 0; i < gguf_get_n_tensors(file->context.get()); ++i) {
            names.emplace_back(gguf_get_tensor_name(file->context.get(), i));
        }
    }
    return names;
}

} // namespace mtp

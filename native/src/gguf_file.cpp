#include "gguf_file.h"

#include "error.h"

#include "ggml.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace mtp {

size_t StoredTensor::row_bytes() const {
    return ggml_row_size(type, ne[0]);
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

GgufFile::GgufFile(const std::string & path) : path_(path), map_(path) {
    gguf_init_params params = {/*no_alloc*/ true, /*ctx*/ nullptr};
    context_.reset(gguf_init_from_file(path.c_str(), params));
    if (!context_) {
        refuse("expected a GGUF file, found none that ggml can read");
    }
}

void GgufFile::refuse(const std::string & what) const {
    throw Error(MTP_ERROR_FORMAT, path_ + ": " + what);
}

bool GgufFile::has_key(const std::string & key) const {
    return gguf_find_key(context_.get(), key.c_str()) >= 0;
}

int64_t GgufFile::require_key(const std::string & key) const {
    const int64_t id = gguf_find_key(context_.get(), key.c_str());
    if (id < 0) {
        refuse(key + ": expected this key, found none");
    }
    return id;
}

// Reads one integer of any of GGUF's types; false when the type is none.
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
            out = value > uint64_t(INT64_MAX) ? INT64_MAX : int64_t(value); // out of any bound we set
            return true;
        }
        case GGUF_TYPE_INT64: return take(int64_t());
        default:              return false;
    }
}

int64_t GgufFile::integer(const std::string & key, int64_t lowest, int64_t highest, int block) const {
    const int64_t id = require_key(key);
    gguf_type type = gguf_get_kv_type(context_.get(), id);
    size_t index = 0;
    const void * data;
    if (type == GGUF_TYPE_ARRAY && block >= 0) {
        type = gguf_get_arr_type(context_.get(), id);
        const size_t n = gguf_get_arr_n(context_.get(), id);
        index = size_t(block);
        if (type == GGUF_TYPE_STRING || index >= n) {
            refuse(format("%s: expected an integer for block %d, found %zu values of %s", key.c_str(),
                          block, n, gguf_type_name(type)));
        }
        data = gguf_get_arr_data(context_.get(), id);
    } else if (type == GGUF_TYPE_ARRAY || type == GGUF_TYPE_STRING) {
        refuse(format("%s: expected an integer, found %s", key.c_str(), gguf_type_name(type)));
    } else {
        data = gguf_get_val_data(context_.get(), id);
    }
    int64_t value = 0;
    if (!read_integer(type, data, index, value)) {
        refuse(format("%s: expected an integer, found %s", key.c_str(), gguf_type_name(type)));
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

float GgufFile::number(const std::string & key) const {
    const int64_t id = require_key(key);
    const gguf_type type = gguf_get_kv_type(context_.get(), id);
    float value = 0;
    if (type == GGUF_TYPE_FLOAT32) {
        value = gguf_get_val_f32(context_.get(), id);
    } else if (type == GGUF_TYPE_FLOAT64) {
        value = float(gguf_get_val_f64(context_.get(), id));
    } else {
        refuse(format("%s: expected a float, found %s", key.c_str(), gguf_type_name(type)));
    }
    if (!std::isfinite(value)) {
        refuse(format("%s: expected a finite number, found %g", key.c_str(), double(value)));
    }
    return value;
}

float GgufFile::number_or(const std::string & key, float otherwise) const {
    return has_key(key) ? number(key) : otherwise;
}

std::string GgufFile::text(const std::string & key) const {
    const int64_t id = require_key(key);
    const gguf_type type = gguf_get_kv_type(context_.get(), id);
    if (type != GGUF_TYPE_STRING) {
        refuse(format("%s: expected a string, found %s", key.c_str(), gguf_type_name(type)));
    }
    return gguf_get_val_str(context_.get(), id);
}

std::vector<int32_t> GgufFile::integers(const std::string & key, size_t most, int64_t lowest,
                                        int64_t highest) const {
    const int64_t id = require_key(key);
    const gguf_type kind = gguf_get_kv_type(context_.get(), id);
    if (kind != GGUF_TYPE_ARRAY) {
        refuse(format("%s: expected an array, found %s", key.c_str(), gguf_type_name(kind)));
    }
    const gguf_type type = gguf_get_arr_type(context_.get(), id);
    const size_t n = gguf_get_arr_n(context_.get(), id);
    if ((type != GGUF_TYPE_UINT32 && type != GGUF_TYPE_INT32) || n == 0 || n > most) {
        refuse(format("%s: expected 1 to %zu integers of 32 bits, found %zu of %s", key.c_str(), most, n,
                      gguf_type_name(type)));
    }
    const void * data = gguf_get_arr_data(context_.get(), id);
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

std::unique_ptr<StoredTensor> GgufFile::find(const std::string & name) const {
    const int64_t id = gguf_find_tensor(context_.get(), name.c_str());
    if (id < 0) {
        return nullptr;
    }
    auto out = std::make_unique<StoredTensor>();
    out->name = name;
    out->type = gguf_get_tensor_type(context_.get(), id);
    std::copy_n(gguf_get_tensor_ne(context_.get(), id), GGML_MAX_DIMS, out->ne);
    out->size = gguf_get_tensor_size(context_.get(), id);
    const size_t start = gguf_get_data_offset(context_.get());
    const size_t offset = gguf_get_tensor_offset(context_.get(), id);
    // Written so that no sum can wrap around.
    if (start > map_.size() || offset > map_.size() - start || out->size > map_.size() - start - offset) {
        refuse(format("%s: expected %zu bytes at %zu + %zu, found the end of the file at %zu", name.c_str(),
                      out->size, start, offset, map_.size()));
    }
    out->data = map_.data() + start + offset;
    return out;
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
    for (int64_t i = 0; i < gguf_get_n_tensors(context_.get()); ++i) {
        names.emplace_back(gguf_get_tensor_name(context_.get(), i));
    }
    return names;
}

} // namespace mtp

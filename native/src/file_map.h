#pragma once
// A file that is mapped read-only as a whole. Paths are UTF-8, on Windows, too.

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>

namespace mtp {

class FileMap {
public:
    // Throws MTP_ERROR_FILE with the path and the system's reason.
    explicit FileMap(const std::string & path);
    ~FileMap();
    FileMap(const FileMap &) = delete;
    FileMap & operator=(const FileMap &) = delete;

    const uint8_t * data() const { return data_; }
    size_t size() const { return size_; }

private:
    const uint8_t * data_ = nullptr;
    size_t size_ = 0;
};

// As std::fopen(path, "wb"); null with errno set if it fails.
std::FILE * open_for_writing(const std::string & path);

} // namespace mtp

#pragma once
// Files that are mapped read-only as a whole, or read in parts. Paths are UTF-8, on Windows, too.

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

// A file that is read in parts: unlike a map of it, one that others shorten meanwhile does not end the process.
class InputFile {
public:
    // Throws MTP_ERROR_FILE with the path and the system's reason.
    explicit InputFile(const std::string & path);
    ~InputFile();
    InputFile(const InputFile &) = delete;
    InputFile & operator=(const InputFile &) = delete;

    uint64_t size() const { return size_; }

    // Reads n bytes; MTP_ERROR_FORMAT if the file ends before.
    void read(uint64_t offset, void * out, size_t n) const;

private:
    std::string path_;
    uint64_t size_ = 0;
#ifdef _WIN32
    void * file_ = nullptr;
#else
    int file_ = -1;
#endif
};

// As std::fopen(path, "wb"); null with errno set if it fails.
std::FILE * open_for_writing(const std::string & path);

} // namespace mtp

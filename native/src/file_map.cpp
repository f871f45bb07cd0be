#include "file_map.h"

#include "error.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace mtp {

[[noreturn]] static void fail(const std::string & path, const char * what) {
    throw Error(MTP_ERROR_FILE, format("%s: cannot be %s: %s", path.c_str(), what, std::strerror(errno)));
}

FileMap::FileMap(const std::string & path) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); // never waits for a pipe's other end
    if (file < 0) {
        fail(path, "opened");
    }
    struct stat about;
    if (fstat(file, &about) != 0) {
        close(file);
        fail(path, "read");
    }
    if (!S_ISREG(about.st_mode) || about.st_size <= 0) {
        close(file);
        throw Error(MTP_ERROR_FILE, format("%s: expected a file with content, found none", path.c_str()));
    }
    size_ = size_t(about.st_size);
    void * address = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    const int reason = errno;
    close(file); // the mapping stays
    if (address == MAP_FAILED) {
        errno = reason;
        fail(path, "mapped");
    }
    data_ = static_cast<const uint8_t *>(address);
}

FileMap::~FileMap() {
    munmap(const_cast<uint8_t *>(data_), size_);
}

} // namespace mtp

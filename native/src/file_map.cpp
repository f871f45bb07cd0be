#include "file_map.h"

#include "error.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace mtp {

static const size_t MOST_READ = 1 << 30; // in one call; some systems take no more than 2 GiB

[[noreturn]] static void fail(const std::string & path, const char * what, const std::string & reason) {
    throw Error(MTP_ERROR_FILE, format("%s: cannot be %s: %s", path.c_str(), what, reason.c_str()));
}

[[noreturn]] static void fail_short(const std::string & path, uint64_t end) {
    throw Error(MTP_ERROR_FORMAT, format("%s: expected bytes after %llu, found the end; the file changed", path.c_str(),
                                         (unsigned long long) end));
}

[[noreturn]] static void fail_empty(const std::string & path) {
    throw Error(MTP_ERROR_FILE, format("%s: expected a file with content, found none", path.c_str()));
}

#ifdef _WIN32

static std::wstring wide(const std::string & utf8) {
    std::wstring result(size_t(MultiByteToWideChar(CP_UTF8, 0, utf8.data(), int(utf8.size()), nullptr, 0)), L'\0');
    MultiByteToWideChar(CP_UTF8, 0, utf8.data(), int(utf8.size()), result.data(), int(result.size()));
    return result;
}

static std::string reason_of(DWORD error) {
    char text[256] = "";
    const DWORD flags = FORMAT_MESSAGE_FROM_SYSTEM | FORMAT_MESSAGE_IGNORE_INSERTS;
    DWORD n = FormatMessageA(flags, nullptr, error, 0, text, sizeof(text), nullptr);
    while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == '\r' || text[n - 1] == '.')) {
        --n;
    }
    return n > 0 ? std::string(text, n) : format("error %lu", static_cast<unsigned long>(error));
}

// Opens a regular file that is not empty.
static HANDLE open_regular(const std::string & path, uint64_t & size) {
    const DWORD share = FILE_SHARE_READ | FILE_SHARE_WRITE | FILE_SHARE_DELETE;
    const HANDLE file = CreateFileW(wide(path).c_str(), GENERIC_READ, share, nullptr, OPEN_EXISTING, 0, nullptr);
    if (file == INVALID_HANDLE_VALUE) {
        fail(path, "opened", reason_of(GetLastError()));
    }
    LARGE_INTEGER found = {};
    if (GetFileType(file) != FILE_TYPE_DISK || !GetFileSizeEx(file, &found) || found.QuadPart <= 0) {
        CloseHandle(file);
        fail_empty(path);
    }
    size = uint64_t(found.QuadPart);
    return file;
}

FileMap::FileMap(const std::string & path) {
    uint64_t size = 0;
    const HANDLE file = open_regular(path, size);
    size_ = size_t(size);
    const HANDLE mapping = CreateFileMappingW(file, nullptr, PAGE_READONLY, 0, 0, nullptr);
    void * address = mapping ? MapViewOfFile(mapping, FILE_MAP_READ, 0, 0, 0) : nullptr;
    const DWORD error = GetLastError();
    if (mapping) {
        CloseHandle(mapping); // the view stays
    }
    CloseHandle(file);
    if (!address) {
        fail(path, "mapped", reason_of(error));
    }
    data_ = static_cast<const uint8_t *>(address);
}

FileMap::~FileMap() {
    UnmapViewOfFile(data_);
}

InputFile::~InputFile() {
    CloseHandle(file_);
}

void InputFile::read(uint64_t offset, void * out, size_t n) const {
    for (size_t done = 0; done < n;) {
        OVERLAPPED at = {};
        at.Offset = DWORD(offset + done);
        at.OffsetHigh = DWORD((offset + done) >> 32);
        DWORD count = 0;
        const size_t most = n - done < MOST_READ ? n - done : MOST_READ;
        if (!ReadFile(file_, static_cast<char *>(out) + done, DWORD(most), &count, &at) &&
            GetLastError() != ERROR_HANDLE_EOF) {
            fail(path_, "read", reason_of(GetLastError()));
        }
        if (count == 0) {
            fail_short(path_, offset + done);
        }
        done += count;
    }
}

std::FILE * open_for_writing(const std::string & path) {
    return _wfopen(wide(path).c_str(), L"wb");
}

#else

// Opens a regular file that is not empty, and never waits for a pipe's other end.
static int open_regular(const std::string & path, uint64_t & size) {
    const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0) {
        fail(path, "opened", std::strerror(errno));
    }
    struct stat about;
    if (fstat(file, &about) != 0) {
        const int error = errno;
        close(file);
        fail(path, "read", std::strerror(error));
    }
    if (!S_ISREG(about.st_mode) || about.st_size <= 0) {
        close(file);
        fail_empty(path);
    }
    size = uint64_t(about.st_size);
    return file;
}

FileMap::FileMap(const std::string & path) {
    uint64_t size = 0;
    const int file = open_regular(path, size);
    size_ = size_t(size);
    void * address = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
    const int error = errno;
    close(file); // the mapping stays
    if (address == MAP_FAILED) {
        fail(path, "mapped", std::strerror(error));
    }
    data_ = static_cast<const uint8_t *>(address);
}

FileMap::~FileMap() {
    munmap(const_cast<uint8_t *>(data_), size_);
}

InputFile::~InputFile() {
    close(file_);
}

void InputFile::read(uint64_t offset, void * out, size_t n) const {
    for (size_t done = 0; done < n;) {
        const size_t most = n - done < MOST_READ ? n - done : MOST_READ;
        const ssize_t count = pread(file_, static_cast<char *>(out) + done, most, off_t(offset + done));
        if (count < 0 && errno != EINTR) {
            fail(path_, "read", std::strerror(errno));
        }
        if (count == 0) {
            fail_short(path_, offset + done);
        }
        done += count > 0 ? size_t(count) : 0;
    }
}

std::FILE * open_for_writing(const std::string & path) {
    return std::fopen(path.c_str(), "wb");
}

#endif

InputFile::InputFile(const std::string & path) : path_(path) {
    file_ = open_regular(path, size_);
}

} // namespace mtp

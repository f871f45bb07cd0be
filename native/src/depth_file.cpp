// The file: u64 of the letters "MTPDEPTH", u32 CRC-32 of what follows; u64 machine, u64 fingerprint of the head, then what
// Depth::save gives.

#include "depth_file.h"

#include "bytes.h"
#include "crc32.h"

#include <exception>
#include <filesystem>
#include <fstream>
#include <random>
#include <vector>

namespace mtp {

namespace {

namespace fs = std::filesystem;

constexpr uint64_t kMagic = 0x485450454450544d; // little-endian
constexpr size_t kMostBytes = 256 << 10;        // twice what Depth::save gives at most

} // namespace

void read_depth_file(const std::string & path, uint64_t machine, uint64_t head, Depth & depth) {
    try {
        const fs::path at = fs::u8path(path);
        if (!fs::is_regular_file(at)) { // opening a pipe would wait for its writer
            return;
        }
        std::vector<uint8_t> bytes(kMostBytes);
        std::ifstream file(at, std::ios::binary);
        file.read(reinterpret_cast<char *>(bytes.data()), std::streamsize(bytes.size()));
        BoundedReader in("depth file", bytes.data(), size_t(file.gcount()));
        if (in.take<uint64_t>("magic") != kMagic || in.take<uint32_t>("checksum") != crc32(in.at(), in.left())) {
            return;
        }
        const bool same_machine = in.take<uint64_t>("machine") == machine;
        if (in.take<uint64_t>("head") == head) {
            depth.restore(in, same_machine);
            depth.probe_soon();
        }
    } catch (const std::exception &) {
        // of another version, or no memory
    }
}

void write_depth_file(const std::string & path, uint64_t machine, uint64_t head, const Depth & depth) {
    try {
        std::vector<uint8_t> body;
        put(body, machine);
        put(body, head);
        const std::vector<uint8_t> learned = depth.save();
        body.insert(body.end(), learned.begin(), learned.end());
        std::vector<uint8_t> bytes;
        put(bytes, kMagic);
        put(bytes, crc32(body.data(), body.size()));
        bytes.insert(bytes.end(), body.begin(), body.end());

        const fs::path to = fs::u8path(path);
        const fs::path part = fs::u8path(path + "." + std::to_string(std::random_device()()) + ".part");
        if (to.has_parent_path()) {
            fs::create_directories(to.parent_path());
        }
        std::ofstream file(part, std::ios::binary);
        file.write(reinterpret_cast<const char *>(bytes.data()), std::streamsize(bytes.size()));
        file.close();
        std::error_code none;
        if (file) {
            fs::rename(part, to, none);
        }
        fs::remove(part, none); // if it could not be written, or renamed
    } catch (const std::exception &) {
        // a folder that cannot be written, or no memory
    }
}

} // namespace mtp

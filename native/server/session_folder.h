#pragma once
// Conversations of llama-server as files of a folder (--session-dir): what its prompt cache keeps of one in memory, in the
// container that docs/sessions.md describes, with the section `slot` in place of `checkpoint`. patches/ includes this file
// in tools/server. Several servers may share a folder; each file is written under another name and renamed.
//
// The section `tokens` has server_tokens::serialize(); `slot` has, each with its number of bytes before it, the states of
// the target, the draft context and the drafter, and then of each context checkpoint three numbers and its three states.

#include "../src/fingerprint.h"
#include "server-task.h"
#include "speculative.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#if defined(__linux__)
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace mtp {

class SessionFolder {
public:
    // The folder of --session-dir, of up to --session-size MiB. Throws if it cannot be created, or if other options exclude it.
    SessionFolder(const common_params & params, llama_context * ctx, bool has_media)
        : folder_(std::filesystem::u8path(params.session_dir)), limit_((uint64_t) params.session_size << 20), identity_(identity_of(params).dump()),
          ctx_(ctx), n_ctx_(llama_n_ctx_seq(ctx)), has_media_(has_media) {
        if (params.cache_ram_mib == 0) {
            throw std::runtime_error("sessions come from the prompt cache in memory, which --cache-ram 0 switches off");
        }
        if (!params.lora_adapters.empty() || !params.control_vectors.empty()) {
            throw std::runtime_error("sessions do not record LoRA adapters and control vectors, which change what is computed");
        }
        if (std::filesystem::create_directories(folder_)) {
            std::filesystem::permissions(folder_, std::filesystem::perms::owner_all);
        }
        remove_leftovers();
        scan();
        SRV_INF("sessions: %zu of this model in %s\n", known_.size(), params.session_dir.c_str());
        writer_ = std::thread([this] { write_all(); });
    }

    // Writes what is left to write.
    ~SessionFolder() {
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            ends_ = true;
        }
        changed_.notify_all();
        writer_.join();
    }

    // Has a copy of a conversation written, by another thread, unless a file has exactly these tokens.
    void save(const server_prompt_cache_state & state) {
        const size_t n_tokens = state.prompt.tokens.size();
        if (failed_ || n_tokens < least_tokens) {
            return;
        }
        try {
            std::unique_lock<std::mutex> lock(mutex_);
            scan();
            for (const auto & item : known_) {
                if (item.second.tokens.size() == n_tokens && item.second.tokens.get_common_prefix(state.prompt.tokens) == n_tokens) {
                    touch(item.first);
                    return;
                }
            }
            // a copy takes as much memory as the cache's: wait while there are two
            changed_.wait(lock, [this] { return waiting_.size() < 2; });
            waiting_.push_back({ state.prompt.tokens.clone(), pack(state) });
        } catch (const std::exception & error) {
            SRV_WRN("a session of %zu tokens is not written: %s\n", n_tokens, error.what());
        }
        changed_.notify_all();
    }

    // Adds the file that saves `tokens` the most work to the cache, if that is more than `prompt` and the cache's states do,
    // by the rule of server_prompt_cache::load.
    void find(server_prompt_cache & cache, const server_prompt & prompt, const server_tokens & tokens) {
        const auto shares = [&tokens](const server_tokens & of) {
            const float common = (float) of.get_common_prefix(tokens);
            return std::pair<float, float>(common / std::max<size_t>(1, of.size()), common / std::max<size_t>(1, tokens.size()));
        };
        auto best = shares(prompt.tokens);
        for (const auto & state : cache.states) {
            const auto other = shares(state.prompt.tokens);
            if (other.first >= 0.25f && other.first > best.first && other.second > best.second) {
                best = other;
            }
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        scan();
        std::string name;
        for (const auto & item : known_) {
            const auto other = shares(item.second.tokens);
            if (item.second.tokens.size() <= n_ctx_ && other.first >= 0.25f && other.first > best.first && other.second > best.second) {
                best = other;
                name = item.first;
            }
        }
        if (name.empty()) {
            return;
        }
        const int64_t t_start = ggml_time_us();
        server_prompt_cache_state state;
        try {
            state = read(name);
        } catch (const std::exception & error) {
            SRV_WRN("session %s is not used: %s\n", name.c_str(), error.what());
            known_.erase(name);
            damaged_.insert(name);
            return;
        }
        touch(name);
        SRV_INF("restored a session of %zu tokens in %.1f ms\n", state.prompt.tokens.size(), (ggml_time_us() - t_start) / 1000.0);
        cache.states.push_back(std::move(state));
    }

private:
    static constexpr size_t least_tokens = 256; // fewer are read as fast as a file
    static constexpr size_t alignment    = 64;
    static constexpr size_t prefix_size  = 32;
    static constexpr char   magic[8]     = { 'm', 't', 'p', 's', 'e', 's', 's', 0 };

    struct Known {
        std::filesystem::file_time_type time;
        server_tokens                   tokens;
    };

    struct Waiting {
        server_tokens        tokens;
        std::vector<uint8_t> slot;
    };

    struct Section {
        uint64_t offset;
        uint64_t nbytes;
        uint32_t checksum;
    };

    struct Header {
        std::string identity; // as JSON
        int64_t     n_tokens;
        Section     tokens, slot;
    };

    // CRC-32 as zlib computes it, eight bytes at a time.
    static uint32_t crc32(const void * data, size_t size, uint32_t crc = 0) {
        static const auto table = [] {
            std::array<std::array<uint32_t, 256>, 8> of = {};
            for (uint32_t i = 0; i < 256; i++) {
                uint32_t x = i;
                for (int bit = 0; bit < 8; bit++) {
                    x = x >> 1 ^ (x & 1 ? 0xedb88320u : 0);
                }
                of[0][i] = x;
            }
            for (uint32_t i = 0; i < 256; i++) {
                for (int k = 1; k < 8; k++) {
                    of[k][i] = of[k - 1][i] >> 8 ^ of[0][of[k - 1][i] & 255];
                }
            }
            return of;
        }();
        const uint8_t * p = (const uint8_t *) data;
        crc = ~crc;
        for (; size >= 8; size -= 8, p += 8) {
            uint32_t low, high;
            memcpy(&low, p, 4);
            memcpy(&high, p + 4, 4);
            low ^= crc;
            crc = table[7][low & 255] ^ table[6][low >> 8 & 255] ^ table[5][low >> 16 & 255] ^ table[4][low >> 24] ^
                  table[3][high & 255] ^ table[2][high >> 8 & 255] ^ table[1][high >> 16 & 255] ^ table[0][high >> 24];
        }
        for (; size > 0; size--, p++) {
            crc = crc >> 8 ^ table[0][(crc ^ *p) & 255];
        }
        return ~crc;
    }

    // What must be equal for a session to fit: the files, by their sizes and samples of their bytes, and what states depend on.
    static json identity_of(const common_params & params) {
        const auto file = [](const std::string & path) {
            if (path.empty()) {
                return json(nullptr);
            }
            constexpr uint64_t samples = 64, sample_size = 64 << 10;
            const uint64_t size = std::filesystem::file_size(std::filesystem::u8path(path));
            std::ifstream from(std::filesystem::u8path(path), std::ios::binary);
            std::vector<char> sample(std::min(size, sample_size));
            Fingerprint fingerprint;
            for (uint64_t i = 0; i < samples; i++) {
                from.seekg((std::streamoff) ((size - sample.size()) / (samples - 1) * i));
                from.read(sample.data(), (std::streamsize) sample.size());
                fingerprint.add(sample.data(), sample.size());
            }
            char samples_hash[17];
            snprintf(samples_hash, sizeof(samples_hash), "%016llx", (unsigned long long) fingerprint.value());
            return json::object({ { "nbytes", size }, { "samples", samples_hash } });
        };
        const auto & spec = params.speculative;
        std::string types;
        for (const auto type : spec.types) {
            types += (types.empty() ? "" : ",") + common_speculative_type_to_str(type);
        }
        return json::object({
            { "program", "llama-server" },
            { "model", file(params.model.path) },
            { "mmproj", file(params.mmproj.path) },
            { "draft", file(spec.draft.mparams.path) },
            { "speculative", json::array({ types, spec.draft.fused, spec.draft.n_vocab, spec.need_n_rs_seq() }) },
            { "cache_types", json::array({ ggml_type_name(params.cache_type_k), ggml_type_name(params.cache_type_v) }) },
            { "flash_attention", (int) params.flash_attn_type },
            { "swa_full", params.swa_full },
            { "rope", json::array({ (int) params.rope_scaling_type, params.rope_freq_base, params.rope_freq_scale }) },
            { "yarn", json::array({ params.yarn_ext_factor, params.yarn_attn_factor, params.yarn_beta_fast, params.yarn_beta_slow,
                                    params.yarn_orig_ctx }) },
        });
    }

    static uint64_t aligned(uint64_t offset) { return (offset + alignment - 1) / alignment * alignment; }

    // The slot section ----------------------------------------------------------------------------------------------------

    static void put(std::vector<uint8_t> & to, const void * data, size_t size) {
        to.insert(to.end(), (const uint8_t *) data, (const uint8_t *) data + size);
    }
    static void put_bytes(std::vector<uint8_t> & to, const std::vector<uint8_t> & data) {
        const uint64_t size = data.size();
        put(to, &size, sizeof(size));
        put(to, data.data(), data.size());
    }

    static std::vector<uint8_t> pack(const server_prompt_cache_state & state) {
        std::vector<uint8_t> to;
        to.reserve(state.size() + 64 * (2 + state.prompt.checkpoints.size()));
        put_bytes(to, state.data.main);
        put_bytes(to, state.data.drft);
        put_bytes(to, state.data.spec);
        for (const auto & at : state.prompt.checkpoints) {
            const int64_t numbers[3] = { at.n_tokens, at.pos_min, at.pos_max };
            put(to, numbers, sizeof(numbers));
            put_bytes(to, at.data_tgt);
            put_bytes(to, at.data_dft);
            put_bytes(to, at.data_spec);
        }
        return to;
    }

    struct Reader {
        const uint8_t * p;
        const uint8_t * end;

        void take(void * to, size_t size) {
            if ((size_t) (end - p) < size) {
                throw std::runtime_error("slot: expected more bytes, found its end");
            }
            memcpy(to, p, size);
            p += size;
        }
        std::vector<uint8_t> bytes() {
            uint64_t size = 0;
            take(&size, sizeof(size));
            if (size > (uint64_t) (end - p)) {
                throw std::runtime_error("slot: expected more bytes, found its end");
            }
            std::vector<uint8_t> found(p, p + size);
            p += size;
            return found;
        }
    };

    static void unpack(const std::vector<uint8_t> & slot, server_prompt_cache_state & to) {
        Reader reader = { slot.data(), slot.data() + slot.size() };
        to.data.main = reader.bytes();
        to.data.drft = reader.bytes();
        to.data.spec = reader.bytes();
        while (reader.p < reader.end) {
            int64_t numbers[3];
            reader.take(numbers, sizeof(numbers));
            common_prompt_checkpoint at;
            at.update_pos(numbers[0], (llama_pos) numbers[1], (llama_pos) numbers[2]);
            at.data_tgt  = reader.bytes();
            at.data_dft  = reader.bytes();
            at.data_spec = reader.bytes();
            if (at.n_tokens < 0 || at.n_tokens > (int64_t) to.prompt.tokens.size()) {
                throw std::runtime_error("slot: expected a checkpoint within the tokens, found another");
            }
            to.prompt.checkpoints.push_back(std::move(at));
        }
    }

    // Files ---------------------------------------------------------------------------------------------------------------

    static Header read_header(std::ifstream & file, uint64_t size) {
        char     prefix[prefix_size];
        uint64_t numbers[2];
        uint32_t version, checksum;
        if (!file.read(prefix, sizeof(prefix)) || memcmp(prefix, magic, sizeof(magic))) {
            throw std::runtime_error("expected a session file, found other data");
        }
        memcpy(&version, prefix + 8, 4);
        memcpy(&checksum, prefix + 12, 4);
        memcpy(numbers, prefix + 16, 16);
        if (version != 1 || numbers[1] != size || numbers[0] > std::min<uint64_t>(size - prefix_size, 64 << 20)) {
            throw std::runtime_error("expected version 1 and its size in bytes, found others");
        }
        std::string text(numbers[0], 0);
        memset(prefix + 12, 0, 4);
        if (!file.read(&text[0], text.size()) || crc32(text.data(), text.size(), crc32(prefix, sizeof(prefix))) != checksum) {
            throw std::runtime_error("header: expected another checksum");
        }
        const json fields = json::parse(text);
        const json & sections = fields.at("sections");
        if (sections.size() != 2 || sections.at(0).at("name") != "tokens" || sections.at(1).at("name") != "slot") {
            throw std::runtime_error("expected the session of a llama-server, found another");
        }
        const auto section = [&](size_t i) {
            const auto number = [&](const char * name) { return sections.at(i).at(name).get<uint64_t>(); };
            const Section found = { number("offset"), number("nbytes"), (uint32_t) number("checksum") };
            if (found.nbytes > size || found.offset > size - found.nbytes) {
                throw std::runtime_error("expected sections within the file, found others");
            }
            return found;
        };
        return { fields.at("identity").dump(), fields.at("n_tokens").get<int64_t>(), section(0), section(1) };
    }

    static std::vector<uint8_t> read_section(std::ifstream & file, const Section & section) {
        std::vector<uint8_t> data(section.nbytes);
        file.seekg((std::streamoff) section.offset);
        if (!file.read((char *) data.data(), (std::streamsize) data.size()) || crc32(data.data(), data.size()) != section.checksum) {
            throw std::runtime_error("expected another checksum; the file is damaged");
        }
        return data;
    }

    server_tokens read_tokens(std::ifstream & file, const Header & header) const {
        const auto data = read_section(file, header.tokens);
        llama_tokens packed(data.size() / sizeof(llama_token));
        memcpy(packed.data(), data.data(), packed.size() * sizeof(llama_token));
        server_tokens tokens = server_tokens::deserialize(packed, has_media_);
        if ((int64_t) tokens.size() != header.n_tokens || tokens.empty() || !tokens.validate(ctx_)) {
            throw std::runtime_error("tokens: expected those of this model, found others");
        }
        return tokens;
    }

    server_prompt_cache_state read(const std::string & name) const {
        std::ifstream file(folder_ / name, std::ios::binary);
        const Header header = read_header(file, std::filesystem::file_size(folder_ / name));
        server_prompt_cache_state state;
        state.prompt.tokens = read_tokens(file, header);
        unpack(read_section(file, header.slot), state);
        return state;
    }

    // What is in the folder; less where it cannot be read.
    std::vector<std::filesystem::directory_entry> entries() const {
        std::vector<std::filesystem::directory_entry> found;
        std::error_code error;
        for (std::filesystem::directory_iterator at(folder_, error), end; !error && at != end; at.increment(error)) {
            found.push_back(*at);
        }
        return found;
    }

    // Looks for files of this model that appeared or vanished. Called with the mutex.
    void scan() {
        std::map<std::string, Known> now;
        for (const auto & entry : entries()) {
            const std::string name = entry.path().filename().u8string();
            std::error_code gone;
            const auto time = entry.last_write_time(gone);
            if (gone || entry.path().extension() != ".session" || name[0] == '.' || damaged_.count(name)) {
                continue;
            }
            const auto before = known_.find(name);
            if (before != known_.end() && before->second.time == time) {
                now.emplace(name, std::move(before->second));
                continue;
            }
            try {
                std::ifstream file(entry.path(), std::ios::binary);
                const Header header = read_header(file, entry.file_size());
                if (header.identity == identity_) {
                    now.emplace(name, Known { time, read_tokens(file, header) });
                }
            } catch (const std::exception &) {
                // of another program, damaged, or gone
            }
        }
        known_ = std::move(now);
    }

    void touch(const std::string & name) const {
        std::error_code error;
        std::filesystem::last_write_time(folder_ / name, std::filesystem::file_time_type::clock::now(), error);
    }

    // Of a server that was killed while it wrote.
    void remove_leftovers() const {
        for (const auto & entry : entries()) {
            std::error_code error;
            const auto age = std::filesystem::file_time_type::clock::now() - entry.last_write_time(error);
            if (!error && entry.path().extension() == ".part" && age > std::chrono::hours(1)) {
                std::filesystem::remove(entry.path(), error);
            }
        }
    }

    // Writing -------------------------------------------------------------------------------------------------------------

    void write_all() {
#if defined(__linux__)
        setpriority(PRIO_PROCESS, (id_t) syscall(SYS_gettid), 19); // the CPUs are for tokens
#endif
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return ends_ || !waiting_.empty(); });
            if (waiting_.empty()) {
                return;
            }
            const Waiting & next = waiting_.front();
            lock.unlock();
            try {
                write(next);
            } catch (const std::exception & error) {
                SRV_WRN("sessions are no longer written: %s\n", error.what());
                failed_ = true;
            }
            lock.lock();
            waiting_.pop_front();
            changed_.notify_all();
        }
    }

    void write(const Waiting & session) {
        if (failed_) {
            return;
        }
        const std::vector<char> tokens = session.tokens.serialize();
        json fields = json::object({ { "n_tokens", session.tokens.size() }, { "identity", json::parse(identity_) }, { "extra", json::object() } });
        // offsets are part of the text, whose length they depend on: leave room for them
        const uint64_t first  = aligned(prefix_size + fields.dump().size() + 512);
        const uint64_t second = aligned(first + tokens.size());
        const uint64_t size   = second + session.slot.size();
        if (size > limit_) {
            return;
        }
        const auto section = [](const char * name, uint64_t offset, const void * data, size_t nbytes) {
            return json::object({ { "name", name }, { "offset", offset }, { "nbytes", nbytes }, { "checksum", crc32(data, nbytes) } });
        };
        fields["sections"] = json::array({ section("tokens", first, tokens.data(), tokens.size()), section("slot", second, session.slot.data(), session.slot.size()) });
        std::string text = fields.dump();
        text.resize(first - prefix_size, ' ');

        char prefix[prefix_size] = {};
        const uint32_t version    = 1;
        const uint64_t numbers[2] = { text.size(), size };
        memcpy(prefix, magic, sizeof(magic));
        memcpy(prefix + 8, &version, 4);
        memcpy(prefix + 16, numbers, 16);
        const uint32_t checksum = crc32(text.data(), text.size(), crc32(prefix, sizeof(prefix)));
        memcpy(prefix + 12, &checksum, 4);

        char name[32];
        snprintf(name, sizeof(name), "server-%08x%08x", crc32(tokens.data(), tokens.size()), crc32(text.data(), text.size()));
        make_room(size);
        const auto part = folder_ / ("." + std::string(name) + "-" + std::to_string((uint64_t) ggml_time_us()) + ".part");
        try {
            std::ofstream file;
            file.exceptions(std::ios::failbit | std::ios::badbit);
            file.open(part, std::ios::binary);
            std::error_code error;
            std::filesystem::permissions(part, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write, error);
            file.write(prefix, sizeof(prefix));
            file.write(text.data(), (std::streamsize) text.size());
            file.write(tokens.data(), (std::streamsize) tokens.size());
            file.seekp((std::streamoff) second);
            file.write((const char *) session.slot.data(), (std::streamsize) session.slot.size());
            file.close();
            std::filesystem::rename(part, folder_ / (std::string(name) + ".session"));
        } catch (...) {
            std::error_code error;
            std::filesystem::remove(part, error);
            throw;
        }
        remove_beginnings(session.tokens);
    }

    // Removes the sessions that were not used for the longest time, of any model, until `size` bytes fit.
    void make_room(uint64_t size) const {
        struct File {
            std::filesystem::file_time_type time;
            uint64_t                        size;
            std::filesystem::path           path;
        };
        std::vector<File> files;
        uint64_t all = size;
        for (const auto & entry : entries()) {
            std::error_code gone;
            const File file = { entry.last_write_time(gone), entry.file_size(gone), entry.path() };
            if (!gone && file.path.extension() == ".session") {
                files.push_back(file);
                all += file.size;
            }
        }
        std::sort(files.begin(), files.end(), [](const File & a, const File & b) { return a.time < b.time; });
        for (const File & file : files) {
            if (all <= limit_) {
                return;
            }
            std::error_code error;
            std::filesystem::remove(file.path, error);
            all -= file.size;
        }
    }

    // Removes the files whose conversations `tokens` continues.
    void remove_beginnings(const server_tokens & tokens) {
        const std::lock_guard<std::mutex> lock(mutex_);
        scan();
        for (auto item = known_.begin(); item != known_.end();) {
            const size_t size = item->second.tokens.size();
            if (size < tokens.size() && item->second.tokens.get_common_prefix(tokens) == size) {
                std::error_code error;
                std::filesystem::remove(folder_ / item->first, error);
                item = known_.erase(item);
            } else {
                ++item;
            }
        }
    }

    const std::filesystem::path  folder_;
    const uint64_t               limit_;
    const std::string            identity_; // as JSON
    llama_context * const        ctx_;
    const size_t                 n_ctx_;
    const bool                   has_media_;

    std::map<std::string, Known> known_;   // of this model, by their names
    std::set<std::string>        damaged_;
    std::deque<Waiting>          waiting_; // to be written, the first one at the moment
    bool                         ends_ = false;
    std::atomic<bool>            failed_{ false };
    std::mutex                   mutex_;   // of the four above
    std::condition_variable      changed_; // waiting_ or ends_
    std::thread                  writer_;
};

} // namespace mtp

#pragma once
// Conversations of llama-server as files of a folder (--session-dir): what its prompt cache keeps of one in memory, in the
// container that docs/sessions.md describes, with the section `slot` in place of `checkpoint`. patches/ includes this file
// in tools/server. Several servers may share a folder; each file is written under another name and renamed.
//
// The section `tokens` has server_tokens::serialize(); slot_state.h describes `slot`. With several API keys, the field `owner`
// of `extra` tells whose conversation it is (api_key.h), as 16 hexadecimal digits.

#include "../src/fingerprint.h"
#include "server-task.h"
#include "slot_state.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#if !defined(_WIN32)
#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sys/resource.h>
#include <sys/syscall.h>
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
            if (count_saved(state.prompt.tokens) == n_tokens) {
                return;
            }
            // a copy takes as much memory as the cache's: wait while there are two
            changed_.wait(lock, [this] { return waiting_.size() < 2; });
            waiting_.push_back({ state.prompt.clone(), state.data });
        } catch (const std::exception & error) {
            SRV_WRN("a session of %zu tokens is not written: %s\n", n_tokens, error.what());
        }
        changed_.notify_all();
    }

    // Has an idle slot's conversation written, so that a server that is killed loses only what came after. Called between
    // batches and about once a second. One that is new is written after `idle_us`, one that grew by a share of itself after as
    // many times that: what is written stays in proportion to what is not read again. Copying takes a share of the time.
    template <typename Slots>
    void save_idle(const Slots & slots) {
        decodes_ = std::any_of(slots.begin(), slots.end(), [](const auto & slot) { return slot.is_processing(); });
        const int64_t now = ggml_time_us();
        if (failed_ || now < next_copy_us_) {
            return;
        }
        for (const auto & slot : slots) {
            const size_t n_tokens = slot.prompt.tokens.size();
            if (slot.is_processing() || n_tokens < least_tokens) {
                continue;
            }
            try {
                std::unique_lock<std::mutex> lock(mutex_);
                if (!waiting_.empty()) {
                    return;
                }
                Idle & idle = idle_[slot.id];
                if (idle.since != slot.t_last_used || idle.n_tokens != n_tokens) {
                    idle = { slot.t_last_used, n_tokens, count_saved(slot.prompt.tokens) };
                }
                const size_t n_new = n_tokens - idle.n_saved;
                if (n_new == 0 || double(now - idle.since) * n_new < double(idle_us) * n_tokens) {
                    continue;
                }
                lock.unlock();
                server_prompt_cache_state state;
                const bool copied = copy_slot(slot, state);
                lock.lock();
                idle.n_saved = n_tokens; // also if it cannot be copied
                if (copied) {
                    waiting_.push_back(std::move(state));
                }
            } catch (const std::exception & error) {
                SRV_WRN("a session of %zu tokens is not written: %s\n", n_tokens, error.what());
            }
            const int64_t copied_us = ggml_time_us();
            next_copy_us_ = copied_us + copy_share * (copied_us - now);
            changed_.notify_all();
            return;
        }
    }

    // Whether a request for `tokens` should look for more than the `prompt` of its slot has of them: then what the slot has
    // and the request has not is saved first.
    bool pays(const server_prompt & prompt, const server_tokens & tokens) {
        const size_t common = prompt.tokens.get_common_prefix(tokens);
        if (prompt.tokens.size() - common >= least_tokens) {
            return true;
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        return tokens.size() - common >= least_tokens && !find_better(shares(prompt.tokens, tokens), tokens).empty();
    }

    // Adds the file that saves `tokens` the most work to the cache, if that is more than `prompt` and the cache's states do,
    // and clears `prompt`, so that server_prompt_cache::load takes it.
    void find(server_prompt_cache & cache, server_prompt & prompt, const server_tokens & tokens) {
        auto best = shares(prompt.tokens, tokens);
        for (const auto & state : cache.states) {
            const auto other = shares(state.prompt.tokens, tokens);
            if (other.first >= least_share && other.first > best.first && other.second > best.second) {
                best = other;
            }
        }
        const std::lock_guard<std::mutex> lock(mutex_);
        const std::string name = find_better(best, tokens);
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
        cache.states.push_front(std::move(state)); // before those that are as good
        prompt.clear();
    }

private:
    static constexpr size_t  least_tokens = 256;       // fewer are read as fast as a file
    static constexpr float   least_share  = 0.25f;     // of a conversation, which is not restored for less
    static constexpr int64_t idle_us      = 2'000'000; // until a new conversation is written
    static constexpr int64_t copy_share   = 50;        // times the time of a copy until the next one
    static constexpr int64_t write_share  = 150;       // times the CPU time of writing a piece until the next one
    static constexpr size_t  piece_size   = 1 << 20;
    static constexpr size_t alignment    = 64;
    static constexpr size_t prefix_size  = 32;
    static constexpr char   magic[8]     = { 'm', 't', 'p', 's', 'e', 's', 's', 0 };

    struct Known {
        std::filesystem::file_time_type time;
        server_tokens                   tokens;
    };

    // What is known of a slot since it was last used.
    struct Idle {
        int64_t since    = -1;
        size_t  n_tokens = 0;
        size_t  n_saved  = 0; // of them, in a file or about to be
    };

    struct Section {
        uint64_t offset;
        uint64_t nbytes;
        uint32_t checksum;
    };

    struct Header {
        std::string identity; // as JSON
        uint64_t    owner;
        int64_t     n_tokens;
        Section     tokens, slot;
    };

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
        const auto value = [](const llama_model_kv_override & of) {
            switch (of.tag) {
                case LLAMA_KV_OVERRIDE_TYPE_INT:   return json(of.val_i64);
                case LLAMA_KV_OVERRIDE_TYPE_FLOAT: return json(of.val_f64);
                case LLAMA_KV_OVERRIDE_TYPE_BOOL:  return json(of.val_bool);
                case LLAMA_KV_OVERRIDE_TYPE_STR:   return json(of.val_str);
            }
            return json(nullptr);
        };
        std::map<std::string, json> overrides; // llama.cpp uses the first of several for a key
        for (const auto & of : params.kv_overrides) {
            if (of.key[0]) { // the last one has none
                overrides.emplace(of.key, value(of));
            }
        }
        std::string types;
        for (const auto type : spec.types) {
            types += (types.empty() ? "" : ",") + common_speculative_type_to_str(type);
        }
        json identity = json::object({
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
            { "overrides", json::object() },
        });
        for (const auto & item : overrides) {
            identity["overrides"][item.first] = item.second;
        }
        return identity;
    }

    static uint64_t aligned(uint64_t offset) { return (offset + alignment - 1) / alignment * alignment; }

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
        const json &      extra = fields.at("extra");
        const std::string owner = extra.contains("owner") ? extra.at("owner").get<std::string>() : "0";
        return { fields.at("identity").dump(), std::stoull(owner, nullptr, 16), fields.at("n_tokens").get<int64_t>(), section(0), section(1) };
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
        tokens.owner = header.owner;
        return tokens;
    }

    server_prompt_cache_state read(const std::string & name) const {
        std::ifstream file(folder_ / name, std::ios::binary);
        const Header header = read_header(file, std::filesystem::file_size(folder_ / name));
        server_prompt_cache_state state;
        state.prompt.tokens = read_tokens(file, header);
        unpack_slot(read_section(file, header.slot), state);
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

    // The most tokens of a conversation that a file has, which is then noted as used. Called with the mutex.
    size_t count_saved(const server_tokens & tokens) {
        scan();
        size_t      most = 0;
        std::string name;
        for (const auto & item : known_) {
            const size_t size = item.second.tokens.size();
            if (size > most && size <= tokens.size() && item.second.tokens.get_common_prefix(tokens) == size) {
                most = size;
                name = item.first;
            }
        }
        if (most == tokens.size()) {
            touch(name);
        }
        return most;
    }

    // The shares of a conversation and of `tokens` that both have.
    static std::pair<float, float> shares(const server_tokens & of, const server_tokens & tokens) {
        const float common = (float) of.get_common_prefix(tokens);
        return { common / std::max<size_t>(1, of.size()), common / std::max<size_t>(1, tokens.size()) };
    }

    // The file that has more of `tokens` than `best`, and no less of itself, the most of all; "" if there is none. Called with
    // the mutex.
    std::string find_better(std::pair<float, float> best, const server_tokens & tokens) {
        scan();
        std::string name;
        for (const auto & item : known_) {
            const auto other = shares(item.second.tokens, tokens);
            if (item.second.tokens.size() <= n_ctx_ && other.first >= std::max(least_share, best.first) && other.second > best.second) {
                best = other;
                name = item.first;
            }
        }
        return name;
    }

    void touch(const std::string & name) const {
        std::error_code error;
        std::filesystem::last_write_time(folder_ / name, std::filesystem::file_time_type::clock::now(), error);
    }

    // A lock on an unfinished file, which ends with the process that writes it. Without locks, on Windows and some file
    // systems, nobody has it.
    struct WriterLock {
        int  fd   = -1;
        bool held = false;

        explicit WriterLock(const std::filesystem::path & part) {
#if !defined(_WIN32)
            fd   = open(part.c_str(), O_RDWR | O_CLOEXEC);
            held = fd >= 0 && flock(fd, LOCK_EX | LOCK_NB) == 0;
#else
            (void) part;
#endif
        }
        ~WriterLock() {
#if !defined(_WIN32)
            if (fd >= 0) {
                close(fd);
            }
#endif
        }
        WriterLock(const WriterLock &) = delete;
    };

    // Of servers that were killed while they wrote, and not of one that writes: it may be about to lock the file.
    void remove_leftovers() const {
        for (const auto & entry : entries()) {
            std::error_code error;
            const auto age = std::filesystem::file_time_type::clock::now() - entry.last_write_time(error);
            if (error || entry.path().extension() != ".part") {
                continue;
            }
            if (age > std::chrono::minutes(10) || (age > std::chrono::seconds(1) && WriterLock(entry.path()).held)) {
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
            const server_prompt_cache_state & next = waiting_.front();
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

    void write(const server_prompt_cache_state & session) {
        if (failed_) {
            return;
        }
        const std::vector<char> tokens = session.prompt.tokens.serialize();
        uint64_t slot_size     = 0;
        uint32_t slot_checksum = 0;
        pack_slot(session, [&](const void * data, size_t size) {
            slot_size += size;
            slot_checksum = crc32(data, size, slot_checksum);
        });
        json extra = json::object();
        if (session.prompt.tokens.owner != 0) {
            char owner[17];
            snprintf(owner, sizeof(owner), "%016llx", (unsigned long long) session.prompt.tokens.owner);
            extra["owner"] = owner;
        }
        json fields = json::object({ { "n_tokens", session.prompt.tokens.size() }, { "identity", json::parse(identity_) }, { "extra", extra } });
        // offsets are part of the text, whose length they depend on: leave room for them
        const uint64_t first  = aligned(prefix_size + fields.dump().size() + 512);
        const uint64_t second = aligned(first + tokens.size());
        const uint64_t size   = second + slot_size;
        if (size > limit_) {
            return;
        }
        const auto section = [](const char * name, uint64_t offset, uint64_t nbytes, uint32_t checksum) {
            return json::object({ { "name", name }, { "offset", offset }, { "nbytes", nbytes }, { "checksum", checksum } });
        };
        fields["sections"] = json::array({ section("tokens", first, tokens.size(), crc32(tokens.data(), tokens.size())),
                                           section("slot", second, slot_size, slot_checksum) });
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
        if (!make_room(size)) {
            SRV_INF("%s", "sessions: unfinished files leave no room for another one\n");
            return;
        }
        const auto part = folder_ / ("." + std::string(name) + "-" + std::to_string((uint64_t) ggml_time_us()) + ".part");
        try {
            std::ofstream file;
            file.exceptions(std::ios::failbit | std::ios::badbit);
            file.open(part, std::ios::binary);
            const WriterLock lock(part);
            std::error_code error;
            std::filesystem::permissions(part, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write, error);
            file.write(prefix, sizeof(prefix));
            file.write(text.data(), (std::streamsize) text.size());
            file.write(tokens.data(), (std::streamsize) tokens.size());
            file.seekp((std::streamoff) second);
            Work work;
            pack_slot(session, [&](const void * data, size_t size) { write_pieces(file, (const char *) data, size, work); });
            file.close();
            std::filesystem::rename(part, folder_ / (std::string(name) + ".session"));
        } catch (...) {
            std::error_code error;
            std::filesystem::remove(part, error);
            throw;
        }
        remove_beginnings(session.prompt.tokens);
    }

    // What a thread has done since its last rest.
    struct Work {
        size_t  n_written = 0;
        int64_t began_us  = cpu_time_us();
    };

    // CPU time of this thread: waiting for a disk, or for a CPU, takes none.
    static int64_t cpu_time_us() {
#if defined(_WIN32)
        return ggml_time_us();
#else
        timespec time;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
        return int64_t(time.tv_sec) * 1'000'000 + time.tv_nsec / 1000;
#endif
    }

    // Rests after each piece while slots decode: within a system call, a thread of low priority does not make way for theirs.
    // Not if the server ends or waits for this thread.
    void write_pieces(std::ofstream & file, const char * data, size_t size, Work & work) {
        for (size_t begin = 0; begin < size; begin += piece_size) {
            const size_t n = std::min(piece_size, size - begin);
            file.write(data + begin, (std::streamsize) n);
            work.n_written += n;
            if (work.n_written < piece_size) {
                continue;
            }
            const auto rest = std::chrono::microseconds(write_share * (cpu_time_us() - work.began_us));
            {
                std::unique_lock<std::mutex> lock(mutex_);
                changed_.wait_for(lock, rest, [this] { return ends_ || waiting_.size() >= 2 || !decodes_; });
            }
            work = Work();
        }
    }

    // Removes the sessions that were not used for the longest time, of any model, until `size` bytes fit. Unfinished files
    // count, too; false if these leave no room.
    bool make_room(uint64_t size) const {
        remove_leftovers();
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
            if (gone || (file.path.extension() != ".session" && file.path.extension() != ".part")) {
                continue;
            }
            all += file.size;
            if (file.path.extension() == ".session") {
                files.push_back(file);
            }
        }
        std::sort(files.begin(), files.end(), [](const File & a, const File & b) { return a.time < b.time; });
        for (const File & file : files) {
            if (all <= limit_) {
                break;
            }
            std::error_code error;
            std::filesystem::remove(file.path, error);
            all -= file.size;
        }
        return all <= limit_;
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
    std::deque<server_prompt_cache_state> waiting_; // to be written, the first one at the moment
    bool                         ends_ = false;
    std::atomic<bool>            failed_{ false };
    std::atomic<bool>            decodes_{ false }; // any slot, after the last batch
    std::mutex                   mutex_;   // of known_, damaged_, waiting_ and ends_
    std::condition_variable      changed_; // waiting_ or ends_
    std::thread                  writer_;

    std::map<int, Idle>          idle_; // slots by their ids; these two are of the thread that decodes
    int64_t                      next_copy_us_ = 0;
};

} // namespace mtp

// The opaque folder of server-task.h.
struct mtp_session_folder : mtp::SessionFolder {
    using mtp::SessionFolder::SessionFolder;
};

#pragma once
// Conversations of llama-server as files of a folder (--session-dir): what its prompt cache keeps of one in memory, in session
// files (../src/session_file.h). patches/ includes this file in tools/server. Several servers may share a folder; each file is
// written under another name and renamed.
//
// The section `tokens` has server_tokens::serialize(); slot_state.h describes `slot`. With several API keys, the header's owner
// is the one whose conversation it is (api_key.h).

#include "../include/mtp.h"
#include "../src/crc32.h"
#include "../src/fingerprint.h"
#include "../src/session_fields.h"
#include "server-task.h"
#include "slot_state.h"
#include "speculative_fields.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <cstdlib>
#include <ctime>
#include <deque>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <type_traits>
#include <unordered_map>
#include <vector>

#if !defined(_WIN32)
#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sys/resource.h>
#include <sys/syscall.h>
#endif

namespace mtp {

// The names and values of what a session has in common with the server that continues it.
using SessionIdentity = std::vector<std::pair<std::string, std::string>>;

// Each field that the identity has of llama.cpp's parameters; null if this llama.cpp has no such field.
namespace fields {
#define MTP_GET(PARAMETERS, FIELD)                                                                                            \
    template <typename P> auto PARAMETERS##_##FIELD(const P & of, int) -> decltype(of.FIELD) { return of.FIELD; }             \
    template <typename P> std::nullptr_t PARAMETERS##_##FIELD(const P &, long) { return nullptr; }
#define MTP_IGNORE(...)
MTP_SESSION_FIELDS(MTP_GET, MTP_GET, MTP_IGNORE)
MTP_SPECULATIVE_FIELDS(MTP_GET, MTP_IGNORE)
} // namespace fields

// A file that the system could not read or memory could not hold, which may pass.
struct PassingError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// A session file, through mtp.h: what that refuses is thrown with its sentence.
class SessionReader {
public:
    explicit SessionReader(const std::filesystem::path & path) {
        check(mtp_session_file_open(path.u8string().c_str(), &file_));
        mtp_session_file_get_info(file_, &info_);
    }
    ~SessionReader() { mtp_session_file_close(file_); }
    SessionReader(const SessionReader &) = delete;

    static void check(mtp_status status) {
        if (status == MTP_ERROR_FILE || status == MTP_ERROR_MEMORY) {
            throw PassingError(mtp_last_error());
        }
        if (status != MTP_OK) {
            throw std::runtime_error(mtp_last_error());
        }
    }

    const mtp_session_file_info & info() const { return info_; }

    SessionIdentity identity() const {
        SessionIdentity found;
        for (int32_t i = 0; i < info_.n_fields; i++) {
            mtp_session_field field = {};
            check(mtp_session_file_get_field(file_, i, &field));
            found.emplace_back(field.name, field.value);
        }
        return found;
    }

    // Bytes in memory that nothing was written to before: setting those of a long session to zero takes as long as reading them.
    struct Section {
        std::unique_ptr<uint8_t[]> data;
        size_t                     nbytes;
    };

    Section read(int32_t i) const {
        mtp_session_section section = {};
        check(mtp_session_file_get_section(file_, i, &section));
        Section found = { std::unique_ptr<uint8_t[]>(new uint8_t[section.nbytes]), (size_t) section.nbytes };
        check(mtp_session_file_read(file_, i, found.data.get(), found.nbytes));
        return found;
    }

private:
    mtp_session_file *    file_ = nullptr;
    mtp_session_file_info info_ = {};
};

class SessionFolder {
public:
    // The folder of --session-dir, of up to --session-size MiB. Throws if it cannot be created, or if other options exclude it.
    SessionFolder(const common_params & params, llama_context * ctx, bool has_media)
        : folder_(std::filesystem::u8path(params.session_dir)), limit_((uint64_t) params.session_size << 20), identity_(identity_of(params, ctx)),
          memory_(params.cache_ram_mib < 0 ? limit_ : std::min(limit_, (uint64_t) params.cache_ram_mib << 20)),
          ctx_(ctx), n_ctx_(llama_n_ctx_seq(ctx)), has_media_(has_media) {
        if (params.cache_ram_mib == 0) {
            throw std::runtime_error("sessions come from the prompt cache in memory, which --cache-ram 0 switches off");
        }
        if (!params.lora_adapters.empty()) {
            throw std::runtime_error("sessions do not record the scales of LoRA adapters, which each request may change");
        }
        if (std::filesystem::create_directories(folder_)) {
            std::filesystem::permissions(folder_, std::filesystem::perms::owner_all);
        }
        remove_leftovers();
        std::unique_lock<std::mutex> lock(mutex_);
        scan(lock, INT64_MAX);
        const auto n_known = std::count_if(known_.begin(), known_.end(),
                                           [](const auto & item) { return !item.second.tokens.empty(); });
        SRV_INF("sessions: %d of this model in %s\n", (int) n_known, params.session_dir.c_str());
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
        if (is_paused() || n_tokens < least_tokens) {
            return;
        }
        try {
            std::unique_lock<std::mutex> lock(mutex_);
            if (count_saved(lock, state.prompt.tokens) == n_tokens) {
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
        if (is_paused() || now < next_copy_us_) {
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
                    idle = { slot.t_last_used, n_tokens, count_saved(lock, slot.prompt.tokens) };
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
        if (tokens.size() - common < least_tokens) {
            return false;
        }
        std::unique_lock<std::mutex> lock(mutex_);
        return !find_better(lock, shares(prompt.tokens, tokens), tokens).empty();
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
        std::unique_lock<std::mutex> lock(mutex_);
        const std::string name = find_better(lock, best, tokens);
        if (name.empty()) {
            return;
        }
        lock.unlock();
        const int64_t t_start = ggml_time_us();
        server_prompt_cache_state state;
        try {
            state = read(name);
        } catch (const std::exception & error) {
            SRV_WRN("session %s is not used: %s\n", name.c_str(), error.what());
            lock.lock();
            const auto known = known_.find(name);
            if (known != known_.end()) {
                known->second.unusable = std::move(known->second.tokens);
                known->second.tokens   = server_tokens();
                known->second.reason   = "unreadable";
                known->second.why      = without_folder(error.what());
                seen_[name].again_us   = is_passing(error) ? ggml_time_us() + retry_us : INT64_MAX;
                next_scan_us_          = std::min(next_scan_us_, seen_[name].again_us);
            }
            return;
        }
        lock.lock();
        touch(name);
        lock.unlock();
        SRV_INF("restored a session of %zu tokens in %.1f ms\n", state.prompt.tokens.size(), (ggml_time_us() - t_start) / 1000.0);
        cache.states.push_front(std::move(state)); // before those that are as good
        prompt.clear();
    }

    // Tells `consider` what a request for `tokens` could not use: the number of tokens that it shares, the reason, a sentence.
    // Returns a sentence on a session that cannot be read, and may be of these tokens; "" if there is none.
    template <typename F> std::string explain(const server_tokens & tokens, F consider) {
        const std::lock_guard<std::mutex> lock(mutex_);
        std::string unreadable;
        for (const auto & item : known_) {
            const Known & known = item.second;
            const size_t  n     = known.tokens.size();
            if (!known.unusable.empty()) {
                consider(known.unusable.get_common_prefix(tokens), known.reason, "session " + item.first + " has more of it, but cannot be continued: " + known.why);
            } else if (n > 0) {
                consider(known.tokens.get_common_prefix(tokens), n > n_ctx_ ? "context" : "share",
                         string_format("a session of %zu tokens has more of it, but %s", n, n > n_ctx_ ? "the context has no room for it" : "too little to be taken"));
            } else if (!strcmp(known.reason, "unreadable")) {
                unreadable = known.why;
            }
        }
        for (const auto & removed : removed_) {
            consider(removed.get_common_prefix(tokens), "evicted",
                     string_format("a session of %zu tokens that has more of it was removed from the folder to make room", removed.size()));
        }
        return unreadable;
    }

    static constexpr size_t  least_tokens = 256;       // fewer are read as fast as a file

private:
    static constexpr size_t  most_removed = 64;        // sessions that are remembered
    static constexpr float   least_share  = 0.25f;     // of a conversation, which is not restored for less
    static constexpr int64_t idle_us      = 2'000'000; // until a new conversation is written
    static constexpr int64_t copy_share   = 50;        // times the time of a copy until the next one
    static constexpr int64_t write_share  = 150;       // times the CPU time of writing a piece until the next one
    static constexpr size_t  piece_size   = 1 << 20;
    static constexpr int64_t scan_us      = 10'000'000; // until the folder is read again, if nothing appeared or vanished
    static constexpr int64_t settled_us   = 2'000'000; // as scan_us, after something did
    static constexpr int64_t retry_us     = 1'000'000; // until a file is read again that could not be read
    static constexpr int64_t pause_us    = 5'000'000; // until files are written again after one could not be
    static constexpr int64_t strange_us   = 1'000;     // that each look spends on files that turn out to be of no use
    static constexpr int32_t program      = 2; // of mtp_session_file_info

    // A version of a file.
    struct Stamp {
        uint64_t size = 0, id = 0;
        int64_t  time = 0; // in nanoseconds

        bool operator==(const Stamp & other) const { return size == other.size && id == other.id && time == other.time; }
    };

    // A file with the name of a session. It is read again when it changes or, if it could not be read, after a while.
    struct Seen {
        Stamp    stamp;                // when it was read
        bool     is_read  = false;
        int64_t  again_us = INT64_MAX; // when it is read again all the same
        uint64_t look     = 0;         // the last one that found it
    };

    // A session.
    struct Known {
        bool          is_session = false;   // or a file that cannot be opened, which may be one
        server_tokens tokens;               // none of what cannot be continued
        const char *  reason = "";          // why it cannot be (cache_miss.h), if it is a session,
        std::string   why;                  // in a sentence,
        server_tokens unusable;             // and its tokens, if they are known
    };

    // What is known of a slot since it was last used.
    struct Idle {
        int64_t since    = -1;
        size_t  n_tokens = 0;
        size_t  n_saved  = 0; // of them, in a file or about to be
    };

    // What must be equal for a session to fit: the files, and all parameters but those that src/session_fields.h leaves out.
    static SessionIdentity identity_of(common_params params, const llama_context * ctx) {
        SessionIdentity identity;
        const auto add = [&](const std::string & name, const std::string & value) {
            identity.emplace_back(printable(name, 255), printable(value, 4095));
        };
        const auto & speculative = params.speculative;
        const auto & draft       = speculative.draft;
        const char * kernels = getenv("MTP_GGUF_KERNELS"); // 0: none of ours
        add("program", "llama-server");
        add("state", std::to_string(LLAMA_STATE_SEQ_VERSION));
        add("llama.cpp", string_format("ggml %s (%s), llama.cpp %s", ggml_version(), ggml_commit(), llama_version()));
        add("kernels", kernels ? kernels : "");
        add("system", llama_print_system_info());
        add("model", files_text(params.model.path));
        add("mmproj", files_text(params.mmproj.path));
        add("draft", files_text(draft.mparams.path));
        add("cells", std::to_string(speculative.need_n_rs_seq()));
#define MTP_ADD(PARAMETERS, FIELD) add(#FIELD, text(fields::PARAMETERS##_##FIELD(PARAMETERS, 0)));
#define MTP_ADD_DRAFTING(PARAMETERS, FIELD) add(#PARAMETERS " " #FIELD, text(fields::PARAMETERS##_##FIELD(PARAMETERS, 0)));
        MTP_SPECULATIVE_FIELDS(MTP_ADD_DRAFTING, MTP_IGNORE)
        for (const auto & vector : params.control_vectors) {
            add(string_format("control vector %zu", &vector - params.control_vectors.data()),
                files_text(vector.fname) + string_format(" times %.9g in layers %d to %d", vector.strength,
                                                         params.control_vector_layer_start, params.control_vector_layer_end));
        }
        const llama_model_params   model   = common_model_params_to_llama(params);
        const llama_context_params context = common_context_params_to_llama(params);
        bool has_gpu = false;
        for (size_t i = 0; i < ggml_backend_dev_count(); i++) {
            const auto type = ggml_backend_dev_type(ggml_backend_dev_get(i));
            has_gpu = has_gpu || (type != GGML_BACKEND_DEVICE_TYPE_CPU && type != GGML_BACKEND_DEVICE_TYPE_ACCEL);
        }
#define MTP_ADD_WITH_GPU(PARAMETERS, FIELD) if (has_gpu) { MTP_ADD(PARAMETERS, FIELD) }
        MTP_SESSION_FIELDS(MTP_ADD, MTP_ADD_WITH_GPU, MTP_IGNORE)
        char architecture[128] = "", original[32];
        llama_model_meta_val_str(llama_get_model(ctx), "general.architecture", architecture, sizeof(architecture));
        const std::string key = std::string(architecture) + ".rope.scaling.original_context_length";
        if (llama_model_meta_val_str(llama_get_model(ctx), key.c_str(), original, sizeof(original)) > 0) {
            add("long_rope", text(llama_n_ctx_seq(ctx) > strtoull(original, nullptr, 10))); // llama.cpp has a rotation for each
        }
        std::map<std::string, std::string> overrides; // llama.cpp uses the first of several for a key
        for (const auto & of : params.kv_overrides) {
            if (of.key[0]) { // the last one has none
                overrides.emplace(of.key, override_text(of));
            }
        }
        for (const auto & item : overrides) {
            add("override " + item.first, item.second);
        }
        return identity;
    }

    // The size and a fingerprint of samples of each file of a model, which may be split; "" if there is none.
    static std::string files_text(const std::string & path) {
        if (path.empty()) {
            return "";
        }
        std::vector<std::string> shards = { path };
        int first = 0, count = 0;
        char suffix = 0;
        const size_t at = path.size() < 20 ? 0 : path.size() - 20; // -00001-of-00003.gguf
        if (sscanf(path.c_str() + at, "-%5d-of-%5d.ggu%c", &first, &count, &suffix) == 3 && count > 1) {
            shards.clear();
            for (int i = 1; i <= count; i++) {
                shards.push_back(path.substr(0, at) + string_format("-%05d-of-%05d.gguf", i, count));
            }
        }
        constexpr uint64_t samples = 64, sample_size = 64 << 10;
        uint64_t    total = 0;
        Fingerprint fingerprint;
        for (const std::string & shard : shards) {
            const uint64_t size = std::filesystem::file_size(std::filesystem::u8path(shard));
            std::ifstream from(std::filesystem::u8path(shard), std::ios::binary);
            std::vector<char> sample(std::min(size, sample_size));
            for (uint64_t i = 0; i < samples; i++) {
                from.seekg((std::streamoff) ((size - sample.size()) * i / (samples - 1)));
                from.read(sample.data(), (std::streamsize) sample.size());
                fingerprint.add(sample.data(), sample.size());
            }
            fingerprint.add(size);
            total += size;
        }
        return string_format("%llu bytes %016llx", (unsigned long long) total, (unsigned long long) fingerprint.value());
    }

    // The value of a parameter.
    static std::string text(std::nullptr_t) { return ""; }
    static std::string text(float value) { return string_format("%.9g", value); }
    static std::string text(double value) { return string_format("%.17g", value); }
    static std::string text(common_speculative_type value) { return common_speculative_type_to_str(value); }
    template <typename T> static std::string text(const std::vector<T> & values) {
        std::string all;
        for (const T & value : values) {
            all += (all.empty() ? "" : ",") + text(value);
        }
        return all;
    }
    static std::string text(ggml_type value) { return ggml_type_name(value); }
    template <typename T, std::enable_if_t<(std::is_integral_v<T> || std::is_enum_v<T>), int> = 0>
    static std::string text(T value) {
        return std::to_string((long long) value);
    }
    static std::string text(ggml_backend_dev_t * devices) {
        std::string names;
        for (; devices && *devices; devices++) {
            names += std::string(ggml_backend_dev_name(*devices)) + " ";
        }
        return names;
    }
    static std::string text(const float * split) {
        std::string shares;
        for (size_t i = 0; split && i < llama_max_devices(); i++) {
            shares += text(split[i]) + " ";
        }
        return shares;
    }
    static std::string text(const llama_model_tensor_buft_override * overrides) {
        std::string names;
        for (; overrides && overrides->pattern; overrides++) {
            names += std::string(overrides->pattern) + "=" + ggml_backend_buft_name(overrides->buft) + " ";
        }
        return names;
    }

    // A text as session files can hold it: without other characters than printable ASCII; a long one ends with a fingerprint.
    static std::string printable(const std::string & text, size_t most) {
        std::string out;
        for (const char c : text) {
            out += c >= ' ' && c <= '~' && c != '\\' ? std::string(1, c) : string_format("\\x%02x", (unsigned) (uint8_t) c);
        }
        if (out.size() > most) {
            Fingerprint whole;
            whole.add(text.data(), text.size());
            const std::string end = string_format("...%016llx", (unsigned long long) whole.value());
            out.replace(most - end.size(), std::string::npos, end);
        }
        return out;
    }

    static std::string override_text(const llama_model_kv_override & of) {
        switch (of.tag) {
            case LLAMA_KV_OVERRIDE_TYPE_INT:   return string_format("int %lld", (long long) of.val_i64);
            case LLAMA_KV_OVERRIDE_TYPE_FLOAT: return string_format("float %.17g", of.val_f64);
            case LLAMA_KV_OVERRIDE_TYPE_BOOL:  return string_format("bool %d", int(of.val_bool));
            case LLAMA_KV_OVERRIDE_TYPE_STR:   return std::string("str ") + of.val_str;
        }
        return "unknown";
    }

    // Files ---------------------------------------------------------------------------------------------------------------

    // Of any model: they may be none of this one's.
    server_tokens unchecked_tokens(const SessionReader & file) const {
        const auto   section = file.read(0);
        llama_tokens packed(section.nbytes / sizeof(llama_token));
        memcpy(packed.data(), section.data.get(), packed.size() * sizeof(llama_token));
        server_tokens tokens = server_tokens::deserialize(packed, has_media_);
        tokens.owner = file.info().owner;
        return tokens;
    }

    // Throws unless it is a session of llama-server.
    server_tokens read_tokens(const SessionReader & file) const {
        if (file.info().program != program) {
            throw std::runtime_error("expected a session of llama-server, found one of MTPLlama");
        }
        server_tokens tokens = unchecked_tokens(file);
        if (tokens.size() != (size_t) file.info().n_tokens || tokens.empty() || !tokens.validate(ctx_)) {
            throw std::runtime_error("tokens: expected those of this model, found others");
        }
        return tokens;
    }

    server_prompt_cache_state read(const std::string & name) const {
        const SessionReader file(folder_ / name);
        server_prompt_cache_state state;
        state.prompt.tokens = read_tokens(file);
        const auto section = file.read(1);
        unpack_slot(section.data.get(), section.nbytes, state);
        return state;
    }

    static bool is_passing(const std::exception & error) {
        return dynamic_cast<const PassingError *>(&error) || dynamic_cast<const std::bad_alloc *>(&error);
    }

    // The version of a file or folder; false if it is gone.
    static bool stamp_of(const std::filesystem::path & path, Stamp & stamp) {
#if !defined(_WIN32)
        struct stat state;
        const bool  there = stat(path.c_str(), &state) == 0;
        stamp = there ? stamp_of(state) : Stamp();
        return there;
#else
        std::error_code error, none;
        const auto time = std::filesystem::last_write_time(path, error).time_since_epoch();
        stamp = { (uint64_t) std::filesystem::file_size(path, none), 0, std::chrono::nanoseconds(time).count() };
        return !error;
#endif
    }

#if !defined(_WIN32)
    static Stamp stamp_of(const struct stat & state) {
#if defined(__APPLE__)
        const auto & time = state.st_mtimespec;
#else
        const auto & time = state.st_mtim;
#endif
        return { (uint64_t) state.st_size, (uint64_t) state.st_ino, int64_t(time.tv_sec) * 1'000'000'000 + time.tv_nsec };
    }
#endif

    // Names, in one text, with the numbers of their files, which differ where one replaces another.
    struct Names {
        std::string                              text;
        std::vector<std::pair<size_t, uint64_t>> items; // begin of a name that ends with a zero, number

        const char * name(size_t i) const { return text.c_str() + items[i].first; }
    };

    // Lists the names in the folder that end so; false, with the reason in errno, if it cannot be read.
    bool list(const std::string & suffix, bool hidden, Names & found) const {
        const auto add = [&](const char * name, uint64_t id) {
            const size_t length = strlen(name);
            if (length > suffix.size() && suffix == name + length - suffix.size() && (name[0] == '.') == hidden) {
                found.items.emplace_back(found.text.size(), id);
                found.text.append(name, length + 1);
            }
        };
#if !defined(_WIN32)
        DIR * const dir = opendir(folder_.c_str());
        if (!dir) {
            return false;
        }
        while (const dirent * entry = readdir(dir)) {
            add(entry->d_name, (uint64_t) entry->d_ino);
        }
        closedir(dir);
#else
        std::error_code error;
        for (std::filesystem::directory_iterator at(folder_, error), end; !error && at != end; at.increment(error)) {
            add(at->path().filename().u8string().c_str(), 0);
        }
        if (error) {
            errno = EIO;
            return false;
        }
#endif
        return true;
    }

    // Whether a file begins as sessions do, those of other programs and versions, and damaged ones, included. Others are not
    // ours to remove.
    static bool begins_as_session(const std::filesystem::path & path) {
        char magic[8] = {};
#if !defined(_WIN32)
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK); // without waiting for a pipe's other end
        if (fd < 0 || ::read(fd, magic, sizeof(magic)) < 0) {
            magic[0] = 0;
        }
        if (fd >= 0) {
            close(fd);
        }
#else
        std::ifstream(path, std::ios::binary).read(magic, sizeof(magic));
#endif
        return !memcmp(magic, "mtpsess", sizeof(magic));
    }

    // Looks for files of this model that appeared, changed or vanished, by the thread that decodes alone. Files are read without
    // the mutex, the newest first; no more of them once `most_us` was spent on those of no use.
    void scan(std::unique_lock<std::mutex> & lock, int64_t most_us) {
        Stamp         folder;
        const int64_t start = ggml_time_us();
        const bool    same  = stamp_of(folder_, folder) && folder == scanned_;
        if (!same || start >= next_scan_us_) {
            look(lock, start, same);
            scanned_ = folder;
        }
        while (!unread_.empty() && most_us > 0) {
            const auto item = std::move(unread_.back());
            unread_.pop_back();
            const auto seen = seen_.find(item.second);
            if (seen != seen_.end() && (!seen->second.is_read || !(seen->second.stamp == item.first) || seen->second.again_us <= start)) {
                most_us -= read_known(lock, item.second, item.first);
            }
        }
    }

    // Lists the folder, and notes what is to be read in unread_: names that are new, files that replace others and, once in a
    // while, those that were changed in their place. The mutex is free meanwhile.
    void look(std::unique_lock<std::mutex> & lock, int64_t start, bool same) {
        const bool stats_all = start >= next_stats_us_;
        lock.unlock();
        Names names;
        const bool        is_listed = list(".session", false, names);
        const std::string reason    = strerror(errno);
        lock.lock();
        next_scan_us_ = start + (!is_listed || !same ? settled_us : scan_us);
        if (is_listed != is_listed_) {
            is_listed_ = is_listed;
            SRV_WRN("sessions: %s %s\n", folder_.u8string().c_str(), is_listed ? "can be read again" : ("cannot be read: " + reason).c_str());
        }
        if (!is_listed) {
            return;
        }
        next_stats_us_ = stats_all ? start + scan_us : next_stats_us_;
        unread_.clear();
        looks_++;
        std::string name;
        for (size_t i = 0; i < names.items.size(); i++) {
            name = names.name(i);
            Seen & seen = seen_[name];
            const uint64_t id = names.items[i].second;
            if (!seen.is_read || seen.stamp.id != id || seen.again_us <= start || stats_all) {
                unread_.push_back({ { 0, id, 0 }, name });
            }
            next_scan_us_ = std::min(next_scan_us_, std::max(seen.again_us, start + retry_us));
            seen.look = looks_;
        }
        for (auto seen = seen_.begin(); seen_.size() > names.items.size() && seen != seen_.end();) {
            if (seen->second.look == looks_) {
                ++seen;
            } else {
                known_.erase(seen->first);
                seen = seen_.erase(seen);
            }
        }
        lock.unlock();
        for (auto & item : unread_) {
            const uint64_t id = item.first.id;
            stamp_of(folder_ / item.second, item.first);
            item.first.id = id;
        }
        std::sort(unread_.begin(), unread_.end(), [](const auto & a, const auto & b) { return a.first.time < b.first.time; });
        lock.lock();
    }

    // Reads a file's header and tokens. Returns the time that it took if it is of no use. The mutex is free meanwhile.
    int64_t read_known(std::unique_lock<std::mutex> & lock, const std::string & name, const Stamp & stamp) {
        const int64_t start = ggml_time_us();
        Known known;
        bool  passing = false;
        lock.unlock();
        try {
            const SessionReader file(folder_ / name);
            known.is_session = true;
            if (file.info().program == program) {
                note(known, file);
            }
        } catch (const std::exception & error) {
            passing          = is_passing(error);
            known.is_session = known.is_session || begins_as_session(folder_ / name);
            known.reason     = known.is_session || passing ? "unreadable" : "";
            known.why        = without_folder(error.what());
        }
        lock.lock();
        const bool useless = known.tokens.empty();
        seen_[name] = { stamp, true, passing ? start + retry_us : INT64_MAX, looks_ };
        known_.erase(name);
        if (known.is_session || passing) {
            known_.emplace(name, std::move(known));
        }
        return useless ? ggml_time_us() - start : 0;
    }

    // Notes the tokens of a session of llama-server, and why it cannot be continued.
    void note(Known & known, const SessionReader & file) const {
        const uint64_t nbytes = file.info().nbytes;
        known.why    = difference(file.identity());
        known.reason = "identity";
        if (known.why.empty() && nbytes > memory_) {
            known.reason = "memory";
            known.why    = string_format("expected %llu bytes or fewer, found %llu", (unsigned long long) memory_, (unsigned long long) nbytes);
        }
        if (known.why.empty()) {
            known.tokens = read_tokens(file);
        } else if ((size_t) file.info().n_tokens <= n_ctx_) {
            known.unusable = unchecked_tokens(file);
        }
    }

    // The first field in which the identity of a file is another one; "" if it is the same.
    std::string difference(const SessionIdentity & found) const {
        const auto value_of = [](const SessionIdentity & identity, const std::string & name) {
            const auto field = std::find_if(identity.begin(), identity.end(), [&](const auto & item) { return item.first == name; });
            return field == identity.end() ? "none" : field->second;
        };
        for (const SessionIdentity * identity : { &identity_, &found }) {
            for (const auto & field : *identity) {
                const std::string expected = value_of(identity_, field.first), other = value_of(found, field.first);
                if (expected != other) {
                    return field.first + ": expected " + expected + ", found " + other;
                }
            }
        }
        return found == identity_ ? "" : "fields: expected them in another order";
    }

    // A sentence without the folder's path, which clients need not know.
    std::string without_folder(std::string sentence) const {
        const std::string path = (folder_ / "").u8string();
        for (size_t at; (at = sentence.find(path)) != std::string::npos;) {
            sentence.erase(at, path.size());
        }
        return sentence;
    }

    // The most tokens of a conversation that a file has, which is then noted as used. Called with the mutex.
    size_t count_saved(std::unique_lock<std::mutex> & lock, const server_tokens & tokens) {
        scan(lock, strange_us);
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
    std::string find_better(std::unique_lock<std::mutex> & lock, std::pair<float, float> best, const server_tokens & tokens) {
        scan(lock, strange_us);
        std::string name;
        if (!is_listed_) {
            return name;
        }
        for (const auto & item : known_) {
            const auto other = shares(item.second.tokens, tokens);
            if (item.second.tokens.size() <= n_ctx_ && other.first >= std::max(least_share, best.first) && other.second > best.second) {
                best = other;
                name = item.first;
            }
        }
        return name;
    }

    // Notes a file as used, which is no change of it. Called with the mutex.
    void touch(const std::string & name) {
        const auto seen = seen_.find(name);
        Stamp      before, after;
        if (seen == seen_.end() || !stamp_of(folder_ / name, before)) {
            return;
        }
        std::error_code error;
        std::filesystem::last_write_time(folder_ / name, std::filesystem::file_time_type::clock::now(), error);
        if (seen->second.stamp == before && stamp_of(folder_ / name, after) && after.id == before.id) {
            seen->second.stamp = after;
        }
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

    // Removes unfinished files of servers that were killed while they wrote, and not of one that writes: it may be about to lock
    // the file. Returns the bytes of those that stay.
    uint64_t remove_leftovers() const {
        uint64_t left = 0;
        Names names;
        list(".part", true, names);
        for (size_t i = 0; i < names.items.size(); i++) {
            const auto path = folder_ / std::filesystem::u8path(names.name(i));
            std::error_code error;
            const auto age = std::filesystem::file_time_type::clock::now() - std::filesystem::last_write_time(path, error);
            if (!error && (age > std::chrono::minutes(10) || (age > std::chrono::seconds(1) && WriterLock(path).held))) {
                std::filesystem::remove(path, error);
            } else {
                const auto size = std::filesystem::file_size(path, error);
                left += error ? 0 : size;
            }
        }
        return left;
    }

    // Writing -------------------------------------------------------------------------------------------------------------

    void write_all() {
#if defined(__linux__)
        setpriority(PRIO_PROCESS, (id_t) syscall(SYS_gettid), 19); // the CPUs are for tokens
#endif
        bool fails = false; // the last time
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [this] { return ends_ || !waiting_.empty(); });
            if (waiting_.empty()) {
                return;
            }
            const server_prompt_cache_state & next = waiting_.front();
            lock.unlock();
            if (!is_paused()) {
                try {
                    errno = 0;
                    if (write(next) && fails) {
                        SRV_INF("%s", "sessions are written again\n");
                        fails = false;
                    }
                } catch (const std::exception & error) {
                    if (!fails) {
                        SRV_WRN("sessions are not written until that passes: %s%s%s\n", error.what(), errno ? ": " : "", errno ? strerror(errno) : "");
                    }
                    fails          = true;
                    write_again_us_ = ggml_time_us() + pause_us;
                }
            }
            lock.lock();
            waiting_.pop_front();
            changed_.notify_all();
        }
    }

    // The bytes of a header; it sets the sections' offsets.
    std::vector<uint8_t> header_of(uint64_t owner, int32_t n_tokens, mtp_session_section * sections) const {
        std::vector<mtp_session_field> fields;
        for (const auto & field : identity_) {
            fields.push_back({ field.first.c_str(), field.second.c_str() });
        }
        const mtp_session_file_info info = { 0, owner, program, n_tokens, 2, (int32_t) fields.size(), nullptr, 0 };
        size_t size = 0;
        SessionReader::check(mtp_session_file_header("a session", &info, sections, fields.data(), nullptr, 0, &size));
        std::vector<uint8_t> header(size);
        SessionReader::check(mtp_session_file_header("a session", &info, sections, fields.data(), header.data(), size, &size));
        return header;
    }

    // Returns whether there is room for it. Throws if it cannot be written.
    bool write(const server_prompt_cache_state & session) {
        const std::vector<char> tokens = session.prompt.tokens.serialize();
        const int32_t n_tokens = (int32_t) session.prompt.tokens.size();
        mtp_session_section sections[2] = {};
        sections[0].nbytes   = tokens.size();
        sections[0].checksum = crc32(tokens.data(), tokens.size());
        pack_slot(session, [&](const void * data, size_t size) {
            sections[1].nbytes += size;
            sections[1].checksum = crc32(data, size, sections[1].checksum);
        });
        sections[0].n_tokens = sections[1].n_tokens = n_tokens;
        const std::vector<uint8_t> header = header_of(session.prompt.tokens.owner, n_tokens, sections);
        const uint64_t size = sections[1].offset + sections[1].nbytes;
        if (size > limit_) {
            return false;
        }
        char name[32];
        snprintf(name, sizeof(name), "server-%08x%08x", sections[0].checksum, crc32(header.data(), header.size()));
        const std::string file_name = std::string(name) + ".session";
        if (!make_room(size)) {
            SRV_INF("%s", "sessions: unfinished files leave no room for another one\n");
            return false;
        }
        const auto part = folder_ / ("." + std::string(name) + "-" + std::to_string((uint64_t) ggml_time_us()) + ".part");
        try {
            std::ofstream file;
            file.exceptions(std::ios::failbit | std::ios::badbit);
            file.open(part, std::ios::binary);
            const WriterLock lock(part);
            std::error_code error;
            std::filesystem::permissions(part, std::filesystem::perms::owner_read | std::filesystem::perms::owner_write, error);
            file.write((const char *) header.data(), (std::streamsize) header.size());
            file.seekp((std::streamoff) sections[0].offset);
            file.write(tokens.data(), (std::streamsize) tokens.size());
            file.seekp((std::streamoff) sections[1].offset);
            Work work;
            pack_slot(session, [&](const void * data, size_t size) { write_pieces(file, (const char *) data, size, work); });
            file.close();
            std::filesystem::rename(part, folder_ / file_name);
            const std::lock_guard<std::mutex> known_lock(mutex_);
            Stamp stamp;
            if (stamp_of(folder_ / file_name, stamp)) {
                seen_[file_name] = { stamp, true, INT64_MAX, looks_ };
                Known known;
                known.is_session = true;
                known.tokens = session.prompt.tokens.clone();
                known_.insert_or_assign(file_name, std::move(known));
            }
        } catch (...) {
            std::error_code error;
            std::filesystem::remove(part, error);
            throw;
        }
        remove_beginnings(session.prompt.tokens);
        return true;
    }

    // Whether writing failed a short time ago, as on a full disk.
    bool is_paused() const { return ggml_time_us() < write_again_us_; }

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
    // count, too; false if these leave no room. Strangers do not count, and stay.
    bool make_room(uint64_t size) {
        std::vector<std::pair<Stamp, std::string>> files;
        {
            const std::lock_guard<std::mutex> lock(mutex_);
            for (const auto & item : known_) {
                if (item.second.is_session) {
                    files.emplace_back(Stamp(), item.first);
                }
            }
        }
        uint64_t all = size + remove_leftovers();
        for (auto & file : files) {
            stamp_of(folder_ / file.second, file.first);
            all += file.first.size;
        }
        std::sort(files.begin(), files.end(), [](const auto & a, const auto & b) { return a.first.time < b.first.time; });
        for (const auto & file : files) {
            if (all <= limit_) {
                break;
            }
            std::error_code error;
            if (begins_as_session(folder_ / file.second)) { // still
                std::filesystem::remove(folder_ / file.second, error);
                forget(file.second);
            }
            all -= file.first.size;
        }
        return all <= limit_;
    }

    // Notes that a session was removed to make room.
    void forget(const std::string & name) {
        const std::lock_guard<std::mutex> lock(mutex_);
        const auto known = known_.find(name);
        if (known == known_.end()) {
            return;
        }
        removed_.push_back(std::move(known->second.tokens));
        if (removed_.size() > most_removed) {
            removed_.pop_front();
        }
        known_.erase(known);
        seen_.erase(name);
    }

    // Removes the files whose conversations `tokens` continues.
    void remove_beginnings(const server_tokens & tokens) {
        const std::lock_guard<std::mutex> lock(mutex_);
        for (auto item = known_.begin(); item != known_.end();) {
            const size_t size = item->second.tokens.size();
            if (size > 0 && size < tokens.size() && item->second.tokens.get_common_prefix(tokens) == size) {
                std::error_code error;
                std::filesystem::remove(folder_ / item->first, error);
                seen_.erase(item->first);
                item = known_.erase(item);
            } else {
                ++item;
            }
        }
    }

    const std::filesystem::path  folder_;
    const uint64_t               limit_;
    const SessionIdentity        identity_;
    const uint64_t               memory_; // the most that a file may have to be read
    llama_context * const        ctx_;
    const size_t                 n_ctx_;
    const bool                   has_media_;

    std::unordered_map<std::string, Seen> seen_; // by their names
    std::map<std::string, Known> known_;   // as many of them as are sessions
    std::deque<server_tokens>    removed_; // tokens of the sessions that were removed to make room
    uint64_t                     looks_     = 0;    // so far
    bool                         is_listed_ = true; // at the last look; these five are of the thread that decodes
    Stamp                        scanned_;          // the folder's then
    std::vector<std::pair<Stamp, std::string>> unread_; // to be read, the newest last
    int64_t                      next_scan_us_  = 0;
    int64_t                      next_stats_us_ = 0;    // of all files
    std::deque<server_prompt_cache_state> waiting_; // to be written, the first one at the moment
    bool                         ends_ = false;
    std::atomic<int64_t>         write_again_us_{ 0 };
    std::atomic<bool>            decodes_{ false }; // any slot, after the last batch
    std::mutex                   mutex_;   // of seen_, known_, removed_, looks_, waiting_ and ends_
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

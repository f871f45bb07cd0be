// libFuzzer over mtp.h: whatever bytes are given as a GGUF, as a checkpoint, as a session file or as an index of
// lookup files, the library answers with a status, and the session goes on. docs/native.md has the commands.
//
// Bytes that begin with 'G' are loaded as a head, those that begin with "MTPT" as an index of lookup
// files, those that begin with 'm' are opened as a session file, and those that begin with 'S' are steps of a
// suffix index, whose matches of up to 64 tokens are compared with a naive search. Those that begin with 'D' are steps of drafts from a text, those that begin with 'A' the
// state of a chooser of depths. All others are restored as a checkpoint into a session on the model that the environment
// variable MTP_FUZZ_MODEL names. Without that variable, all bytes are opened as a session file, which is much faster.

#include "crc32.h"
#include "error.h"
#include "llama.h"
#include "mtp.h"
#include "session_file.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>

static const int32_t CONTEXT = 256;
static const int32_t DEPTH = 2;

static mtp_session * session;

// A broken promise: libFuzzer reports the input.
static void must(bool kept, const char * promise) {
    if (!kept) {
        fprintf(stderr, "broken: %s (last error: %s)\n", promise, mtp_last_error());
        abort();
    }
}

static void quiet(ggml_log_level, const char *, void *) {}

extern "C" int LLVMFuzzerInitialize(int *, char ***) {
    llama_log_set(quiet, nullptr);
    const char * path = getenv("MTP_FUZZ_MODEL");
    if (path == nullptr) {
        return 0;
    }
    llama_model_params model_params = llama_model_default_params();
    model_params.load_mtp = false;
    llama_model * model = llama_model_load_from_file(path, model_params);
    must(model != nullptr, "llama.cpp loads the model");
    llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx = CONTEXT;
    context_params.n_rs_seq = DEPTH;
    context_params.n_threads = context_params.n_threads_batch = 1;
    llama_context * context = llama_init_from_model(model, context_params);
    must(context != nullptr, "llama.cpp makes a context");
    mtp_head_params head_params = mtp_head_default_params();
    head_params.n_threads = 1;
    head_params.n_ctx = int32_t(llama_n_ctx_seq(context));
    mtp_head * head = nullptr;
    must(mtp_head_load(path, &head_params, &head) == MTP_OK, "the head loads");
    mtp_session_params params = {};
    params.rollback = MTP_ROLLBACK_SNAPSHOT;
    params.max_depth = params.max_lookup = DEPTH;
    must(mtp_session_new(context, head, &params, &session) == MTP_OK, "a session is made");
    return 0;
}

static void load(const uint8_t * data, size_t n) {
    const int file = memfd_create("head", MFD_CLOEXEC);
    must(file >= 0 && write(file, data, n) == ssize_t(n), "a file in memory");
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    mtp_head_params params = mtp_head_default_params();
    params.n_threads = 1;
    params.n_ctx = 64;
    mtp_head * head = nullptr;
    if (mtp_head_load(path.c_str(), &params, &head) == MTP_OK) {
        mtp_head_info info;
        must(mtp_head_get_info(head, &info) == MTP_OK, "a head says what it is");
        std::vector<int32_t> ids(size_t(info.n_draft_vocab));
        must(mtp_head_get_draft_ids(head, ids.data(), ids.size()) == MTP_OK, "a head has its ids");
        const int32_t tokens[2] = {0, info.n_vocab - 1};
        const std::vector<float> hidden(2 * size_t(info.n_embd), 0.5f);
        int32_t drafts[DEPTH];
        float probabilities[DEPTH];
        if (mtp_head_draft(head, 0, 1, tokens, hidden.data(), 2, DEPTH, drafts, probabilities, nullptr) == MTP_OK) {
            for (const int32_t id : drafts) {
                must(id >= 0 && id < info.n_vocab, "a draft is a token");
            }
        }
        mtp_head_free(head);
    } else {
        must(head == nullptr && mtp_last_error()[0] != '\0', "a refusal has a sentence and no handle");
    }
    close(file);
}

static void restore(const uint8_t * data, size_t n) {
    mtp_checkpoint * checkpoint = nullptr;
    if (mtp_checkpoint_read(data, n, &checkpoint) != MTP_OK) {
        must(checkpoint == nullptr && mtp_last_error()[0] != '\0', "a refusal has a sentence and no handle");
        return;
    }
    const int32_t prompt[3] = {1, 2, 3};
    must(mtp_session_decode(session, 0, prompt, 3, false) == MTP_OK, "a session decodes");
    mtp_checkpoint_info info;
    must(mtp_checkpoint_get_info(checkpoint, &info) == MTP_OK, "a checkpoint says what it is");
    if (info.kind == MTP_CHECKPOINT_HOST) {
        mtp_checkpoint_attach(session, 0, checkpoint); // else it cannot be restored
    }
    const bool restored = mtp_checkpoint_restore(session, 0, checkpoint) == MTP_OK;
    int32_t length = -1;
    must(mtp_session_length(session, 0, &length) == MTP_OK, "a session knows its length");
    must(restored ? length == info.length : length == 0 || length == 3, "a sequence is restored, empty or as it was");
    int32_t out[DEPTH + 1];
    int32_t n_out = 0;
    if (length < CONTEXT) {
        const mtp_status status = mtp_session_step(session, 0, 1, DEPTH, nullptr, out, &n_out);
        // A restored state may have any numbers, also such that no token can be chosen after them.
        must(status == MTP_OK || (restored && status == MTP_ERROR_BACKEND), "a session goes on");
    }
    must(mtp_seq_rm(session, 0, 0, -1) == MTP_OK, "a sequence is emptied");
    must(mtp_session_decode(session, 0, prompt, 3, false) == MTP_OK &&
             mtp_session_step(session, 0, 4, DEPTH, nullptr, out, &n_out) == MTP_OK &&
             mtp_seq_rm(session, 0, 0, -1) == MTP_OK,
         "a session goes on");
    mtp_checkpoint_free(checkpoint);
}

// The file's checksum and what it was written for are made right, as a forger would.
static void search(const uint8_t * data, size_t n) {
    const int32_t n_vocab = 16;
    const size_t header = 48;
    std::vector<uint8_t> bytes(data, data + n);
    if (n >= header) {
        uint64_t sum = 0;
        for (size_t at = header; at + 4 <= n; at += 4) {
            uint32_t value;
            memcpy(&value, data + at, 4);
            sum = (sum ^ value) * 0x9e3779b97f4a7c15ull;
            sum ^= sum >> 29;
        }
        memset(&bytes[8], 0, 8);
        memcpy(&bytes[32], &sum, 8);
        memcpy(&bytes[40], &n_vocab, 4);
    }
    const int file = memfd_create("index", MFD_CLOEXEC);
    must(file >= 0 && write(file, bytes.data(), n) == ssize_t(n), "a file in memory");
    const std::string path = "/proc/self/fd/" + std::to_string(file);
    mtp_corpus * corpus = nullptr;
    if (mtp_corpus_open(path.c_str(), n_vocab, 0, &corpus) == MTP_OK) {
        for (int32_t first = 0; first < n_vocab; ++first) {
            const int32_t text[3] = {first, first, (first + 1) % n_vocab};
            int32_t out[20];
            int32_t count = -1;
            must(mtp_corpus_propose(corpus, text, 3, out, 20, &count) == MTP_OK, "an index answers");
            must(count >= 0 && count <= 20, "as many drafts as were asked for at most");
            for (int32_t i = 0; i < count; ++i) {
                must(out[i] >= 0 && out[i] < n_vocab, "a draft is a token");
            }
        }
        mtp_corpus_free(corpus);
    } else {
        must(corpus == nullptr && mtp_last_error()[0] != '\0', "a refusal has a sentence and no handle");
    }
    close(file);
}

// The size and the checksums are made right, as a forger would, unless the byte of a checksum says otherwise. A header that
// is valid is what the writer makes of it.
static void open_session_file(const uint8_t * data, size_t n) {
    std::vector<uint8_t> bytes(data, data + n);
    const auto number = [&](size_t at) {
        uint32_t value;
        memcpy(&value, &bytes[at], sizeof(value));
        return value;
    };
    if (n >= 64 && (data[12] & 3) != 3) {
        const uint64_t size = n;
        memcpy(&bytes[16], &size, sizeof(size));
        for (size_t at = 64; at + 24 <= n && at < 64 + 24 * uint64_t(number(36)); at += 24) {
            uint64_t offset, nbytes;
            memcpy(&offset, &bytes[at], 8);
            memcpy(&nbytes, &bytes[at + 8], 8);
            if (offset <= n && nbytes <= n - offset && !(data[12] & 1)) {
                const uint32_t checksum = mtp::crc32(&bytes[offset], nbytes);
                memcpy(&bytes[at + 16], &checksum, 4);
            }
        }
        const size_t header = std::min<size_t>(number(24), n);
        memset(&bytes[12], 0, 4);
        const uint32_t checksum = mtp::crc32(bytes.data(), header);
        memcpy(&bytes[12], &checksum, 4);
    }
    bool valid = false;
    try {
        const size_t size = mtp::SessionHeader::size("bytes", bytes.data(), n);
        must(size <= n, "a header is within its file");
        mtp::SessionHeader header = mtp::SessionHeader::read("bytes", bytes.data(), size, n);
        valid = true;
        const std::vector<uint8_t> written = header.write("bytes");
        must(written.size() == size && memcmp(written.data(), bytes.data(), size) == 0 && header.nbytes == n,
             "a header is what the writer makes of it");
    } catch (const mtp::Error & error) {
        must(!valid && error.status == MTP_ERROR_FORMAT && strncmp(error.what(), "bytes: ", 7) == 0 &&
                 strlen(error.what()) < 500 && !strchr(error.what(), '\n'),
             "a refusal is one sentence");
    }
    if (!valid && (n == 0 || data[n / 2] % 64 != 0)) {
        return; // a file takes longer than its bytes
    }
    const int fd = memfd_create("session", MFD_CLOEXEC);
    must(fd >= 0 && write(fd, bytes.data(), n) == ssize_t(n), "a file in memory");
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    mtp_session_file * file = nullptr;
    must((mtp_session_file_open(path.c_str(), &file) == MTP_OK) == valid, "a file is as valid as its bytes");
    mtp_session_file_info info = {};
    if (file != nullptr) {
        must(mtp_session_file_get_info(file, &info) == MTP_OK && info.nbytes == n, "a file says what it is");
    }
    for (int32_t i = 0; i < info.n_fields; ++i) {
        mtp_session_field field;
        must(mtp_session_file_get_field(file, i, &field) == MTP_OK && field.name[0] != '\0', "a field has a name");
    }
    for (int32_t i = 0; i < info.n_sections; ++i) {
        mtp_session_section section;
        must(mtp_session_file_get_section(file, i, &section) == MTP_OK && section.nbytes <= n,
             "a section is within its file");
        std::vector<uint8_t> content(section.nbytes);
        const mtp_status status = mtp_session_file_read(file, i, content.data(), content.size());
        must(mtp_session_file_read(file, i, nullptr, 0) == status, "a check is what reading is");
        must(status == (mtp::crc32(content.data(), content.size()) == section.checksum ? MTP_OK : MTP_ERROR_FORMAT),
             "a checksum holds");
        must(memcmp(content.data(), &bytes[section.offset], content.size()) == 0, "a section has its bytes");
    }
    mtp_session_file_close(file);
    close(fd);
}

// A byte below 200 appends one of four tokens, another one truncates to a share of the text.
static void index_text(const uint8_t * data, size_t n) {
    mtp_suffix_index * index = nullptr;
    must(mtp_suffix_index_new(&index) == MTP_OK, "an index is made");
    std::vector<int32_t> text;
    for (size_t at = 0; at < std::min<size_t>(n, 400); ++at) {
        if (data[at] < 200) {
            const int32_t token = data[at] % 4;
            text.push_back(token);
            must(mtp_suffix_index_append(index, &token, 1) == MTP_OK, "a token is appended");
        } else {
            text.resize(text.size() * (data[at] - 200) / 56);
            must(mtp_suffix_index_truncate(index, int64_t(text.size())) == MTP_OK, "a text is truncated");
        }
        const int64_t size = int64_t(text.size());
        int64_t longest = 0;
        for (int64_t end = 0; end + 1 < size; ++end) {
            int64_t length = 0;
            while (length < 64 && length <= end && text[size_t(end - length)] == text[size_t(size - 1 - length)]) {
                ++length;
            }
            longest = std::max(longest, length);
        }
        int64_t length = -1;
        int64_t next = -1;
        int32_t agreeing = -1;
        must(mtp_suffix_index_match(index, &length, &next, &agreeing) == MTP_OK, "an index answers");
        must(length == longest, "the longest repeated suffix is found");
        must(length == 0 || (next >= length && next < size), "it is followed by a token");
        must(agreeing >= 0 && agreeing <= 4 && (length > 0 || agreeing == 0), "few occurrences are counted");
        for (int64_t i = 0; i < length; ++i) {
            must(text[size_t(next - 1 - i)] == text[size_t(size - 1 - i)], "its earlier occurrence is one");
        }
    }
    mtp_suffix_index_free(index);
}

// A byte below 200 adds one of eight tokens, read or generated, another one truncates to a share of the text. After
// each, drafts are planned, and a cycle in which some of them are accepted is reported.
static void draft_from_text(const uint8_t * data, size_t n) {
    mtp_depth * depth = nullptr;
    mtp_text_drafts * drafts = nullptr;
    must(mtp_depth_new(DEPTH, &depth) == MTP_OK && mtp_text_drafts_new(&drafts) == MTP_OK, "drafts are made");
    const double verify_ms[4] = {10, 11, 12, 13};
    must(mtp_depth_set_costs(depth, verify_ms, 4, nullptr, 0) == MTP_OK, "costs are set");
    std::vector<int32_t> text;
    for (size_t at = 0; at < std::min<size_t>(n, 1000); ++at) {
        if (data[at] < 200) {
            text.push_back(data[at] % 8);
        } else {
            text.resize(text.size() * (data[at] - 200) / 56);
        }
        must(mtp_text_drafts_set(drafts, text.data(), int64_t(text.size()), data[at] & 8) == MTP_OK, "a text is set");
        int32_t out[15];
        int32_t count = -1;
        must(mtp_text_drafts_plan(drafts, depth, data[at] & 16 ? -1 : 0, 2, out, 15, &count) == MTP_OK, "drafts are planned");
        must(count >= 0 && count <= 15, "as many drafts as were asked for at most");
        for (int32_t i = 0; i < count; ++i) {
            must(std::find(text.begin(), text.end(), out[i]) != text.end(), "a draft is a token of the text");
        }
        if (count > 0) {
            const int32_t accepted = std::min<int32_t>(data[at] / 16, count);
            must(mtp_depth_report_text(depth, count, accepted, 10 + data[at] % 7, 1) == MTP_OK, "a cycle is reported");
        }
    }
    mtp_text_drafts_free(drafts);
    mtp_depth_free(depth);
}

// A state that is taken is one that can be saved, and leads to choices within their bounds.
static void choose_depths(const uint8_t * data, size_t n) {
    mtp_depth * depth = nullptr;
    must(mtp_depth_new(DEPTH, &depth) == MTP_OK, "a chooser is made");
    if (mtp_depth_set_state(depth, data, n) != MTP_OK) {
        must(mtp_last_error()[0] != '\0', "a refusal has a sentence");
    }
    const float probabilities[DEPTH] = {0.9f, 0.5f};
    for (int32_t i = 0; i < 20; ++i) {
        int32_t planned = -1;
        int32_t kept = -1;
        must(mtp_depth_plan(depth, DEPTH, &planned) == MTP_OK && planned >= 0 && planned <= DEPTH, "a depth is chosen");
        must(mtp_depth_keep(depth, probabilities, planned, false, &kept) == MTP_OK && kept >= 0 && kept <= planned,
             "some drafts are kept");
        const mtp_cycle_outcome outcome = {planned, kept, std::min(kept, i % 3), probabilities, -1, 1.0 * planned, 10.0 + kept, 1};
        must(mtp_depth_report(depth, &outcome) == MTP_OK, "a cycle is reported");
    }
    size_t size = 0;
    must(mtp_depth_state_size(depth, &size) == MTP_OK && size < 128 << 10, "a state is bounded");
    std::vector<uint8_t> state(size);
    must(mtp_depth_get_state(depth, state.data(), size) == MTP_OK, "a state is saved");
    must(mtp_depth_set_state(depth, state.data(), size) == MTP_OK, "a saved state is one");
    mtp_depth_free(depth);
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t * data, size_t n) {
    if (session == nullptr || (n > 0 && data[0] == 'm')) {
        open_session_file(data, n);
    } else if (n > 0 && data[0] == 'G') {
        load(data, n);
    } else if (n >= 4 && memcmp(data, "MTPT", 4) == 0) {
        search(data, n);
    } else if (n > 0 && data[0] == 'S') {
        index_text(data + 1, n - 1);
    } else if (n > 0 && data[0] == 'D') {
        draft_from_text(data + 1, n - 1);
    } else if (n > 1 && data[0] == 'A') {
        choose_depths(data + 1, n - 1);
    } else {
        restore(data, n);
    }
    return 0;
}

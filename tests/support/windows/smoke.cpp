// Runs everything of the native libraries that depends on the system: files by UTF-8 names, the draft
// graph over the demo model, rollback, and the quantizers. It prints results that must not depend on the
// system; test_windows.py compares them.
//
//   smoke MODEL EMPTY_FILE
//
// The model lies in the current folder once more, as kName.

#include "llama.h"
#include "mtp.h"
#include "mtp_quantize.h"

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

constexpr int32_t kDepth = 3;
constexpr int kTokens = 40;
constexpr char kName[] = "gr\xc3\xbcn.gguf"; // UTF-8
// The demo model's tokens of a class statement and its docstring.
constexpr int32_t kPrompt[] = {548, 1301, 534, 276, 258,  365, 2842, 1233, 560, 266, 449,
                               1819, 258, 350, 533, 724, 581,  275,  11,   684, 308};

static void check(int32_t status, const char * what) {
    if (status != MTP_OK) {
        std::printf("%s: status %d: %s\n", what, status, mtp_last_error());
        std::exit(1);
    }
}

static void refuse(const char * path) {
    const mtp_head_params params = mtp_head_default_params();
    mtp_head * head = nullptr;
    std::printf("refused with status %d\n", mtp_head_load(path, &params, &head));
}

// Writes an index of lookup files and drafts from it.
static void look_up() {
    constexpr char kIndex[] = "gr\xc3\xbcn.index"; // UTF-8
    constexpr int32_t kText[] = {1, 2, 3, 4, -1};
    check(mtp_corpus_write(kIndex, kText, 5, /*n_vocab*/ 9, /*tokenizer*/ 0), "index");
    mtp_corpus * corpus = nullptr;
    check(mtp_corpus_open(kIndex, 9, 0, &corpus), "index");
    int32_t drafts[2];
    int32_t n = 0;
    check(mtp_corpus_propose(corpus, kText, 2, drafts, 2, &n), "index");
    std::printf("%d drafts from an index: %d %d\n", n, drafts[0], drafts[1]);
    mtp_corpus_free(corpus);
}

static void generate(const char * path) {
    llama_model_params model_params = llama_model_default_params();
    model_params.load_mtp = false;
    llama_model * model = llama_model_load_from_file(path, model_params);
    llama_context_params context_params = llama_context_default_params();
    context_params.n_ctx = 256;
    context_params.n_threads = context_params.n_threads_batch = 1;
    context_params.n_rs_seq = kDepth;
    llama_context * context = model ? llama_init_from_model(model, context_params) : nullptr;
    if (!context) {
        std::printf("llama.cpp refused the model\n");
        std::exit(1);
    }
    mtp_head_params params = mtp_head_default_params();
    params.trunk_path = path;
    params.n_threads = 1;
    mtp_head * head = nullptr;
    check(mtp_head_load(kName, &params, &head), "head");
    mtp_session_params session_params = {};
    session_params.max_depth = kDepth;
    mtp_session * session = nullptr;
    check(mtp_session_new(context, head, &session_params, &session), "session");

    check(mtp_session_decode(session, 0, kPrompt, int32_t(sizeof(kPrompt) / sizeof(*kPrompt)), false), "decode");
    int32_t token = 0;
    check(mtp_session_argmax(session, -1, &token), "argmax");
    std::printf("tokens:");
    for (int n = 0; n < kTokens;) {
        int32_t out[MTP_MAX_DEPTH + 1];
        int32_t count = 0;
        check(mtp_session_step(session, 0, token, kDepth, nullptr, out, &count), "step");
        for (int32_t i = 0; i < count; ++i) {
            std::printf(" %d", out[i]);
        }
        token = out[count - 1];
        n += count;
    }
    mtp_session_stats stats;
    check(mtp_session_get_stats(session, &stats), "stats");
    std::printf("\ncycles %d, drafts accepted %d, rolled back %d\n", int(stats.cycles),
                int(stats.tokens - stats.cycles), int(stats.rollbacks));
    mtp_session_free(session);
    mtp_head_free(head);
    llama_free(context);
    llama_model_free(model);
}

static void quantize(ggml_type type) {
    constexpr int64_t kRows = 4, kLength = 1024;
    std::vector<float> values;
    uint32_t random = 1;
    for (int64_t i = 0; i < kRows * kLength; ++i) {
        random = random * 1664525 + 1013904223;
        values.push_back(float(int32_t(random)) / 1e9f);
    }
    std::vector<uint8_t> bytes(size_t(kRows) * ggml_row_size(type, kLength));
    const mtp_quantize_status status =
        mtp_quantize_rows(type, GGML_TYPE_F32, values.data(), kRows, kLength, nullptr, bytes.data(), nullptr);
    uint64_t hash = 14695981039346656037u; // FNV-1a
    for (const uint8_t byte : bytes) {
        hash = (hash ^ byte) * 1099511628211u;
    }
    std::printf("%s: status %d, hash %08x%08x\n", ggml_type_name(type), int(status), unsigned(hash >> 32),
                unsigned(hash));
}

int main(int n, char ** words) {
    if (n != 3) {
        return 2;
    }
    check(mtp_log_listen(false), "log");
    check(mtp_tell_crashes(), "crashes");
    check(mtp_check_runtime(), "runtime");
    generate(words[1]);
    look_up();
    refuse("no such file");
    refuse(words[2]);
    for (const ggml_type type : {GGML_TYPE_F16, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, GGML_TYPE_IQ4_XS}) {
        quantize(type);
    }
    return 0;
}

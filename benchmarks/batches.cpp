// Evaluates batches with one of two llama.h, for batches.py: batches MODEL COPIED THREADS
//
// Prints "ready", and then for each line "N BEGINS COUNT" the mean time in seconds of COUNT batches of N tokens: within a
// sequence, or if BEGINS is 1 at its beginning, with clearing the one before.
// Compiled with -DIK for the llama.h of ik_llama.cpp.

#include "llama.h"

#include <chrono>
#include <cstdio>
#include <cstdlib>

namespace {

constexpr int most_tokens = 512;
llama_context * context = nullptr;
int position = 0;
unsigned random_state = 1;

void clear() {
    position = 0;
#if defined(IK)
    llama_kv_cache_clear(context);
#else
    llama_memory_clear(llama_get_memory(context), false);
#endif
}

void evaluate(int n) {
    static llama_token tokens[most_tokens];
    for (int i = 0; i < n; i++) {
        random_state = random_state * 1664525u + 1013904223u;
        tokens[i] = (llama_token) (random_state >> 8) % 10000;
    }
#if defined(IK)
    const llama_batch batch = llama_batch_get_one(tokens, n, position, 0);
#else
    const llama_batch batch = llama_batch_get_one(tokens, n);
#endif
    if (llama_decode(context, batch) != 0) {
        fprintf(stderr, "llama_decode failed\n");
        exit(1);
    }
    llama_synchronize(context);
    position += n;
}

double seconds() {
    using clock = std::chrono::steady_clock;
    return std::chrono::duration<double>(clock::now().time_since_epoch()).count();
}

}  // namespace

int main(int argc, char ** argv) {
    if (argc != 4) {
        fprintf(stderr, "batches MODEL COPIED THREADS\n");
        return 2;
    }
    const bool copied = atoi(argv[2]) != 0;
    llama_backend_init();
    llama_model_params model_params = llama_model_default_params();
    llama_context_params params = llama_context_default_params();
#if defined(IK)
    model_params.use_mmap = !copied;
    model_params.use_thp = copied;
    params.flash_attn = true;
#else
    model_params.load_mode = copied ? LLAMA_LOAD_MODE_NONE : LLAMA_LOAD_MODE_MMAP;
    params.flash_attn_type = LLAMA_FLASH_ATTN_TYPE_ENABLED;
#endif
    params.n_ctx = 4096;
    params.n_threads = params.n_threads_batch = atoi(argv[3]);
    llama_model * model = llama_model_load_from_file(argv[1], model_params);
    context = model ? llama_init_from_model(model, params) : nullptr;
    if (!context) {
        fprintf(stderr, "%s cannot be loaded\n", argv[1]);
        return 1;
    }
    for (int i = 0; i < 20; i++) {  // experts are read from the file
        clear();
        evaluate(4);
        evaluate(1);
    }
    puts("ready");
    fflush(stdout);

    int n, begins, count;
    while (scanf("%d %d %d", &n, &begins, &count) == 3 && n > 0 && n <= most_tokens) {
        random_state = 7;
        clear();
        evaluate(1);
        const double begin = seconds();
        for (int i = 0; i < count; i++) {
            if (begins) {
                clear();
            }
            evaluate(n);
        }
        printf("%.6f\n", (seconds() - begin) / count);
        fflush(stdout);
    }
}

/* Preloaded before libggml-base: no device can read rows of a Q8_0 matrix, as some GPUs cannot of NVFP4. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

enum { Q8_0 = 8 };

/* The beginning of ggml_tensor. */
struct tensor {
    int32_t type;
    void * buffer;
    int64_t ne[4];
    uint64_t nb[4];
    int32_t op;
    int32_t op_params[16];
    int32_t flags;
    const struct tensor * src[10];
};

static void * real(const char * name) {
    return dlsym(dlopen("libggml-base.so.0", RTLD_LAZY | RTLD_NOLOAD), name);
}

bool ggml_backend_supports_op(void * backend, const struct tensor * op) {
    const char * (*name)(const void *) = (const char * (*)(const void *)) real("ggml_op_desc");
    bool (*supports)(void *, const void *) = (bool (*)(void *, const void *)) real("ggml_backend_supports_op");
    const bool gathers = strcmp(name(op), "GET_ROWS") == 0 && op->src[0]->type == Q8_0;
    return !gathers && supports(backend, op);
}

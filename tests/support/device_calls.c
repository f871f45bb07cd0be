/* Counts what a process exchanges with ggml's devices: preloaded, it stands before libggml-base.
 *
 * Calls from inside another counted call are part of that one. On the CPU, whose tensors are in host
 * memory, "up" and "down" are copies into tensors and out of them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>

struct counts {
    int64_t graphs, syncs, bytes_up, bytes_down, ups, downs;
};

static struct counts counted;
static __thread int inside;

struct counts device_calls(void) {
    const struct counts out = counted;
    counted = (struct counts) { 0 };
    return out;
}

static void * real(const char * name) {
    void * library = dlopen("libggml-base.so.0", RTLD_LAZY | RTLD_NOLOAD);
    return dlsym(library, name);
}

static int64_t size_of(void * tensor) {
    static size_t (*f)(const void *);
    if (!f) {
        f = (size_t (*)(const void *)) real("ggml_nbytes");
    }
    return (int64_t) f(tensor);
}

#define COUNT(what)             \
    if (inside == 0) {          \
        what;                   \
    }                           \
    ++inside;

#define REAL(result, name, parameters)                \
    static result (*f) parameters;                    \
    if (!f) {                                         \
        f = (result (*) parameters) real(#name);      \
    }

typedef void * p;

int ggml_backend_graph_compute(p backend, p graph) {
    REAL(int, ggml_backend_graph_compute, (p, p))
    COUNT((counted.graphs++, counted.syncs++))
    const int out = f(backend, graph);
    --inside;
    return out;
}

int ggml_backend_graph_compute_async(p backend, p graph) {
    REAL(int, ggml_backend_graph_compute_async, (p, p))
    COUNT(counted.graphs++)
    const int out = f(backend, graph);
    --inside;
    return out;
}

void ggml_backend_synchronize(p backend) {
    REAL(void, ggml_backend_synchronize, (p))
    COUNT(counted.syncs++)
    f(backend);
    --inside;
}

void ggml_backend_tensor_set(p tensor, const void * data, size_t offset, size_t size) {
    REAL(void, ggml_backend_tensor_set, (p, const void *, size_t, size_t))
    COUNT((counted.ups++, counted.syncs++, counted.bytes_up += size))
    f(tensor, data, offset, size);
    --inside;
}

void ggml_backend_tensor_get(p tensor, void * data, size_t offset, size_t size) {
    REAL(void, ggml_backend_tensor_get, (p, void *, size_t, size_t))
    COUNT((counted.downs++, counted.syncs++, counted.bytes_down += size))
    f(tensor, data, offset, size);
    --inside;
}

/* As the scheduler moves inputs to a device. */
void ggml_backend_tensor_copy(p from, p to) {
    REAL(void, ggml_backend_tensor_copy, (p, p))
    COUNT((counted.ups++, counted.syncs++, counted.bytes_up += size_of(from)))
    f(from, to);
    --inside;
}

void ggml_backend_tensor_copy_async(p from_backend, p to_backend, p from, p to) {
    REAL(void, ggml_backend_tensor_copy_async, (p, p, p, p))
    COUNT((counted.ups++, counted.bytes_up += size_of(from)))
    f(from_backend, to_backend, from, to);
    --inside;
}

void ggml_backend_tensor_set_async(p backend, p tensor, const void * data, size_t offset, size_t size) {
    REAL(void, ggml_backend_tensor_set_async, (p, p, const void *, size_t, size_t))
    COUNT((counted.ups++, counted.bytes_up += size))
    f(backend, tensor, data, offset, size);
    --inside;
}

void ggml_backend_tensor_get_async(p backend, p tensor, void * data, size_t offset, size_t size) {
    REAL(void, ggml_backend_tensor_get_async, (p, p, void *, size_t, size_t))
    COUNT((counted.downs++, counted.bytes_down += size))
    f(backend, tensor, data, offset, size);
    --inside;
}

/* Counts what a process exchanges with ggml's devices: preloaded, it stands before libggml-base.
 *
 * Calls from inside another counted call are part of that one. Waits and copies are those of devices
 * with memory of their own: waiting for the CPU returns at once, and its tensors are in host memory.
 * A copy between tensors on devices is counted as `moved`. At its end a process that has computed graphs on a
 * device adds a line for each of them to the file that DEVICE_CALLS names: the counts when it began.
 *
 * A device is busy with a graph from its launch, between the beginning and the end of that call, to the end of the wait
 * for it: nanoseconds at least, and at most. Several devices are counted as one. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

struct counts {
    int64_t cpu_graphs, graphs, syncs, bytes_up, bytes_down, bytes_moved, ups, downs, busy_least, busy_most;
};

enum { MOST = 1 << 14, MOST_BACKENDS = 8 };

static struct counts counted;
static struct counts before_graphs[MOST];
static size_t n_before_graphs;
static __thread int inside;

/* The backends whose graphs are not known to be done, and the times of the first launch of these. */
static void * launched[MOST_BACKENDS];
static int n_launched;
static int64_t began, queued;

struct counts device_calls(void) {
    const struct counts out = counted;
    counted = (struct counts) { 0 };
    return out;
}

__attribute__((destructor)) static void write_counts(void) {
    const char * path = getenv("DEVICE_CALLS");
    FILE * file = path ? fopen(path, "a") : NULL;
    for (size_t graph = 0; file && graph < n_before_graphs; ++graph) {
        const int64_t * values = (const int64_t *) &before_graphs[graph];
        for (size_t i = 0; i < sizeof(counted) / sizeof(*values); ++i) {
            fprintf(file, "%lld ", (long long) values[i]);
        }
        fputc('\n', file);
    }
    if (file) {
        fclose(file);
    }
}

static void count_graph(int on_cpu) {
    if (!on_cpu && n_before_graphs < MOST) {
        before_graphs[n_before_graphs++] = counted;
    }
    *(on_cpu ? &counted.cpu_graphs : &counted.graphs) += 1;
}

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}

static void launch(void * backend, int64_t from) {
    if (n_launched == 0) {
        began = from;
        queued = now();
    }
    for (int i = 0; i < n_launched; ++i) {
        if (launched[i] == backend) {
            return;
        }
    }
    if (n_launched < MOST_BACKENDS) {
        launched[n_launched++] = backend;
    }
}

static void done(void * backend) {
    for (int i = 0; i < n_launched; ++i) {
        if (launched[i] == backend) {
            launched[i] = launched[--n_launched];
            if (n_launched == 0) {
                counted.busy_least += now() - queued;
                counted.busy_most += now() - began;
            }
            return;
        }
    }
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

#define COUNT_IF(condition, what)        \
    if (inside == 0 && (condition)) {    \
        what;                            \
    }                                    \
    ++inside;

#define COUNT(what) COUNT_IF(1, what)

#define REAL_AS(result, f, name, parameters)          \
    static result (*f) parameters;                    \
    if (!f) {                                         \
        f = (result (*) parameters) real(#name);      \
    }

#define REAL(result, name, parameters) REAL_AS(result, f, name, parameters)

typedef void * p;

static int on_cpu(p backend) {
    REAL(p, ggml_backend_get_device, (p))
    REAL_AS(int, type, ggml_backend_dev_type, (p))
    return type(f(backend)) == 0; /* GGML_BACKEND_DEVICE_TYPE_CPU */
}

/* A tensor's buffer is its second field, after the type. */
static int on_host(p tensor) {
    p buffer = ((p *) tensor)[1];
    REAL(_Bool, ggml_backend_buffer_is_host, (p))
    return buffer != NULL && f(buffer);
}

static void count_copy(p from, p to) {
    const int64_t size = size_of(from);
    const int up = on_host(from), down = on_host(to);
    if (up && !down) {
        counted.ups++;
        counted.bytes_up += size;
    } else if (down && !up) {
        counted.downs++;
        counted.bytes_down += size;
    } else if (!up) {
        counted.bytes_moved += size;
    }
}

int ggml_backend_graph_compute(p backend, p graph) {
    REAL(int, ggml_backend_graph_compute, (p, p))
    COUNT((count_graph(on_cpu(backend)), counted.syncs += !on_cpu(backend)))
    const int64_t from = now();
    const int out = f(backend, graph);
    if (--inside == 0 && !on_cpu(backend)) {
        launch(backend, from);
        done(backend);
    }
    return out;
}

int ggml_backend_graph_compute_async(p backend, p graph) {
    REAL(int, ggml_backend_graph_compute_async, (p, p))
    COUNT(count_graph(on_cpu(backend)))
    const int64_t from = now();
    const int out = f(backend, graph);
    if (--inside == 0 && !on_cpu(backend)) {
        launch(backend, from);
    }
    return out;
}

void ggml_backend_synchronize(p backend) {
    REAL(void, ggml_backend_synchronize, (p))
    COUNT_IF(!on_cpu(backend), counted.syncs++)
    f(backend);
    if (--inside == 0) {
        done(backend);
    }
}

void ggml_backend_tensor_set(p tensor, const void * data, size_t offset, size_t size) {
    REAL(void, ggml_backend_tensor_set, (p, const void *, size_t, size_t))
    COUNT_IF(!on_host(tensor), (counted.ups++, counted.syncs++, counted.bytes_up += size))
    f(tensor, data, offset, size);
    --inside;
}

void ggml_backend_tensor_get(p tensor, void * data, size_t offset, size_t size) {
    REAL(void, ggml_backend_tensor_get, (p, void *, size_t, size_t))
    COUNT_IF(!on_host(tensor), (counted.downs++, counted.syncs++, counted.bytes_down += size))
    f(tensor, data, offset, size);
    --inside;
}

/* As the scheduler moves inputs to a device. */
void ggml_backend_tensor_copy(p from, p to) {
    REAL(void, ggml_backend_tensor_copy, (p, p))
    COUNT_IF(!on_host(from) || !on_host(to), (counted.syncs++, count_copy(from, to)))
    f(from, to);
    --inside;
}

void ggml_backend_tensor_copy_async(p from_backend, p to_backend, p from, p to) {
    REAL(void, ggml_backend_tensor_copy_async, (p, p, p, p))
    COUNT(count_copy(from, to))
    f(from_backend, to_backend, from, to);
    --inside;
}

void ggml_backend_tensor_set_async(p backend, p tensor, const void * data, size_t offset, size_t size) {
    REAL(void, ggml_backend_tensor_set_async, (p, p, const void *, size_t, size_t))
    COUNT_IF(!on_host(tensor), (counted.ups++, counted.bytes_up += size))
    f(backend, tensor, data, offset, size);
    --inside;
}

void ggml_backend_tensor_get_async(p backend, p tensor, void * data, size_t offset, size_t size) {
    REAL(void, ggml_backend_tensor_get_async, (p, p, void *, size_t, size_t))
    COUNT_IF(!on_host(tensor), (counted.downs++, counted.bytes_down += size))
    f(backend, tensor, data, offset, size);
    --inside;
}

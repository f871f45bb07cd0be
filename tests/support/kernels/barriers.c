// Threads of ggml-cpu that wait for each other: graphs whose operations read what all threads wrote in the one before.
//
//     barriers graphs THREADS GRAPHS    computes GRAPHS graphs and checks what the threads read
//     barriers idle THREADS             prints the CPU time in milliseconds that the other threads take while one sleeps
//                                       for 300 ms in an operation, and while all wait for the next graph as long
//
// Compiled together with the patched ggml-cpu.c and -fsanitize=thread, which reports unordered reads and writes.

#include "ggml-cpu.h"
#include "ggml.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

#define MAX_THREADS 16
#define OPERATIONS  400
#define IDLE_US     300000

static int wrote[2][MAX_THREADS];  // by each thread, in the operations with even and with odd numbers
static int operation_of[OPERATIONS];

static void sleep_us(long us) {
    struct timespec time = { us / 1000000, us % 1000000 * 1000 };
    nanosleep(&time, NULL);
}

static double cpu_ms(void) {
    struct rusage use;
    getrusage(RUSAGE_SELF, &use);
    return (use.ru_utime.tv_sec + use.ru_stime.tv_sec) * 1e3 + (use.ru_utime.tv_usec + use.ru_stime.tv_usec) * 1e-3;
}

// Returns whether a thread begins an operation 300 us late, so that the others sleep: one thread in some operations of the
// second quarter and in all of the third.
static int is_late(int operation, int ith, int nth) {
    const unsigned chosen = operation * 2654435761u >> 16;
    const int      part   = operation * 4 / OPERATIONS;
    return (part == 1 ? chosen % 5 == 0 : part == 2) && (int) (chosen / 5 % nth) == ith;
}

static void operate(struct ggml_tensor * dst, const struct ggml_tensor * a, int ith, int nth, void * data) {
    (void) dst, (void) a;
    const int operation = *(const int *) data;
    if (is_late(operation, ith, nth)) {
        sleep_us(300);
    }
    for (int other = 0; other < nth; other++) {
        if (wrote[operation % 2][other] != operation) {
            fprintf(stderr, "operation %d: thread %d is behind\n", operation, other);
            exit(1);
        }
    }
    wrote[(operation + 1) % 2][ith] = operation + 1;
}

// Returns the CPU time of all threads while this one sleeps.
static double idle_cpu_ms(void) {
    const double before = cpu_ms();
    sleep_us(IDLE_US);
    return cpu_ms() - before;
}

static void idle(struct ggml_tensor * dst, const struct ggml_tensor * a, int ith, int nth, void * data) {
    (void) dst, (void) a, (void) nth, (void) data;
    if (ith == 0) {
        printf("%.1f ", idle_cpu_ms());
    }
}

static void compute(struct ggml_cgraph * graph, int n_threads, struct ggml_threadpool * pool) {
    struct ggml_cplan plan = ggml_graph_plan(graph, n_threads, pool);
    if (plan.work_size > 0 || ggml_graph_compute(graph, &plan) != GGML_STATUS_SUCCESS) {
        exit(1);
    }
}

int main(int argc, char ** argv) {
    if (argc < 3) {
        return 2;
    }
    const int n_threads = atoi(argv[2]);

    struct ggml_init_params init = { 16 << 20, NULL, false };
    struct ggml_context *   ctx  = ggml_init(init);
    struct ggml_tensor *    node = ggml_new_tensor_1d(ctx, GGML_TYPE_F32, 1);

    struct ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    struct ggml_threadpool *      pool   = ggml_threadpool_new(&params);
    struct ggml_cgraph *          graph  = ggml_new_graph(ctx);

    if (!strcmp(argv[1], "idle")) {
        ggml_build_forward_expand(graph, ggml_map_custom1(ctx, node, idle, GGML_N_TASKS_MAX, NULL));
        compute(graph, n_threads, pool);
        printf("%.1f\n", idle_cpu_ms());
    } else {
        for (int i = 0; i < OPERATIONS; i++) {
            operation_of[i] = i;
            node = ggml_map_custom1(ctx, node, operate, GGML_N_TASKS_MAX, &operation_of[i]);
        }
        ggml_build_forward_expand(graph, node);
        for (int i = 0; i < atoi(argv[3]); i++) {
            const int n = i % 3 == 2 ? n_threads - 1 : n_threads;  // of the pool
            memset(wrote, 0, sizeof wrote);
            compute(graph, n, pool);
            for (int ith = 0; ith < n; ith++) {
                if (wrote[OPERATIONS % 2][ith] != OPERATIONS) {
                    fprintf(stderr, "graph %d: thread %d is not done\n", i, ith);
                    return 1;
                }
            }
        }
        printf("done\n");
    }

    ggml_threadpool_free(pool);
    ggml_free(ctx);
    return 0;
}

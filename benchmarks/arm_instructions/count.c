// A plugin of qemu 7 and 8 that prints how many instructions a program executed. Declared here
// (the plugins' interface, version 1) because not every distribution packs the header.

#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define SEEN __attribute__((visibility("default")))

struct qemu_plugin_tb;
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb * block);
void qemu_plugin_register_vcpu_tb_trans_cb(uint64_t id, void (*call)(uint64_t, struct qemu_plugin_tb *));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb * block, int add_u64, void * sum, uint64_t value);
void qemu_plugin_register_atexit_cb(uint64_t id, void (*call)(uint64_t, void *), void * data);

SEEN int qemu_plugin_version = 1;

static uint64_t executed;

static void on_translation(uint64_t id, struct qemu_plugin_tb * block) {
    (void) id;
    qemu_plugin_register_vcpu_tb_exec_inline(block, 0, &executed, qemu_plugin_tb_n_insns(block));
}

static void on_exit(uint64_t id, void * data) {
    (void) id;
    (void) data;
    fprintf(stderr, "executed %" PRIu64 "\n", executed);
}

SEEN int qemu_plugin_install(uint64_t id, const void * info, int count, char ** arguments) {
    (void) info;
    (void) count;
    (void) arguments;
    qemu_plugin_register_vcpu_tb_trans_cb(id, on_translation);
    qemu_plugin_register_atexit_cb(id, on_exit, NULL);
    return 0;
}

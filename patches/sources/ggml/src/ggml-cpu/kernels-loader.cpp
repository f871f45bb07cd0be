#include "ggml-cpu.h"

#include <atomic>
#include <string>

#if defined(__linux__) || defined(__APPLE__)
#    include <dlfcn.h>
#endif

void ggml_backend_cpu_load_kernels();

// Loads libmtp_kernels, if it lies beside this library. It registers its kernels as an entry of the extra buffer types, and
// its hooks for graphs.
void ggml_backend_cpu_load_kernels() {
#if defined(GGML_BACKEND_SHARED) && (defined(__linux__) || defined(__APPLE__))
    static std::atomic_flag begun = ATOMIC_FLAG_INIT; // it asks for this backend
    Dl_info own;
    if (begun.test_and_set() || !dladdr((const void *) ggml_backend_cpu_reg, &own) || !own.dli_fname) {
        return;
    }
#if defined(__APPLE__)
    const std::string name = "libmtp_kernels.dylib";
#else
    const std::string name = "libmtp_kernels.so";
#endif
    const std::string path    = own.dli_fname;
    const std::string library = path.substr(0, path.find_last_of('/') + 1) + name;

    void * const handle  = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    const auto   plug_in = handle ? (int (*)(const char *)) dlsym(handle, "mtp_kernels_plug_in") : nullptr;
    if (plug_in) {
        plug_in(own.dli_fname);
    }
#endif
}

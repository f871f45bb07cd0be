// A backend file for programs whose ggml loads its CPU backend at run time (GGML_BACKEND_DL), from the best of several
// files beside each other: libggml-cpu-haswell.so, libggml-cpu-zen4.so, …. `mtp-gguf kernels install` puts this one beside
// them as libggml-cpu-mtp.so. Its score is higher than theirs, so ggml loads it; it loads the best of them, plugs in the
// kernels, and returns what the best one returns.

#include "mtp_kernels.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dirent.h>
#include <dlfcn.h>
#include <string>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

#if defined(__APPLE__)
constexpr const char suffix[] = ".dylib";
#else
constexpr const char suffix[] = ".so";
#endif
constexpr const char prefix[] = "libggml-cpu-";
constexpr const char kernels[] = "libmtp_kernels";

struct place {
    std::string folder;  // with a slash at its end
    std::string name;    // of this file
};

place own_place() {
    Dl_info info;
    if (!dladdr((void *) own_place, &info) || !info.dli_fname) {
        return {};
    }
    const std::string path = info.dli_fname;
    const size_t slash = path.rfind('/');
    return slash == std::string::npos ? place{ "./", path } : place{ path.substr(0, slash + 1), path.substr(slash + 1) };
}

// What the library says of this CPU: 0 if it does not run here.
int score_of(void * library) {
    const auto score = (int (*)()) dlsym(library, "ggml_backend_score");
    return score ? score() : 0;
}

// The path of the file beside this one with the highest score; "" if none runs on this CPU.
std::string best_variant() {
    const place own = own_place();
    DIR * folder = opendir(own.folder.c_str());
    std::string best;
    int best_score = 0;
    while (const dirent * entry = folder ? readdir(folder) : nullptr) {
        const std::string name = entry->d_name;
        const size_t ending = sizeof(suffix) - 1;
        if (name == own.name || name.rfind(prefix, 0) != 0 || name.size() < ending ||
            name.compare(name.size() - ending, ending, suffix) != 0) {
            continue;
        }
        void * library = dlopen((own.folder + name).c_str(), RTLD_NOW | RTLD_LOCAL);
        if (!library) {
            continue;  // another file of that name, or for another system
        }
        const int score = score_of(library);
        if (score > best_score) {
            best_score = score;
            best = own.folder + name;
        }
        dlclose(library);
    }
    if (folder) {
        closedir(folder);
    }
    return best;
}

}  // namespace

// Higher than the sum of ggml's scores, one bit for each instruction set; 0, so that ggml takes a file of its own, where
// none of them runs or the kernels are turned off.
EXPORT int ggml_backend_score(void) {
    const char * words = getenv("MTP_GGUF_KERNELS");
    return (words && !strcmp(words, "0")) || best_variant().empty() ? 0 : 1 << 28;
}

EXPORT void * ggml_backend_init(void) {
    const std::string variant = best_variant();
    void * library = variant.empty() ? nullptr : dlopen(variant.c_str(), RTLD_NOW | RTLD_LOCAL);
    const auto init = library ? (void * (*) ()) dlsym(library, "ggml_backend_init") : nullptr;
    if (!init) {
        return nullptr;
    }
    void * registration = init();
    void * plug = dlopen((own_place().folder + kernels + suffix).c_str(), RTLD_NOW | RTLD_LOCAL);
    const auto plug_in = plug ? (enum mtp_kernels_status(*)(const char *)) dlsym(plug, "mtp_kernels_plug_in") : nullptr;
    if (!plug_in) {
        fprintf(stderr, "mtp_kernels: not used: %s\n", dlerror());
    } else if (plug_in(variant.c_str()) > MTP_KERNELS_OFF) {
        fprintf(stderr, "mtp_kernels: not used: %s\n", ((const char * (*) ()) dlsym(plug, "mtp_kernels_reason"))());
    }
    return registration;
}

#include "session/nextn.h"

#include "error.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace mtp {

void * exported(const char * name) {
#ifdef _WIN32
    for (const char * file : {"llama.dll", "libllama.dll"}) { // as Microsoft's linker and mingw-w64 name it
        const HMODULE library = GetModuleHandleA(file);
        if (FARPROC found = library ? GetProcAddress(library, name) : nullptr) {
            return reinterpret_cast<void *>(found);
        }
    }
    return nullptr;
#else
    // llama_cpp loads the library with its symbols global, which is where ours resolve to as well.
    return dlsym(RTLD_DEFAULT, name);
#endif
}

// The first of a function's names that is exported: in C, and in C++ as compilers mangle it.
template <class F> static F find(const char * c, const char * itanium, const char * msvc) {
    for (const char * name : {c, itanium, msvc}) {
        if (void * found = exported(name)) {
            return reinterpret_cast<F>(found);
        }
    }
    throw Error(MTP_ERROR_BACKEND, format("llama.cpp: expected the function %s, found none; use the version that "
                                          "this library was built for", c));
}

const Nextn & nextn() {
    static const Nextn functions = {
        find<decltype(Nextn::set)>("llama_set_embeddings_nextn", "_Z26llama_set_embeddings_nextnP13llama_contextbb",
                                   "?llama_set_embeddings_nextn@@YAXPEAUllama_context@@_N1@Z"),
        find<decltype(Nextn::get)>("llama_get_embeddings_nextn", "_Z26llama_get_embeddings_nextnP13llama_context",
                                   "?llama_get_embeddings_nextn@@YAPEAMPEAUllama_context@@@Z"),
    };
    return functions;
}

ggml_tensor * model_matrix(const llama_model * model, bool output) {
    static const auto get = reinterpret_cast<ggml_tensor * (*)(const llama_model *, bool)>(
        exported("llama_model_get_vocab_matrix"));
    return get != nullptr ? get(model, output) : nullptr;
}

const DeviceOutputs * device_outputs() {
    static const DeviceOutputs functions = {
        reinterpret_cast<decltype(DeviceOutputs::set)>(exported("llama_set_outputs_on_device")),
        reinterpret_cast<decltype(DeviceOutputs::largest)>(exported("llama_get_largest_token_ith")),
        reinterpret_cast<decltype(DeviceOutputs::top)>(exported("llama_get_largest_logits_ith")),
        reinterpret_cast<decltype(DeviceOutputs::hidden)>(exported("llama_get_embeddings_nextn_tensor")),
    };
    return functions.set && functions.largest && functions.top && functions.hidden ? &functions : nullptr;
}

} // namespace mtp

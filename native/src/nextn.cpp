#include "nextn.h"

#include "error.h"

#ifdef _WIN32
#define WIN32_LEAN_AND_MEAN
#include <windows.h>
#else
#include <dlfcn.h>
#endif

namespace mtp {

// A function of the loaded llama.cpp, NULL if it has none of this name.
static void * exported(const char * name) {
#ifdef _WIN32
    HMODULE library = nullptr;
    const DWORD flags = GET_MODULE_HANDLE_EX_FLAG_FROM_ADDRESS | GET_MODULE_HANDLE_EX_FLAG_UNCHANGED_REFCOUNT;
    if (!GetModuleHandleExA(flags, (LPCSTR) &llama_decode, &library)) {
        return nullptr;
    }
    return (void *) GetProcAddress(library, name);
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

} // namespace mtp

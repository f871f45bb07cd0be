// Detects that a device has failed, before something that cannot throw waits for it.

#include "error.h"

#include "llama.h"

bool mtp_context_has_failed(llama_context * context) {
    if (context == nullptr) {
        return false;
    }
    return mtp::guard([&] { llama_synchronize(context); }) != MTP_OK;
}

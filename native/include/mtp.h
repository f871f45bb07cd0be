/* mtp.h: the C surface of mtp-gguf's native library.
 *
 * Opaque handles, scalars and caller-owned buffers; every call that can fail returns an mtp_status
 * and leaves a sentence for mtp_last_error(). No C++ type and no exception crosses this header. */
#ifndef MTP_H
#define MTP_H

#ifdef __cplusplus
extern "C" {
#endif

#if defined(_WIN32)
#define MTP_API __declspec(dllexport)
#else
#define MTP_API __attribute__((visibility("default")))
#endif

/* The sentence left by the last failing call of this thread; "" when none failed. Valid until the
 * next call of this thread. */
MTP_API const char * mtp_last_error(void);

#ifdef __cplusplus
}
#endif

#endif

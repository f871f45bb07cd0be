/* CPU kernels that plug into any ggml-cpu at run time.
 *
 * The library is linked with nothing of ggml. mtp_kernels_plug_in() registers it in a ggml-cpu that the process has loaded,
 * which from then on asks it for every operation; what it does not compute, ggml does as before. Nothing is registered
 * twice. It stays loaded until the process ends.
 *
 * The variable MTP_GGUF_KERNELS: "0" turns everything off; names of operations ("MUL_MAT,SSM_CONV") leave the others to
 * ggml; "avx512", "avx_vnni", "avx2" or "dotprod" restricts the instruction set; "all" also takes what is not expected to be
 * faster (ARM). How products read weights is measured while the model runs, and kept in the user's cache folder: "anew"
 * does not read what was kept; "fixed" measures nothing; "hint" or "no_hint", "two_streams" or "one_stream", "panels" or
 * "rows", "amx" or "no_amx" leave out the others, wherever there is a choice.
 *
 * The variable MTP_GGUF_READ_AHEAD: "0" leaves experts that are not in memory to page faults.
 */

#ifndef MTP_KERNELS_H
#define MTP_KERNELS_H

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MTP_KERNELS_API __attribute__((visibility("default")))

enum mtp_kernels_status {
    MTP_KERNELS_PLUGGED_IN = 0,
    MTP_KERNELS_OFF = 1,         /* MTP_GGUF_KERNELS=0 */
    MTP_KERNELS_NO_CPU = 2,      /* this CPU has none of the instruction sets */
    MTP_KERNELS_NO_GGML = 3,     /* no ggml-cpu, or one that exports too little */
    MTP_KERNELS_OTHER_GGML = 4   /* its structures are not those that the library knows */
};

/* Registers the kernels in ggml-cpu. `path`: the library that the process has loaded under this name, or one that is linked
 * with it, such as libllama; NULL: the one whose functions the process exports. Copies of a file are other libraries than
 * the one that is loaded. Call it before a graph is computed. */
MTP_KERNELS_API enum mtp_kernels_status mtp_kernels_plug_in(const char * path);

/* The reason for the last status other than 0, in a sentence; "" if there was none. */
MTP_KERNELS_API const char * mtp_kernels_reason(void);

/* The instruction set, such as "AVX512_VNNI"; NULL if the kernels are not plugged in. */
MTP_KERNELS_API const char * mtp_kernels_name(void);

/* Writes at most `size` bytes, the last of which is 0: the operations that are computed here, separated by commas; then a
 * line for each kind of operation that is left to ggml because the results differ. Returns the length of the whole text. */
MTP_KERNELS_API size_t mtp_kernels_report(char * text, size_t size);

/* Writes at most `size` bytes, the last of which is 0: the types of weights, such as "q4_K", whose products are computed here
 * for as many columns as a batch of drafts has, separated by commas. Returns the length of the whole text. */
MTP_KERNELS_API size_t mtp_kernels_types(char * text, size_t size);

/* Writes at most `size` bytes, the last of which is 0: a line for each kind of product that was measured, or is being
 * measured. Type of weights; number of columns, the most of their class; "long" rows, of which the columns leave no room in
 * an L1 cache, or "short" ones; "dense", or "experts"; number of threads; and "measuring", or what computes them: an
 * instruction set, with "+hint", "+two_streams" or "+panels", its nanoseconds for a MiB of weights, and how many times as fast
 * it is as the first candidate and as the fastest other one. Returns the length of the whole text. */
MTP_KERNELS_API size_t mtp_kernels_choices(char * text, size_t size);

/* What n_threads of this machine read and multiply at most, together: bytes a second of the `size` bytes at `data`, such as the
 * weights of a model, and products of two 8-bit integers a second by the widest instruction that the kernels use. Each
 * takes about so many seconds. 0 if the kernels are not plugged in, or there is no memory for threads. */
MTP_KERNELS_API double mtp_kernels_read_limit(const void * data, size_t size, int n_threads, double seconds);
MTP_KERNELS_API double mtp_kernels_product_limit(int n_threads, double seconds);

/* How many operations of this name were computed here since the kernels were plugged in. */
MTP_KERNELS_API long mtp_kernels_computed(const char * operation);

#ifdef __cplusplus
}
#endif

#endif

// Which candidate multiplies weights of a type with so many columns: measured while the model runs, and kept.
//
// What a thread reads of a product, half a megabyte at a time, is computed by one candidate after the other and timed, from
// the second time on that the model is read: the weights are then where they will be. Candidates that are clearly slower are
// left out soon. Each has been proved to give the same bits (try_out_candidates), so the text does not depend on what is chosen.
//
// The table of choices is a file of the user's cache folder, of one CPU and one version of the library. It is read when the
// library plugs in, and written when something was decided. It can only make a product slower: what it names has to be a
// candidate here, and to be proved.

#pragma once

#include "operation.h"

#include <string>

namespace mtp {

// Gets ready to choose: reads the table, unless `restriction`, the words of MTP_GGUF_KERNELS, includes "fixed".
void begin_choices(const kernel_set & kernels, const char * restriction);

// The candidate for each piece that one thread computes of one product.
class choice {
public:
    // columns: the most that a matrix is multiplied with.
    choice(const ggml_tensor * op, int64_t columns, const task & task);
    ~choice();
    choice(const choice &) = delete;

    // For a piece of so many bytes; `own`: of this thread's share, whose pieces follow each other.
    const candidate & next(size_t bytes, bool own);

    // How a candidate reads in this thread's next call. Calls for the same group have the same columns.
    reading how(const candidate & of, int64_t group);

private:
    struct cell * at = nullptr;  // where it is being measured
    const candidate * now;
    int64_t began = 0;  // of a stretch, in nanoseconds; 0: none
    size_t stretch = 0;  // its bytes so far
    const candidate * called = nullptr;  // in the last call
    int64_t called_for = 0;               // its group

    void end_stretch();
};

// Has a candidate compute the small case that is being proved, while it lives.
struct forced_candidate {
    explicit forced_candidate(const candidate * of);
    ~forced_candidate();
};

// The candidates for a product, in this process.
int candidates_for(const ggml_tensor * op, int64_t columns, candidate (&to)[most_candidates]);

// Never takes this one for weights of this type again: its result is not that of the first candidate.
void exclude(ggml_type type, const candidate & of);

// A line for each choice, or for what is still being measured: type, columns, length of rows, "dense" or "experts", threads,
// candidate, its nanoseconds per MiB, and how many times as fast it is as the first candidate, and as the runner-up.
std::string choices();

// A choice, as the table and people write it: "AVX2+hint+two_streams".
std::string name_of(const candidate & of);

}  // namespace mtp

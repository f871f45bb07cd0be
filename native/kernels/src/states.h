// Recurrent states that a graph gathers from a memory (GET_ROWS), updates (GATED_DELTA_NET) and copies back (CPY). If nothing
// else needs the copies, they are read and written in the memory.
//
// The operation that leaves out a copy writes a note in its place, which says where the rows are, and whoever reads them
// looks for one first. So it matters to nobody what other threads, graphs and contexts do: a note lasts as long as the
// copy would have.

#pragma once

#include "operation.h"

namespace mtp {

// Where the rows are whose place `data` is, one address for each; NULL: they are there.
float * const * rows_noted(const void * data);

// GET_ROWS: leaves a note instead of copies, by each thread. False if that is not safe, and rows are to be copied.
bool leave_rows(const task & task, const ggml_tensor * op);

// GATED_DELTA_NET with one state for each sequence: whether its new states may replace the old ones, which lie in `rows`
// instead of being copied to `to`. Leaves a note there, which the copy to the memory finds.
bool replace_rows(const task & task, const ggml_tensor * op, float * const * rows, float * to);

// While a graph is planned: proves that the states come out the same, if `copy` is of states that the kernels update.
void plan_states(const kernel_set & kernels, const ggml_tensor * copy, int n_threads);

// What that proof is kept as, and how often rows were left where they are
extern const operation states_in_memory;
extern std::atomic<long> rows_left;

// Makes notes that nobody else can write.
void prepare_notes();

}  // namespace mtp

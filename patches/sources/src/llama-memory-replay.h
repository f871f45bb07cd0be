#pragma once

#include "ggml-cpp.h"
#include "llama-io.h"

#include "llama.h"

#include <cstdint>
#include <utility>
#include <vector>

struct llama_model;
class llama_memory_recurrent;

//
// rollback by replay: a row of a recurrent memory holds the state before the last tokens and a log of these; the next batch
// replays as many as were kept (ggml_gated_delta_net_replay)
//

// the row that a cell's state comes from; assigning a row forgets the log
struct llama_replay_src {
    int32_t  row   = -1;
    uint32_t n_log =  0; // tokens of the log that count, the cell's position being that of the last of them

    // the snapshots of the tokens in the log are gone, so these cannot be rolled back in a memory that has snapshots, too
    bool no_snapshots = false;

    llama_replay_src & operator=(int32_t new_row) {
        row          = new_row;
        n_log        = 0;
        no_snapshots = false;
        return *this;
    }

    operator int32_t() const {
        return row;
    }
};

// which layers of a memory replay, and what their rows hold
class llama_memory_replay {
public:
    // chooses for a layer: it replays if its device can, otherwise it has snapshots
    bool add_layer(const llama_model & model, int32_t il, ggml_type type_r, ggml_type type_s, bool offload, uint32_t n_rs_seq);

    // tell how the layers that were added roll back
    void log_layers() const;

    bool replays(int32_t il) const;

    bool has_replay()    const { return n_replay > 0; } // some layers replay
    bool has_snapshots() const { return n_replay < n_layer; } // some do not

    // elements of the log at the end of a layer's rows of r_l and s_l, 0 without replay
    int64_t n_embd_log_r(int32_t il) const;
    int64_t n_embd_log_s(int32_t il) const;

    // forget n tokens of the log, false if it does not have these
    static bool roll_back(llama_replay_src & src, llama_pos n);

    // in a layer with replay: a row after n_log tokens of its log, as in a memory without a log
    std::vector<float> replay_r(const ggml_tensor * r, uint32_t row, uint32_t n_log) const;
    std::vector<float> replay_s(      ggml_tensor * s, uint32_t row, uint32_t n_log) const;

    // the inverse of replay_r, for a row without a log
    void set_r(ggml_tensor * r, uint32_t row, const std::vector<float> & data) const;

    uint32_t n_log  = 0; // tokens that can be rolled back
    int64_t  n_conv = 0; // earlier tokens that the convolution looks back to
    int64_t  n_embd_r = 0; // elements of a row without its log
    int64_t  n_embd_s = 0;
    int64_t  S_v = 0, H_k = 0, H_v = 0; // of the gated delta net

private:
    std::vector<bool> layers;

    int n_layer  = 0;
    int n_replay = 0;
};

// rows of layers with replay are written and read as in a memory without a log. Copies on the device are for the same memory
// only: they have the log, too.

class llama_io_write_replay : public llama_io_write_i {
public:
    // rows: ranges of rows that will be written, with those of snapshot i after size*i others
    llama_io_write_replay(
            const llama_memory_recurrent & mem, llama_io_write_i & io,
            const std::vector<std::pair<uint32_t, uint32_t>> & rows, llama_state_seq_flags flags);

    void write(const void * src, size_t size) override;
    void write_tensor(ggml_tensor * tensor, size_t offset, size_t size) override;

    size_t n_bytes() override;

private:
    const llama_memory_recurrent & mem;

    llama_io_write_i & io;

    const bool raw;
};

class llama_io_read_replay : public llama_io_read_i {
public:
    llama_io_read_replay(llama_memory_recurrent & mem, llama_io_read_i & io, llama_state_seq_flags flags);

    // what the constructor of llama_io_write_replay wrote, for the cells from the memory's head on
    bool read_logs(uint32_t cell_count);

    void read(void * dst, size_t size) override;
    void read_tensor(ggml_tensor * tensor, size_t offset, size_t size) override;
    void discard() override;

    size_t n_bytes() override;

private:
    llama_memory_recurrent & mem;

    llama_io_read_i & io;

    const bool raw;
};

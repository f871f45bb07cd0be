#include "grids.h"

#include "ggml_api.h"

#include <cstring>
#include <string>

namespace mtp {

grid_tables grids;

namespace {

// The block whose first elements have number n of the table, and whose other numbers, scales and signs are 0. `put` writes n;
// d: the half float with which an element is its magnitude.
template <class Block, class Word, size_t N, class Put>
void read(ggml_type type, const char * name, uint16_t d, Word (&table)[N], Put put) {
    const type_traits * traits = ggml().traits(type);
    if (std::string(ggml().type_name(type)) != name || traits->type_size != sizeof(Block) || !traits->to_float) {
        return;
    }
    for (size_t n = 0; n < N; n++) {
        Block block = {};
        block.d = d;
        put(block, n);
        float elements[QK_K];
        traits->to_float(&block, elements, QK_K);
        uint8_t bytes[sizeof(Word)];
        for (size_t i = 0; i < sizeof(Word); i++) {
            bytes[i] = (uint8_t) elements[i];
        }
        memcpy(&table[n], bytes, sizeof(Word));
    }
}

constexpr uint16_t one = 0x3c00, four = 0x4400, eight = 0x4800;

}  // namespace

bool has_grid(ggml_type type) {
    return type == GGML_TYPE_IQ2_XXS || type == GGML_TYPE_IQ2_XS || type == GGML_TYPE_IQ2_S || type == GGML_TYPE_IQ3_XXS ||
           type == GGML_TYPE_IQ3_S;
}

void read_grids() {
    read<block_iq3_xxs>(GGML_TYPE_IQ3_XXS, "iq3_xxs", four, grids.iq3_xxs, [](auto & b, size_t n) { b.qs[0] = (uint8_t) n; });
    read<block_iq3_s>(GGML_TYPE_IQ3_S, "iq3_s", one, grids.iq3_s, [](auto & b, size_t n) {
        b.qs[0] = (uint8_t) n;
        b.qh[0] = (uint8_t) (n >> 8);
    });
    read<block_iq2_xxs>(GGML_TYPE_IQ2_XXS, "iq2_xxs", eight, grids.iq2_xxs, [](auto & b, size_t n) { b.qs[0] = (uint8_t) n; });
    read<block_iq2_xs>(GGML_TYPE_IQ2_XS, "iq2_xs", eight, grids.iq2_xs, [](auto & b, size_t n) { b.qs[0] = (uint16_t) n; });
    read<block_iq2_s>(GGML_TYPE_IQ2_S, "iq2_s", eight, grids.iq2_s, [](auto & b, size_t n) {
        b.qs[0] = (uint8_t) n;
        b.qh[0] = (uint8_t) (n >> 8);
    });
}

}  // namespace mtp

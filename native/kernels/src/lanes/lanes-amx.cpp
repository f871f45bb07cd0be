// Products of quants in blocks of 256 with AMX, which multiplies tiles of 16 rows of 64 bytes.
//
// A tile of weights has four consecutive elements of each of 16 rows, which is how panels are unpacked (lanes-super-blocks.h).
// Each element is multiplied by the scale of its sub-block before, in 16 bits, whose lower and upper bytes become tiles of
// their own: their products with the activations are added up over the whole block, without a look at the sub-blocks, and
// lower + 256 * upper is the same whole number that the other kernels find. So the bits are those of the vectors' kernels.

#include "lanes.h"

#include <math.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GNUC__) && defined(__linux__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

LANES_TARGET("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma,f16c,avx2")

#include <immintrin.h>

#include "lanes-dots.h"
#include "lanes-products.h"
#include "lanes-v512-vnni.h"

namespace mtp {
namespace {

using V = vnni_dots<vnni_512>;

constexpr int tile_rows = 16, tile_bytes = 64;
constexpr int tiles_of_block = QK_K / tile_bytes;
static_assert(vector_rows<V> == tile_rows, "a tile is as wide as a vector");

// Instructions on tiles, as text: headers of some compilers describe them wrongly, and older ones have none.
#define TILE_ZERO(t)            __asm__ volatile("tilezero %%tmm" #t ::)
#define TILE_LOAD(t, p, stride) __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #t :: "r"(p), "r"((size_t) (stride)) : "memory")
#define TILE_STORE(t, p)        __asm__ volatile("tilestored %%tmm" #t ", (%0,%1,1)" :: "r"(p), "r"((size_t) tile_bytes) : "memory")
// sums += signed bytes of y times bytes of w
#define TILE_UNSIGNED(sums, y, w) __asm__ volatile("tdpbsud %%tmm" #w ", %%tmm" #y ", %%tmm" #sums ::)
#define TILE_SIGNED(sums, y, w)   __asm__ volatile("tdpbssd %%tmm" #w ", %%tmm" #y ", %%tmm" #sums ::)

// Eight whole tiles, while it lives. What the thread had before is there again afterwards, without what its tiles held.
class tiles {
public:
    tiles() {
        __asm__ volatile("sttilecfg %0" : "=m"(before));
        const struct configuration whole;
        __asm__ volatile("ldtilecfg %0" :: "m"(whole));
    }
    ~tiles() {
        if (before.palette) {
            __asm__ volatile("ldtilecfg %0" :: "m"(before));
        } else {
            __asm__ volatile("tilerelease" ::);
        }
    }
    tiles(const tiles &) = delete;

private:
    struct alignas(64) configuration {
        uint8_t palette = 1, start = 0, reserved[14] = {};
        uint16_t row_bytes[16] = { 64, 64, 64, 64, 64, 64, 64, 64 };
        uint8_t rows[16] = { 16, 16, 16, 16, 16, 16, 16, 16 };
    } before;
};

// A block of 16 rows, each code multiplied by its scale.
struct alignas(64) scaled_rows {
    V::I lower[QK_K / 4], upper[QK_K / 4];

    template <class T> void set(const unpacked_rows<V> & from) {
        const V::I mask = V::set16(0xff);
        for (int i = 0; i < QK_K / 4; i++) {
            const V::I scale = from.scales[i / (T::sub_block / 4)];
            const V::I words = V::or_(V::sll32<16>(scale), V::and_(scale, V::set32(0xffff)));
            const V::I even = V::mullo16(V::and_(from.codes[i], mask), words);
            const V::I odd = V::mullo16(V::srl16<8>(from.codes[i]), words);
            lower[i] = V::or_(V::and_(even, mask), V::sll16<8>(odd));
            upper[i] = V::or_(V::srl16<8>(even), _mm512_andnot_si512(mask, odd));
        }
    }
};

// The activations of 16 columns. Columns that are not equally far apart, or fewer, are copied.
struct column_tile {
    const char * qs;       // of the first block
    size_t column, block;  // from column to column, and from block to block
};

constexpr int vectors = 2;  // of rows that are multiplied with the same tiles of columns: all eight tiles are in use
constexpr int panel_rows = vectors * tile_rows;

// sums[2 * v] and sums[2 * v + 1] = the lower and upper sums of 16 columns with the rows of vector v. meanwhile(i) is called
// after step i < 4: vectors have time for something else.
template <class F>
LANES_INLINE void multiply(const scaled_rows * w, const column_tile & y, int64_t block, int32_t (*sums)[tile_rows][tile_rows], const F & meanwhile) {
    TILE_ZERO(0);
    TILE_ZERO(1);
    TILE_ZERO(2);
    TILE_ZERO(3);
    LANES_UNROLL
    for (int i = 0; i < tiles_of_block; i++) {
        TILE_LOAD(4, y.qs + block * y.block + i * tile_bytes, y.column);
        TILE_LOAD(5, w[0].lower + i * tile_rows, tile_bytes);
        TILE_UNSIGNED(0, 4, 5);
        TILE_LOAD(6, w[0].upper + i * tile_rows, tile_bytes);
        TILE_SIGNED(1, 4, 6);
        TILE_LOAD(7, w[1].lower + i * tile_rows, tile_bytes);
        TILE_UNSIGNED(2, 4, 7);
        TILE_LOAD(5, w[1].upper + i * tile_rows, tile_bytes);
        TILE_SIGNED(3, 4, 5);
        meanwhile(i);
    }
    TILE_STORE(0, sums[0]);
    TILE_STORE(1, sums[1]);
    TILE_STORE(2, sums[2]);
    TILE_STORE(3, sums[3]);
}

template <class T>
void tile_mul_mat(int64_t n, const char * w, size_t stride, int64_t nr, const void * const * cols, float * const * dst, int nc, reading) {
    using block = typename T::block;
    constexpr int least = T::template least<V>;
    const int64_t blocks = n / QK_K;
    const int n_tiles = (nc + tile_rows - 1) / tile_rows;

    // A product of tiles whose sums wait for being scaled
    struct product {
        const unpacked_rows<V> * rows;
        int32_t (*sums)[tile_rows][tile_rows];
        int64_t block;
        int tile;
    };
    struct alignas(64) memory {
        unpacked_rows<V> unpacked[2][vectors];  // of two blocks, because products of the one before wait
        scaled_rows scaled[vectors];
        int32_t sums[2][2 * vectors][tile_rows][tile_rows];
        char apart[panel_rows * sizeof(block)];
    };
    const size_t acc_size = (size_t) nc * panel_rows * sizeof(float);
    using activations = typename super_panels<V, T>::template columns_with<false>;
    const size_t columns_size = GGML_PAD(activations::size(n, nc), 64);
    const auto in_place = [&](int tile) {
        const char * const * c = (const char * const *) cols + tile * tile_rows;
        bool is = (tile + 1) * tile_rows <= nc;
        for (int i = 2; is && i < tile_rows; i++) {
            is = c[i] - c[i - 1] == c[1] - c[0];
        }
        return is;
    };
    int copies = 0;
    for (int t = 0; t < n_tiles; t++) {
        copies += !in_place(t);
    }
    char * at = (char *) scratch(sizeof(memory) + acc_size + columns_size + (size_t) copies * blocks * tile_rows * QK_K);
    memory & own = *(memory *) at;
    float * const acc = (float *) (at + sizeof(memory));
    const activations from(n, cols, nc, at + sizeof(memory) + acc_size, false);
    at += sizeof(memory) + acc_size + columns_size;

    column_tile y[LANES_MAX_COLS / tile_rows];
    for (int t = 0; t < n_tiles; t++) {
        if (in_place(t)) {
            const char * const * c = (const char * const *) cols + t * tile_rows;
            y[t] = { c[0] + offsetof(block_q8_K, qs), (size_t) (c[1] - c[0]), sizeof(block_q8_K) };
            continue;
        }
        y[t] = { at, QK_K, tile_rows * QK_K };
        for (int64_t b = 0; b < blocks; b++) {
            for (int c = t * tile_rows; c < (t + 1) * tile_rows; c++, at += QK_K) {
                if (c < nc) {
                    memcpy(at, from.at(c, b * QK_K).y->qs, QK_K);
                } else {
                    memset(at, 0, QK_K);
                }
            }
        }
    }

    // acc += four columns of a product, scaled
    const auto scale = [&](const product & of, int quarter) LANES_ALWAYS {
        const int first = of.tile * tile_rows + quarter * 4, last = nc < first + 4 ? nc : first + 4;
        for (int c = first; c < last; c++) {
            const auto with = from.at(c, of.block * QK_K);
            V::I sum[vectors], low[vectors];
            LANES_UNROLL
            for (int v = 0; v < vectors; v++) {
                const V::I upper = V::all(of.sums[2 * v + 1][c % tile_rows]);
                sum[v] = V::add32(V::all(of.sums[2 * v][c % tile_rows]), V::sll32<8>(upper));
                low[v] = T::has_min ? V::zero() : sum[v];
            }
            LANES_UNROLL
            for (int i = 0; i < least; i++) {
                const V::I each = V::broadcast(with.sums + 2 * i);
                LANES_UNROLL
                for (int v = 0; v < vectors; v++) {
                    low[v] = V::add_madd16(low[v], of.rows[v].least[i], each);
                }
            }
            const V::F d = V::setf(with.y->d);
            LANES_UNROLL
            for (int v = 0; v < vectors; v++) {
                V::F x = V::mul(V::to_float(T::has_min ? sum[v] : low[v]), of.rows[v].d);
                if constexpr (T::has_min) {
                    x = V::fnma(of.rows[v].dmin, V::to_float(low[v]), x);
                }
                float * to = acc + c * panel_rows + v * tile_rows;
                V::store_f32(to, V::fma(x, d, V::load_f32(to)));
            }
        }
    };

    const tiles here;
    for (int64_t r0 = 0; r0 < nr; r0 += panel_rows) {
        const int take = nr - r0 < panel_rows ? (int) (nr - r0) : panel_rows;
        memset(acc, 0, acc_size);
        product waiting = { nullptr, nullptr, 0, n_tiles };  // of no column
        for (int64_t b = 0; b < blocks; b++) {
            const char * p = w + r0 * stride + b * sizeof(block);
            size_t step = stride, lane[V::count];
            if (take < panel_rows) {
                memset(own.apart, 0, sizeof(own.apart));
                for (int r = 0; r < take; r++) {
                    memcpy(own.apart + r * sizeof(block), p + r * stride, sizeof(block));
                }
                p = own.apart;
                step = sizeof(block);
            }
            row_lanes<V>(step, lane);
            unpacked_rows<V> * const rows = own.unpacked[b % 2];
            for (int v = 0; v < vectors; v++) {
                T::template unpack<V>(p + v * tile_rows * step, step, lane, rows[v]);
                own.scaled[v].template set<T>(rows[v]);
            }
            // Meanwhile, the next rows are prefetched into the L2 cache.
            const char * next = w + (r0 + panel_rows) * stride + b * panel_rows * sizeof(block);
            const int lines = (int) (panel_rows * sizeof(block) / tile_bytes / (4 * n_tiles) + 1);
            for (int t = 0; t < n_tiles; t++) {
                const product now = { rows, own.sums[(b * n_tiles + t) % 2], b, t };
                multiply(own.scaled, y[t], b, now.sums, [&](int i) LANES_ALWAYS {
                    for (int l = 0; l < lines; l++, next += tile_bytes) {
                        fetch<1, 2>(next);
                    }
                    scale(waiting, i);
                    // The stores at the end of the panel shall find their cache lines.
                    for (int c = t * tile_rows + 4 * i; b == 0 && c < t * tile_rows + 4 * i + 4 && c < nc; c++) {
                        __builtin_prefetch(dst[c] + r0, 1);
                        __builtin_prefetch(dst[c] + r0 + tile_rows, 1);
                    }
                });
                waiting = now;
            }
        }
        for (int i = 0; i < 4; i++) {
            scale(waiting, i);
        }
        for (int c = 0; c < nc; c++) {
            if (take == panel_rows) {  // a copy of a constant size is a few stores
                memcpy(dst[c] + r0, acc + c * panel_rows, panel_rows * sizeof(float));
            } else {
                memcpy(dst[c] + r0, acc + c * panel_rows, take * sizeof(float));
            }
        }
    }
}

struct tile_products {
    template <class T> static constexpr product_kernel of = tile_mul_mat<T>;
};

constexpr int request_permission = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM and XFEATURE_XTILE_DATA of Linux

}  // namespace

// Linux gives a process tiles if it asks for them, because signals then need larger stacks.
bool has_amx() {
    static const bool has = [] {
        unsigned a = 0, b = 0, c = 0, d = 0;
        return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 3) == 3 &&
               syscall(SYS_arch_prctl, request_permission, tile_data) == 0;
    }();
    return has;
}

product_kernel amx_product(ggml_type type) { return super_block_product<tile_products>(type); }

double amx_multiply(int64_t n) {
    const tiles here;
    for (int64_t i = 0; i < n; i++) {  // four sums hide how long a product takes
        TILE_UNSIGNED(0, 4, 6);
        TILE_UNSIGNED(1, 5, 6);
        TILE_UNSIGNED(2, 4, 7);
        TILE_UNSIGNED(3, 5, 7);
    }
    return (double) n * 4 * tile_rows * tile_rows * tile_bytes;
}

}  // namespace mtp

LANES_END_TARGET

#else

namespace mtp {

bool has_amx() { return false; }
product_kernel amx_product(ggml_type) { return nullptr; }
double amx_multiply(int64_t) { return 0; }

}  // namespace mtp

#endif

// FLASH_ATTN_EXT: attention of queries over a KV cache.

#include "ggml_api.h"
#include "graph.h"
#include "huge_pages.h"
#include "operation.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace mtp {

namespace {

constexpr int64_t split = 512;           // positions in a chunk of the cache
constexpr int64_t most_few_queries = 15;  // whose chunks are distributed over the threads

constexpr int most_at_once = 32;         // queries that share what is read of the cache
constexpr int few_columns = 4;           // that the kernels multiply with at a time
constexpr int64_t ahead_bytes = 16384;   // of the cache, between what is converted and what is prefetched
constexpr int64_t block_bytes = 16384;   // of the cache, or of floats, that stay in the L1 cache for several passes

// The partial result of attention over some positions. Positions are split into chunks of split, which
// are merged in order, so that the result of a query depends neither on the other queries nor on the threads.
struct partial {
    float   M;      // the largest score
    float   S;      // the sum of exp(score - M)
    float   VKQ[];  // the values mixed by these

    static int64_t floats(int64_t DV) { return 2 + DV; }

    void clear(int64_t DV) {
        M = -INFINITY;
        S = 0.0f;
        memset(VKQ, 0, DV * sizeof(float));
    }

    void join(const partial & next, int64_t DV) {
        if (next.S == 0.0f) {
            return;
        }
        const float most = fmaxf(M, next.M);
        const float old_by = expf(M - most), next_by = expf(next.M - most);
        for (int64_t d = 0; d < DV; d++) {
            VKQ[d] = VKQ[d] * old_by + next.VKQ[d] * next_by;
        }
        S = S * old_by + next.S * next_by;
        M = most;
    }

    // Adds the sink, a score without a value, and writes the result.
    void finish(const float * sink, int64_t DV, float * result) {
        float by = 1.0f;
        if (sink) {
            const float most = fmaxf(M, *sink);
            by = expf(M - most);
            S  = S * by + expf(*sink - most);
        }
        by = S == 0.0f ? 0.0f : by / S;
        for (int64_t d = 0; d < DV; d++) {
            result[d] = VKQ[d] * by;
        }
    }
};

partial & partial_at(float * base, int64_t i, int64_t DV) {
    return *(partial *) (base + i * partial::floats(DV));
}

struct query {
    const void *     q;
    const uint16_t * mask;
    float            slope;
    const float *    sink;
    float *          result;
};

struct range {
    int64_t from, to;
};

// The positions of a chunk that at least one of the queries sees. The range starts at a multiple of a vector,
// so that there is room for a whole vector at its end.
range seen(const query * queries, int nc, range chunk) {
    constexpr uint16_t hidden = 0xfc00;  // minus infinity
    range all = { chunk.to, chunk.from };
    for (int c = 0; c < nc; c++) {
        const uint16_t * mask = queries[c].mask;
        if (!mask) {
            return chunk;
        }
        if (c > 0 && mask == queries[c - 1].mask) {
            continue;
        }
        range own = chunk;
        while (own.from < own.to && mask[own.from] == hidden) {
            own.from++;
        }
        while (own.from < own.to && mask[own.to - 1] == hidden) {
            own.to--;
        }
        if (own.from < own.to) {
            all = { std::min(all.from, own.from), std::max(all.to, own.to) };
        }
    }
    return { all.from & ~(int64_t) 15, all.to };
}

// Keys or values in the cache. Quants are converted to floats once for many queries, and types that the kernels do not read
// for any number of them.
class cache {
public:
    cache(const kernel_set & set, const ggml_tensor * t) : t(t), row_bytes(ggml().row_size(t->type, t->ne[0])), own(set.attention(t->type)), floats(set.attention(GGML_TYPE_F32)) {
        if (!own) {
            to_float = ggml().traits(t->type)->to_float;
        }
    }

    // The size of the memory that rows() uses, in floats.
    int64_t scratch() const { return block_rows(t->ne[0] * sizeof(float)) * t->ne[0]; }

    // Calls each(kernels, address, stride, first, count) for n rows starting at `from`, some rows at a time, for nc queries.
    template <class F> void rows(int64_t share, int64_t from, int64_t n, int nc, float * memory, F each) const {
        const char * at = (const char *) t->data + from * t->nb[1] + share % t->ne[2] * t->nb[2] + share / t->ne[2] * t->nb[3];
        // a vector's floats: beyond, converting once is as fast as converting for each few columns, or faster
        const bool converts = !own || (own->to_floats && nc > own->floats);
        const int64_t ahead = ahead_bytes / t->nb[1];  // rows
        const int64_t step = converts ? block_rows(t->ne[0] * sizeof(float)) : nc > few_columns ? block_rows(row_bytes) : n;
        for (int64_t first = 0; first < n; first += step) {
            const int64_t count = std::min(step, n - first);
            const char * block = at + first * t->nb[1];
            if (!converts) {
                each(*own, block, t->nb[1], first, count);
                continue;
            }
            for (int64_t i = 0; i < count; i++) {
                prefetch(block + (i + ahead) * t->nb[1]);
                convert(block + i * t->nb[1], memory + i * t->ne[0]);
            }
            each(*floats, (const char *) memory, t->ne[0] * sizeof(float), first, count);
        }
    }

private:
    const ggml_tensor * const t;
    const size_t row_bytes;
    const attention_kernels * const own;  // for this type, or NULL
    const attention_kernels * const floats;
    void (*to_float)(const void *, float *, int64_t) = nullptr;

    // Rows of so many bytes in a block, as many as the kernels process together or more.
    static int64_t block_rows(int64_t nbytes) { return std::max<int64_t>(block_bytes / nbytes & ~3, 4); }

    // A row; beyond the end of the cache this is harmless.
    void prefetch(const char * row) const {
        for (size_t at = 0; at < row_bytes; at += 64) {
            __builtin_prefetch(row + at);
        }
    }

    void convert(const char * row, float * to) const {
        if (own) {
            own->to_floats(t->ne[0], row, to);
        } else {
            to_float(row, to, t->ne[0]);
        }
    }
};

class attention {
public:
    attention(const kernel_set & set, const ggml_tensor * dst) :
        dst(dst), q(dst->src[0]), k(dst->src[1]), v(dst->src[2]), mask(dst->src[3]), sinks(dst->src[4]),
        steps(*set.attention(GGML_TYPE_F32)), keys(set, k), values(set, v) {
        memcpy(&scale,    (const float *) dst->op_params + 0, sizeof(float));
        memcpy(&max_bias, (const float *) dst->op_params + 1, sizeof(float));
        memcpy(&softcap,  (const float *) dst->op_params + 2, sizeof(float));
    }

    int64_t DV()        const { return v->ne[0]; }
    int64_t shared()    const { return k->ne[2] * k->ne[3]; }           // groups of queries that share keys
    int64_t per_share() const { return rows_of(q) / shared(); }      // queries that share them
    int64_t chunks()    const { return (k->ne[1] + split - 1) / split; }

    // Query i of a group that shares keys: all heads of a token, then those of the next token.
    query at(int64_t share, int64_t i) const {
        const int64_t r2 = q->ne[2] / k->ne[2], r3 = q->ne[3] / k->ne[3];
        const int64_t i1 = i / r2 % q->ne[1];
        const int64_t i2 = share % k->ne[2] * r2 + i % r2, i3 = share / k->ne[2] * r3 + i / (r2 * q->ne[1]);
        return {
            (const char *) q->data + i1 * q->nb[1] + i2 * q->nb[2] + i3 * q->nb[3],
            mask ? (const uint16_t *) ((const char *) mask->data + i1 * mask->nb[1] + i2 % mask->ne[2] * mask->nb[2] + i3 % mask->ne[3] * mask->nb[3]) : nullptr,
            slope(i2),
            sinks ? (const float *) sinks->data + i2 : nullptr,
            (float *) ((char *) dst->data + i2 * dst->nb[1] + i1 * dst->nb[2] + i3 * dst->nb[3]),
        };
    }

    // The size of the memory that attend() uses, in floats.
    int64_t scratch() const { return scores_size + std::max(keys.scratch(), values.scratch()); }

    // Attention of up to most_at_once queries that share keys over a chunk; part[c] is the result of query c.
    void attend(int64_t share, int64_t chunk, const query * queries, int nc, partial * const * part, float * scores) const {
        const int64_t first = chunk * split;
        const range   in    = seen(queries, nc, { first, std::min<int64_t>(first + split, k->ne[1]) });
        const int64_t n     = in.to - in.from;

        const void *  cols[most_at_once];
        float *       s[most_at_once];
        float *       mixed[most_at_once];
        for (int c = 0; c < nc; c++) {
            part[c]->clear(DV());
            cols[c]  = queries[c].q;
            s[c]     = scores + c * split + in.from - first;
            mixed[c] = part[c]->VKQ;
        }
        if (n <= 0) {
            return;
        }
        float * floats = scores + scores_size;
        keys.rows(share, in.from, n, nc, floats, [&](const attention_kernels & of, const char * at, size_t stride, int64_t r, int64_t count) {
            float * to[most_at_once];
            std::transform(s, s + nc, to, [r](float * of_query) { return of_query + r; });
            of.keys(k->ne[0], at, stride, count, cols, to, nc, {});
        });
        for (int c = 0; c < nc; c++) {
            score(queries[c], in, s[c], *part[c], scores + c * split);
        }
        values.rows(share, in.from, n, nc, floats, [&](const attention_kernels & of, const char * at, size_t stride, int64_t r, int64_t count) {
            const float * by[most_at_once];
            std::transform(s, s + nc, by, [r](float * of_query) { return of_query + r; });
            of.mix(DV(), at, stride, count, by, mixed, nc);
        });
    }

private:
    static constexpr int64_t scores_size = most_at_once * split;

    const ggml_tensor * dst;
    const ggml_tensor * q;
    const ggml_tensor * k;
    const ggml_tensor * v;
    const ggml_tensor * mask;
    const ggml_tensor * sinks;
    const attention_kernels & steps;  // those that are the same for all types
    const cache keys, values;
    float scale, max_bias, softcap;

    float slope(uint32_t head) const {
        if (max_bias <= 0.0f) {
            return 1.0f;
        }
        const uint32_t some = 1u << (uint32_t) floor(log2(q->ne[2]));
        return head < some ? powf(powf(2.0f, -max_bias / some), head + 1) :
                             powf(powf(2.0f, -max_bias / 2.0f / some), 2 * (head - some) + 1);
    }

    // Turns products with keys into weights for the values: s those of the visible positions, `whole` of the chunk.
    void score(const query & of, range in, float * s, partial & part, float * whole) const {
        const int64_t n = in.to - in.from;
        float by = scale;
        if (softcap != 0.0f) {
            for (int64_t i = 0; i < n; i++) {
                s[i] = softcap * tanhf(s[i] * (scale / softcap));
            }
            by = 1.0f;
        }
        static const uint16_t unmasked[split] = {};
        part.M = steps.scores(n, s, by, of.mask ? of.mask + in.from : unmasked, of.slope);
        if (part.M == -INFINITY) {
            std::fill(s, s + n, 0.0f);
            return;
        }
        std::fill(whole, s, -INFINITY);
        std::fill(s + n, whole + split, -INFINITY);
        part.S = (float) steps.weights(split, whole, part.M);
    }
};

// Few queries: the chunks are distributed over the threads, too. Each thread keeps the results of its pieces; when all are
// there, they are joined.
void few_queries(const task & task, const attention & all) {
    const int64_t DV = all.DV(), nq = all.per_share(), chunks = all.chunks();
    const int64_t pieces = all.shared() * chunks;

    // as few queries at a time as it takes to give each thread some
    const int64_t at_once = std::clamp<int64_t>(nq * pieces / task.nth(), 1, most_at_once);
    const int64_t groups  = (nq + at_once - 1) / at_once;

    // A thread computes neighbouring queries, which share their keys, and all heads of a chunk: their keys are side by side,
    // and CPUs prefetch beyond those of one head.
    const int64_t first = task.first(groups * pieces), last = task.last(groups * pieces);
    float * memory = (float *) scratch((all.scratch() + (1 + (last - first) * at_once) * partial::floats(DV)) * sizeof(float));
    float * own    = memory + all.scratch() + partial::floats(DV);
    task.threads->publish(task.ith(), own);

    for (int64_t i = first; i < last; i++) {
        const int64_t q0 = i % groups * at_once, share = i / groups % all.shared(), chunk = i / groups / all.shared();
        const int nc = (int) std::min(at_once, nq - q0);
        query     queries[most_at_once];
        partial * part[most_at_once];
        for (int c = 0; c < nc; c++) {
            queries[c] = all.at(share, q0 + c);
            part[c]    = &partial_at(own, (i - first) * at_once + c, DV);
        }
        all.attend(share, chunk, queries, nc, part, memory);
    }
    task.wait();

    partial & sum = partial_at(memory + all.scratch(), 0, DV);
    for (int64_t i = task.ith(); i < all.shared() * nq; i += task.nth()) {
        const int64_t share = i / nq, q = i % nq;
        sum.clear(DV);
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            const int64_t piece = (chunk * all.shared() + share) * groups + q / at_once;
            const int64_t owner = ((piece + 1) * task.nth() - 1) / (groups * pieces);  // the last whose share begins here or before
            const int64_t begin = groups * pieces * owner / task.nth();
            sum.join(partial_at((float *) task.threads->published(owner), (piece - begin) * at_once + q % at_once, DV), DV);
        }
        const query of = all.at(share, q);
        sum.finish(of.sink, DV, of.result);
    }
}

// Many queries: a chunk stays in the L2 cache for a block of queries.
void many_queries(const task & task, const attention & all) {
    constexpr int64_t most = 64;
    const int64_t DV = all.DV(), nq = all.per_share();
    const int64_t block  = std::clamp<int64_t>(all.shared() * nq / (4 * task.nth()), LANES_COLS, most);
    const int64_t blocks = (nq + block - 1) / block;
    float * memory = (float *) scratch((all.scratch() + (most + most_at_once) * partial::floats(DV)) * sizeof(float));
    float * sums   = memory + all.scratch();

    partial * part[most_at_once];
    for (int c = 0; c < most_at_once; c++) {
        part[c] = &partial_at(sums, most + c, DV);
    }
    if (task.ith() == 0) {
        task.threads->reset(0);
    }
    task.wait();

    for (int64_t i = task.threads->take(0); i < all.shared() * blocks; i = task.threads->take(0)) {
        const int64_t share = i / blocks, q0 = i % blocks * block, n = std::min(block, nq - q0);
        query queries[most];
        for (int64_t j = 0; j < n; j++) {
            queries[j] = all.at(share, q0 + j);
            partial_at(sums, j, DV).clear(DV);
        }
        for (int64_t chunk = 0; chunk < all.chunks(); chunk++) {
            for (int64_t j = 0; j < n; j += most_at_once) {
                const int nc = (int) std::min<int64_t>(most_at_once, n - j);
                all.attend(share, chunk, queries + j, nc, part, memory);
                for (int c = 0; c < nc; c++) {
                    partial_at(sums, j + c, DV).join(*part[c], DV);
                }
            }
        }
        for (int64_t j = 0; j < n; j++) {
            partial_at(sums, j, DV).finish(queries[j].sink, DV, queries[j].result);
        }
    }
}

bool is_cache(const ggml_tensor * t) {
    const type_traits * traits = ggml().traits(t->type);
    return t->nb[0] == traits->type_size && (t->type == GGML_TYPE_F32 || t->type == GGML_TYPE_F16 || traits->to_float);
}

bool fits(const kernel_set & kernels, const ggml_tensor * op) {
    const ggml_tensor * q = op->src[0];
    const ggml_tensor * k = op->src[1];
    const ggml_tensor * v = op->src[2];
    const ggml_tensor * mask = op->src[3];
    const ggml_tensor * sinks = op->src[4];
    if (!kernels.attention || op->src[5]) {
        return false;
    }
    for (int i = 4; i < 16; i++) {  // after scale, ALiBi's bias, the soft cap and the precision
        if (op->op_params[i] != 0) {
            return false;
        }
    }
    return is_float(q) && is_float(op) && is_cache(k) && is_cache(v) && v->ne[0] % kernels.attention(GGML_TYPE_F32)->floats == 0 &&
           k->ne[0] == q->ne[0] && k->ne[1] == v->ne[1] && v->ne[2] == k->ne[2] && v->ne[3] == k->ne[3] &&
           q->ne[2] % k->ne[2] == 0 && q->ne[3] % k->ne[3] == 0 && is_contiguous(op, sizeof(float)) &&
           op->ne[0] == v->ne[0] && op->ne[1] == q->ne[2] && op->ne[2] == q->ne[1] && op->ne[3] == q->ne[3] &&
           (!mask || (mask->type == GGML_TYPE_F16 && mask->nb[0] == 2 && mask->ne[0] >= k->ne[1] && mask->ne[1] >= q->ne[1])) &&
           (!sinks || (is_float(sinks) && sinks->ne[0] == q->ne[2]));
}

bool compute(const kernel_set & kernels, const task & task, ggml_tensor * op) {
    const attention all(kernels, op);
    if (op->src[0]->ne[1] <= most_few_queries) {
        few_queries(task, all);
    } else {
        many_queries(task, all);
    }
    return true;
}

void shrink(const ggml_tensor *, small_case & small) {
    // more than a chunk of the cache, and more queries than a vector
    const int64_t queries = std::min<int64_t>(small.src[0].ne[1], 20), cells = std::min<int64_t>(small.src[1].ne[1], split + 64);
    small.src[0].ne[1] = small.result.ne[2] = queries;
    small.src[1].ne[1] = small.src[2].ne[1] = cells;
    const int64_t shared = small.src[1].ne[3], sequences = std::min<int64_t>(shared, 2);
    for (auto * t : { &small.src[0], &small.src[1], &small.src[2], &small.src[3], &small.result }) {
        t->ne[3] = t->ne[3] >= shared ? t->ne[3] / shared * sequences : t->ne[3];
    }
    if (small.src[3].type != GGML_TYPE_COUNT) {
        small.src[3].ne[0] = cells;
        small.src[3].ne[1] = std::min<int64_t>(small.src[3].ne[1], GGML_PAD(queries, 64));
    }
}

void plan(const kernel_set &, const ggml_tensor * op, int) {
    for (const ggml_tensor * cache : { op->src[1], op->src[2] }) {
        use_huge_pages(cache->data, bytes(cache), op->src[0]->ne[1] > most_few_queries);
    }
}

}  // namespace

// ggml rounds queries to the type of the keys; the kernels do not.
const operation attention_operation = { "FLASH_ATTN_EXT", fits, compute, shrink, 5e-4, nullptr, plan };

}  // namespace mtp

// Causal attention with a scale and a shift of the logits by distance, forward and backward, block by block in fp32:
//
//     logits[i,j] = scale[t] <q_i, k_j> + shift[t],   t = i - j >= 0,       out[i] = sum_j softmax_j(logits[i,:]) v_j
//
// The forward pass keeps a running maximum and sum of each row (arXiv:1805.02867); the backward pass makes the weights
// again from the logarithms of those sums (arXiv:2205.14135). Queries are the last of the keys' positions.
//
// The tables lie backwards: distance t at place N - 1 - t, for N keys. So along a row of logits their values lie in
// order, and the entries behind place N - 1, scale 0 and shift -infinity, are the causal mask.
//
// native.py compiles this file and calls it through ctypes; it takes no header but the standard library's.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>

namespace {

// ROWS x COLS is the tile of a matrix product that stays in registers: 12 (24) sums, and two vectors of B.
#if !defined(NARROW_TILES) && (defined(__AVX512F__) || defined(WIDE_TILES))  // to test both sizes on any processor
constexpr int LANES = 16, ROWS = 12;
#else
constexpr int LANES = 8, ROWS = 6;
#endif
constexpr int COLS = 2 * LANES;
// The logits that are in the cache at one time.
constexpr int BLOCK_ROWS = 48, BLOCK_KEYS = 288;
static_assert(BLOCK_ROWS % ROWS == 0 && BLOCK_KEYS % ROWS == 0 && BLOCK_KEYS % COLS == 0);
constexpr int MASK = BLOCK_ROWS + 3 * COLS;  // entries of a table behind place N - 1
constexpr float INF = std::numeric_limits<float>::infinity();

// --- Vectors -------------------------------------------------------------------------------------------------------

typedef float vec __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef int32_t ivec __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(4), may_alias));

inline vec load(const float* at) { return *reinterpret_cast<const vec*>(at); }
inline void store(float* at, vec x) { *reinterpret_cast<vec*>(at) = x; }
inline vec fill(float x) { return x - vec{}; }  // one broadcast: a compiler may drop "- 0", but not "+ 0"
inline vec larger(vec a, vec b) { return a > b ? a : b; }

// e^x for x <= 0, to about 2 ulp, and exactly 0 where it would be no normal number: 2^n e^r, |r| <= log(2) / 2, with the
// polynomial of Cephes' expf for e^r.
inline vec exp_of(vec x) {
    const float shifter = 12582912.0f;  // 1.5 * 2^23: what is added to it is rounded to an integer
    vec n = (x * 1.44269504f + shifter) - shifter;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = (__builtin_convertvector(larger(n, fill(-126.0f)), ivec) + 127) << 23;
    return x < -87.0f ? vec{} : p * reinterpret_cast<vec&>(power);
}

inline float sum_of(vec x) {
    float sum = 0.0f;
    for (int lane = 0; lane < LANES; ++lane) sum += x[lane];
    return sum;
}

inline float max_of(vec x) {
    float most = x[0];
    for (int lane = 1; lane < LANES; ++lane) most = std::max(most, x[lane]);
    return most;
}

using Floats = std::unique_ptr<float[]>;

inline int64_t up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

// --- Matrices ------------------------------------------------------------------------------------------------------

struct Sizes {
    int64_t batch, heads, queries, keys, d;
};

struct Tensor {  // (B, H, T, d), with strides; features are contiguous
    float* data;
    int64_t by_batch, by_head, by_time;
};

struct Matrix {  // (T, d): one head of one batch element
    float* data;
    int64_t by_time;
    float* row(int64_t t) const { return data + t * by_time; }
};

Matrix head_of(const Tensor& x, int64_t pair, const Sizes& sizes) {
    return {x.data + pair / sizes.heads * x.by_batch + pair % sizes.heads * x.by_head, x.by_time};
}

// The three functions below copy the rows [first, first + n) and then rows of zeros, up to `height` of them.

void copy_rows(const Matrix& x, int64_t first, int64_t n, int64_t height, int64_t d, float* out) {
    for (int64_t t = 0; t < height; ++t)
        if (t < n)
            std::copy_n(x.row(first + t), d, out + t * d);
        else
            std::fill_n(out + t * d, d, 0.0f);
}

// In panels of COLS features (the last filled up with zeros), each (height, COLS).
void pack_rows(const Matrix& x, int64_t first, int64_t n, int64_t height, int64_t d, float* out) {
    for (int64_t col = 0; col < d; col += COLS)
        for (int64_t t = 0; t < height; ++t, out += COLS) {
            const int64_t filled = t < n ? std::min<int64_t>(COLS, d - col) : 0;
            if (filled) std::copy_n(x.row(first + t) + col, filled, out);
            std::fill(out + filled, out + COLS, 0.0f);
        }
}

// Transposed, in panels of COLS rows, each (d, COLS).
void pack_transposed(const Matrix& x, int64_t first, int64_t n, int64_t height, int64_t d, float* out) {
    for (int64_t t0 = 0; t0 < height; t0 += COLS, out += d * COLS)
        for (int64_t t = t0; t < t0 + COLS; ++t)
            for (int64_t f = 0; f < d; ++f) out[f * COLS + t - t0] = t < n ? x.row(first + t)[f] : 0.0f;
}

struct Tile {
    vec at[ROWS][2];
};

// tile += A B over n terms; A[row, k] is a[row * by_row + k * by_term], B[k, :] the k-th row of a panel.
inline __attribute__((always_inline)) void multiply(Tile& tile, const float* a, int64_t by_row, int64_t by_term,
                                                    const float* b, int64_t n) {
    for (int64_t k = 0; k < n; ++k) {
        const vec b0 = load(b + k * COLS), b1 = load(b + k * COLS + LANES);
#pragma GCC unroll 12
        for (int row = 0; row < ROWS; ++row) {
            const vec x = fill(a[row * by_row + k * by_term]);
            tile.at[row][0] += x * b0;
            tile.at[row][1] += x * b1;
        }
    }
}

struct Range {
    int64_t first, last;
};

// C += A B; C is (rows, width), multiples of ROWS and COLS, and B in panels of COLS columns, `panel` floats apart. The
// ROWS rows from `row` on have terms in the range terms_of(row).
template <class Terms>
void add_product(float* c, int64_t rows, int64_t width, const float* a, int64_t by_row, int64_t by_term, const float* b,
                 int64_t panel, Terms terms_of) {
    for (int64_t col = 0; col < width; col += COLS, b += panel)
        for (int64_t row = 0; row < rows; row += ROWS) {
            const Range terms = terms_of(row);
            Tile tile;
            float* corner = c + row * width + col;
            for (int r = 0; r < ROWS; ++r)
                for (int half = 0; half < 2; ++half) tile.at[r][half] = load(corner + r * width + half * LANES);
            multiply(tile, a + row * by_row + terms.first * by_term, by_row, by_term, b + terms.first * COLS,
                     terms.last - terms.first);
            for (int r = 0; r < ROWS; ++r)
                for (int half = 0; half < 2; ++half) store(corner + r * width + half * LANES, tile.at[r][half]);
        }
}

// A block of logits: some rows of queries, the first of them at `ahead` tokens behind the first of `count` keys.
struct Block {
    int64_t ahead, count;
    // The first tile of rows of which one sees the key.
    int64_t first_row(int64_t key) const { return std::max<int64_t>(0, key - ahead) / ROWS * ROWS; }
    // How many keys the last of the ROWS rows from `row` on sees.
    int64_t keys_of(int64_t row) const { return std::clamp<int64_t>(ahead + row + ROWS, 0, count); }
};

// --- Forward -------------------------------------------------------------------------------------------------------

struct Tables {  // one row a head, or strides of 0 for one that all share
    const float *scale, *shift;
    int64_t scale_by_head, shift_by_head;
};

// Replaces n logits of a row by exp(logit - highest), and updates the row's highest logit and the sum of its weights.
// Returns the factor that corrects what was summed up with the highest logit before.
inline float soften(float* logits, int64_t n, float& highest, float& sum) {
    if (n == 0) return 1.0f;
    vec most = load(logits);
    for (int64_t col = LANES; col < n; col += LANES) most = larger(most, load(logits + col));
    const float before = highest;
    highest = std::max(before, max_of(most));
    const float from = highest == -INF ? 0.0f : highest;  // nothing but masked entries so far: weights of 0
    vec total = vec{};
    for (int64_t col = 0; col < n; col += LANES) {
        const vec weight = exp_of(load(logits + col) - from);
        store(logits + col, weight);
        total += weight;
    }
    const float factor = std::exp(before - from);
    sum = sum * factor + sum_of(total);
    return factor;
}

// The rows [first, first + BLOCK_ROWS) of one head, or as many as there are, against all keys that they see.
void forward_block(const Sizes& sizes, const Matrix& q, const float* keys, const float* values, const float* scale,
                   const float* shift, int64_t first, const Matrix& out, float* log_sum, float* work) {
    const int64_t d = sizes.d, width = up(d, COLS), n = std::min<int64_t>(BLOCK_ROWS, sizes.queries - first);
    const int64_t rows = up(n, ROWS), position = sizes.keys - sizes.queries + first, seen = position + n;
    float *query = work, *weights = query + BLOCK_ROWS * d, *sums = weights + BLOCK_ROWS * BLOCK_KEYS;
    float highest[BLOCK_ROWS], total[BLOCK_ROWS];
    copy_rows(q, first, n, rows, d, query);
    std::fill_n(sums, rows * width, 0.0f);
    std::fill_n(highest, rows, -INF);
    std::fill_n(total, rows, 0.0f);
    for (int64_t key = 0; key < seen; key += BLOCK_KEYS) {
        const int64_t count = std::min<int64_t>(BLOCK_KEYS, seen - key);
        const Block block = {position - key, count};
        for (int64_t col = 0; col < count; col += COLS)
            for (int64_t row = block.first_row(col); row < rows; row += ROWS) {
                Tile tile = {};
                multiply(tile, query + row * d, d, 1, keys + (key + col) * d, d);
                for (int r = 0; r < ROWS; ++r)
                    for (int half = 0; half < 2; ++half) {
                        const int64_t distance = position + std::min(row + r, n - 1) - key - col - half * LANES;
                        const int64_t place = sizes.keys - 1 - distance;
                        store(weights + (row + r) * BLOCK_KEYS + col + half * LANES,
                              tile.at[r][half] * load(scale + place) + load(shift + place));
                    }
            }
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t cols = up(block.keys_of(row / ROWS * ROWS), LANES);
            const float factor = soften(weights + row * BLOCK_KEYS, cols, highest[row], total[row]);
            if (factor != 1.0f)
                for (int64_t x = 0; x < width; ++x) sums[row * width + x] *= factor;
        }
        add_product(sums, rows, width, weights, BLOCK_KEYS, 1, values + key * COLS, sizes.keys * COLS,
                    [&](int64_t row) { return Range{0, block.keys_of(row)}; });
    }
    for (int64_t row = 0; row < n; ++row) {
        for (int64_t x = 0; x < d; ++x) out.row(first + row)[x] = sums[row * width + x] / total[row];
        log_sum[first + row] = highest[row] + std::log(total[row]);
    }
}

// --- Backward ------------------------------------------------------------------------------------------------------

// Cuts what one head needs out of one buffer; without a buffer, only counts the floats.
struct Arena {
    float* start;
    int64_t used = 0;
    float* take(int64_t n) {
        used += n;
        return start ? start + used - n : nullptr;
    }
};

// Of one head: queries and output gradients by blocks of BLOCK_ROWS rows, as they are and in panels of their block; a
// block of keys and values; and sums of gradients.
struct Workspace {
    float *query, *query_panels, *d_out, *d_out_panels, *d_query;
    float *slope, *log_sum;  // of each row: <d_out, out>, and log(sum of exp(logits))
    float *keys, *values, *key_panels, *d_key, *d_value;
    float *weights, *d_scores;

    Workspace(Arena& arena, const Sizes& sizes) {
        const int64_t d = sizes.d, width = up(d, COLS), rows = up(sizes.queries, BLOCK_ROWS);
        for (float** each : {&query, &d_out}) *each = arena.take(rows * d);
        for (float** each : {&query_panels, &d_out_panels, &d_query}) *each = arena.take(rows * width);
        for (float** each : {&slope, &log_sum}) *each = arena.take(rows);
        for (float** each : {&keys, &values}) *each = arena.take(BLOCK_KEYS * d);
        for (float** each : {&key_panels, &d_key, &d_value}) *each = arena.take(BLOCK_KEYS * width);
        for (float** each : {&weights, &d_scores}) *each = arena.take(BLOCK_ROWS * BLOCK_KEYS);
    }
};

struct Head {  // inputs, and gradients to be written; d_scale and d_shift may be null, and lie backwards
    Matrix q, k, v, out, d_out, dq, dk, dv;
    const float *scale, *shift, *log_sum;
    float *d_scale, *d_shift;
};

void pack_queries(const Sizes& sizes, const Head& head, const Workspace& at) {
    const int64_t d = sizes.d, width = up(d, COLS);
    for (int64_t first = 0; first < sizes.queries; first += BLOCK_ROWS) {
        const int64_t n = std::min<int64_t>(BLOCK_ROWS, sizes.queries - first);
        copy_rows(head.q, first, n, BLOCK_ROWS, d, at.query + first * d);
        copy_rows(head.d_out, first, n, BLOCK_ROWS, d, at.d_out + first * d);
        pack_rows(head.q, first, n, BLOCK_ROWS, d, at.query_panels + first * width);
        pack_rows(head.d_out, first, n, BLOCK_ROWS, d, at.d_out_panels + first * width);
    }
    for (int64_t row = 0; row < up(sizes.queries, BLOCK_ROWS); ++row) {
        const bool real = row < sizes.queries;  // the rows that fill up a block get weights of 0
        at.log_sum[row] = real ? head.log_sum[row] : INF;
        at.slope[row] = 0.0f;
        for (int64_t x = 0; real && x < d; ++x) at.slope[row] += head.d_out.row(row)[x] * head.out.row(row)[x];
    }
}

// The weights of n rows from `first` on at `cols` keys from `key` on, and the gradients of their scores <q, k>; of what
// the rows don't see, only the zeros that a tile of ROWS keys takes in.
void backward_weights(const Sizes& sizes, const Head& head, const Workspace& at, int64_t first, int64_t n, int64_t key,
                      int64_t cols, const Block& block) {
    const int64_t d = sizes.d, position = sizes.keys - sizes.queries + first;
    for (int64_t col = 0; col < cols; col += COLS)
        for (int64_t row = block.first_row(col - ROWS + 1); row < n; row += ROWS) {
            Tile scores = {}, d_weights = {};
            multiply(scores, at.query + (first + row) * d, d, 1, at.keys + col * d, d);
            multiply(d_weights, at.d_out + (first + row) * d, d, 1, at.values + col * d, d);
            for (int r = 0; r < ROWS; ++r)
                for (int half = 0; half < 2; ++half) {
                    const int64_t x = col + half * LANES, y = row + r;
                    const int64_t place = sizes.keys - 1 - (position + std::min(y, n - 1) - key - x);
                    const vec scale = load(head.scale + place), score = scores.at[r][half];
                    const vec weight = exp_of(score * scale + load(head.shift + place) - at.log_sum[first + y]);
                    const vec d_logit = weight * (d_weights.at[r][half] - at.slope[first + y]);
                    store(at.weights + y * BLOCK_KEYS + x, weight);
                    store(at.d_scores + y * BLOCK_KEYS + x, d_logit * scale);
                    if (head.d_shift) store(head.d_shift + place, load(head.d_shift + place) + d_logit);
                    if (head.d_scale) store(head.d_scale + place, load(head.d_scale + place) + d_logit * score);
                }
        }
}

void backward_head(const Sizes& sizes, const Head& head, const Workspace& at) {
    const int64_t d = sizes.d, width = up(d, COLS), before = sizes.keys - sizes.queries;
    pack_queries(sizes, head, at);
    std::fill_n(at.d_query, up(sizes.queries, BLOCK_ROWS) * width, 0.0f);
    for (int64_t key = 0; key < sizes.keys; key += BLOCK_KEYS) {
        const int64_t count = std::min<int64_t>(BLOCK_KEYS, sizes.keys - key), high = up(count, ROWS);
        pack_transposed(head.k, key, count, up(high, COLS), d, at.keys);
        pack_transposed(head.v, key, count, up(high, COLS), d, at.values);
        pack_rows(head.k, key, count, BLOCK_KEYS, d, at.key_panels);
        std::fill_n(at.d_key, high * width, 0.0f);
        std::fill_n(at.d_value, high * width, 0.0f);
        const int64_t sees_key = std::max<int64_t>(0, key - before) / BLOCK_ROWS * BLOCK_ROWS;
        for (int64_t first = sees_key; first < sizes.queries; first += BLOCK_ROWS) {
            const int64_t n = std::min<int64_t>(BLOCK_ROWS, sizes.queries - first);
            const Block block = {before + first - key, std::min(count, before + first + n - key)};
            const int64_t seen = up(block.count, ROWS), panel = BLOCK_ROWS * COLS;
            backward_weights(sizes, head, at, first, n, key, up(seen, COLS), block);
            const auto queries_of = [&](int64_t key) { return Range{std::min(n, block.first_row(key)), n}; };
            const auto keys_of = [&](int64_t row) { return Range{0, block.keys_of(row)}; };
            add_product(at.d_value, seen, width, at.weights, 1, BLOCK_KEYS, at.d_out_panels + first * width, panel,
                        queries_of);
            add_product(at.d_key, seen, width, at.d_scores, 1, BLOCK_KEYS, at.query_panels + first * width, panel,
                        queries_of);
            add_product(at.d_query + first * width, up(n, ROWS), width, at.d_scores, BLOCK_KEYS, 1, at.key_panels,
                        BLOCK_KEYS * COLS, keys_of);
        }
        for (int64_t row = 0; row < count; ++row) {
            std::copy_n(at.d_key + row * width, d, head.dk.row(key + row));
            std::copy_n(at.d_value + row * width, d, head.dv.row(key + row));
        }
    }
    for (int64_t row = 0; row < sizes.queries; ++row) std::copy_n(at.d_query + row * width, d, head.dq.row(row));
}

}  // namespace

// --- What native.py calls ------------------------------------------------------------------------------------------

extern "C" {

int64_t attend_mask() { return MASK; }

// Writes `out` (B, H, Tq, d) and `log_sum` (B, H, Tq), contiguous. Keys and values are packed for a group of heads at a
// time, which the threads then share block by block.
void attend_forward(const Sizes* sizes_, const Tables* tables_, const Tensor* q, const Tensor* k, const Tensor* v,
                    const Tensor* out, float* log_sum, int64_t threads) {
    const Sizes sizes = *sizes_;
    const Tables tables = *tables_;
    const int64_t d = sizes.d, width = up(d, COLS), padded = up(sizes.keys, COLS), each = padded * (d + width);
    const int64_t pairs = sizes.batch * sizes.heads, blocks = up(sizes.queries, BLOCK_ROWS) / BLOCK_ROWS;
    const int64_t group = std::min(pairs, std::max<int64_t>(threads, (1 << 19) / each));
    const Floats packed(new float[group * each]);  // not a vector: nothing needs zeros
#pragma omp parallel num_threads(threads)
    {
        const Floats work(new float[BLOCK_ROWS * (d + BLOCK_KEYS + width)]);
        for (int64_t start = 0; start < pairs; start += group) {
            const int64_t here = std::min(group, pairs - start);
#pragma omp for schedule(static)
            for (int64_t index = 0; index < here; ++index) {
                float* keys = packed.get() + index * each;
                pack_transposed(head_of(*k, start + index, sizes), 0, sizes.keys, padded, d, keys);
                pack_rows(head_of(*v, start + index, sizes), 0, sizes.keys, sizes.keys, d, keys + padded * d);
            }
#pragma omp for schedule(dynamic)
            for (int64_t item = 0; item < here * blocks; ++item) {  // the rows that see most come first
                const int64_t index = item % here, first = (blocks - 1 - item / here) * BLOCK_ROWS;
                const int64_t pair = start + index, head = pair % sizes.heads;
                const float* keys = packed.get() + index * each;
                forward_block(sizes, head_of(*q, pair, sizes), keys, keys + padded * d,
                              tables.scale + head * tables.scale_by_head, tables.shift + head * tables.shift_by_head,
                              first, head_of(*out, pair, sizes), log_sum + pair * sizes.queries, work.get());
            }
        }
    }
}

// Writes dq, dk and dv; adds to d_scale and d_shift, (B H, N + attend_mask()) and backwards, which may be null. A head is
// one thread's work, so no sum depends on the number of threads.
void attend_backward(const Sizes* sizes_, const Tables* tables_, const Tensor* q, const Tensor* k, const Tensor* v,
                     const Tensor* out, const float* log_sum, const Tensor* d_out, const Tensor* dq, const Tensor* dk,
                     const Tensor* dv, float* d_scale, float* d_shift, int64_t threads) {
    const Sizes sizes = *sizes_;
    const Tables tables = *tables_;
    const int64_t length = sizes.keys + MASK;
    Arena counted = {nullptr};
    Workspace(counted, sizes);
#pragma omp parallel num_threads(threads)
    {
        const Floats work(new float[counted.used]);
        Arena arena = {work.get()};
        const Workspace at(arena, sizes);
#pragma omp for schedule(dynamic)
        for (int64_t pair = 0; pair < sizes.batch * sizes.heads; ++pair) {
            const int64_t head = pair % sizes.heads;
            auto of = [&](const Tensor* x) { return head_of(*x, pair, sizes); };
            backward_head(sizes,
                          {of(q), of(k), of(v), of(out), of(d_out), of(dq), of(dk), of(dv),
                           tables.scale + head * tables.scale_by_head, tables.shift + head * tables.shift_by_head,
                           log_sum + pair * sizes.queries, d_scale ? d_scale + pair * length : nullptr,
                           d_shift ? d_shift + pair * length : nullptr},
                          at);
        }
    }
}

}

// Causal linear attention: o_i = sum_{j <= i} (phi_i . psi_j) v_j / sum_{j <= i} phi_i . psi_j, and its gradients.
//
// Shape legend: B batch, Hq / Hkv query and key-value heads, L length, M features, W value width, C = 64 tokens in a chunk,
// N = B Hkv. M_ and W_ are M and W rounded up to whole vectors. The formulas stand in src/saccade/operator/variants/_causal.py.
//
// A chunk reads itself through the lower half of the C x C products of its features, and all before it through the state
// S = sum psi_j v_j^T, z = sum psi_j. Spans of kSpan tokens run at the same time: a first pass sums what each of them adds
// to the state, a second one starts from the sums. Spans depend on the length alone, so threads change no bit.
// Backward remakes the states at the chunks of a span (kSpan / C of them, in cache) and walks the chunks from the last one.
//
// Units: with log_scale the features of key j stand for exp(log_scale_j) psi_j, and everything at token i is computed in
// units of exp(running_i), the greatest so far.
#pragma once

#include <algorithm>
#include <cmath>

#include "gemm.h"
#include "parallel.h"

namespace saccade {
namespace SACCADE_SET {

constexpr int64_t kChunk = 64, kBlock = 16;
static_assert(kChunk % kBlock == 0 && kBlock % lanes == 0 && kLinearSpan % kChunk == 0);

SACCADE_INLINE int64_t whole_vectors(int64_t width) { return (width + lanes - 1) / lanes * lanes; }
SACCADE_INLINE float weight_of(float unit, float other) { return unit == -infinity ? 0.0f : std::exp(unit - other); }

// to[column][row] = from[row][column]; both counts are multiples of lanes.
inline void turn(const float* from, int64_t ld, int64_t rows, int64_t columns, float* to, int64_t ld_to) {
    for (int64_t i = 0; i < rows; i += lanes)
        for (int64_t k = 0; k < columns; k += lanes) {
            vf block[lanes];
            for (int n = 0; n < lanes; n++) block[n] = load(from + (i + n) * ld + k);
            transpose(block);
            for (int n = 0; n < lanes; n++) store(to + (k + n) * ld_to + i, block[n]);
        }
}

// to[width] += factor * from[width]
SACCADE_INLINE void add_scaled(float* to, float factor, const float* from, int64_t width) {
    for (int64_t n = 0; n < width; n += lanes) store(to + n, load(to + n) + splat(factor) * load(from + n));
}

SACCADE_INLINE void scale_row(float* row, float factor, int64_t width) {
    for (int64_t n = 0; n < width; n += lanes) store(row + n, load(row + n) * splat(factor));
}

template <Layout layout, bool add>
SACCADE_INLINE void product(int64_t rows, int64_t columns, int64_t count, const float* a, int64_t lda, const float* b, int64_t ldb,
                            float* c, int64_t ldc) {
    multiply<Single, layout, add>(rows, columns, count, a, lda, b, ldb, c, ldc);
}

// c[i][j] = a_i . b_j for j up to the end of i's block; `turned_b` is b by columns, [count][kChunk].
inline void lower_products(const float* a, int64_t lda, const float* turned_b, int64_t count, float* c) {
    for (int64_t i = 0; i < kChunk; i += kBlock)
        product<natural, false>(kBlock, i + kBlock, count, a + i * lda, lda, turned_b, kChunk, c + i * kChunk, kChunk);
}

// to[i] += sum_{j <= i} c[i][j] b[j]
inline void add_lower(const float* c, const float* b, int64_t width, float* to) {
    for (int64_t i = 0; i < kChunk; i += kBlock)
        product<natural, true>(kBlock, width, i + kBlock, c + i * kChunk, kChunk, b, width, to + i * width, width);
}

// to[j] += sum_{i >= j} c[i][j] b[i]
inline void add_lower_turned(const float* c, const float* b, int64_t width, float* to) {
    for (int64_t j = 0; j < kChunk; j += kBlock)
        product<turned, true>(kBlock, width, kChunk - j, c + j * kChunk + j, kChunk, b + j * width, width, to + j * width, width);
}

// What is not below the diagonal of a block is 0 for good.
SACCADE_INLINE void cut_off(float* row, int64_t i) {
    const int64_t end = (i / kBlock + 1) * kBlock;
    for (int64_t j = i + 1; j < end; j++) row[j] = 0;
}

template <class T> class LinearPass {
  public:
    explicit LinearPass(const Linear& call)
        : call(call), M(call.width), W(call.value_width), M_(whole_vectors(M)), W_(whole_vectors(W)), group(call.heads / call.kv_heads),
          spans(call.spans()), state_size(M * (W + 1)) {}

    void forward() const {
        each_span([&](Chunk& chunk, int64_t n, int64_t span) {
            if (span + 1 == spans) return;
            chunk.begin(nullptr);
            each_chunk(span, [&](int64_t first, int64_t count) {
                chunk.take_keys(n, first, count);
                chunk.add_keys();
            });
            chunk.give_state(state(call.states, n, span + 1));
        });
        // What each span added becomes what stands before it.
        for (int64_t n = 0; n < call.batch * call.kv_heads; n++)
            for (int64_t span = 0; span + 1 < spans; span++)
                carry(state(call.states, n, span), state(call.states, n, span + 1), span_factor(n, span));
        each_span([&](Chunk& chunk, int64_t n, int64_t span) {
            chunk.begin(state(call.states, n, span));
            each_chunk(span, [&](int64_t first, int64_t count) {
                chunk.take_keys(n, first, count);
                chunk.take_turned_keys();
                for (int64_t g = 0; g < group; g++) chunk.read(n, g, first, count);
                chunk.add_keys();
            });
            if (span + 1 == spans) chunk.give_state(state(call.states, n, spans));
        });
    }

    void backward() const {
        each_span([&](Chunk& chunk, int64_t n, int64_t span) {
            if (!span) return;
            chunk.begin(nullptr);
            each_chunk_back(span, [&](int64_t first, int64_t count) {
                chunk.take_units(n, first, count);
                chunk.decay();
                for (int64_t g = 0; g < group; g++) {
                    chunk.take_rows(n, g, first, count);
                    chunk.add_rows();
                }
            });
            chunk.give_state(state(call.d_states, n, span));
        });
        for (int64_t n = 0; n < call.batch * call.kv_heads; n++)
            for (int64_t span = spans - 1; span > 0; span--)
                carry(state(call.d_states, n, span + 1), state(call.d_states, n, span), span_factor(n, span));
        each_span([&](Chunk& chunk, int64_t n, int64_t span) {
            chunk.remake(n, span, state(call.states, n, span));
            chunk.begin(state(call.d_states, n, span + 1));
            each_chunk_back(span, [&](int64_t first, int64_t count) {
                chunk.take_keys(n, first, count);
                chunk.take_turned_keys();
                chunk.take_turned_values();
                chunk.begin_gradients();
                for (int64_t g = 0; g < group; g++) chunk.read_back(n, g, first, count);
                chunk.give_gradients(n, first, count);
                chunk.decay();
                for (int64_t g = 0; g < group; g++) {
                    if (group > 1) chunk.take_rows(n, g, first, count);
                    chunk.add_rows();
                }
            });
            if (!span) chunk.give_state(state(call.d_states, n, 0));
        });
    }

  private:
    const Linear& call;
    const int64_t M, W, M_, W_, group, spans, state_size;

    float* state(float* states, int64_t n, int64_t span) const { return states + (n * (spans + 1) + span) * state_size; }

    int64_t end_of(int64_t span) const { return std::min((span + 1) * kLinearSpan, call.length); }

    template <class F> void each_chunk(int64_t span, F&& body) const {
        for (int64_t first = span * kLinearSpan; first < end_of(span); first += kChunk) body(first, std::min(kChunk, end_of(span) - first));
    }

    template <class F> void each_chunk_back(int64_t span, F&& body) const {
        const int64_t begin = span * kLinearSpan, end = end_of(span);
        for (int64_t first = begin + (end - begin - 1) / kChunk * kChunk; first >= begin; first -= kChunk)
            body(first, std::min(kChunk, end - first));
    }

    // Of a state before the span in units of the one after it.
    float span_factor(int64_t n, int64_t span) const {
        if (!call.running) return 1;
        const float* running = call.running + n * (call.length + 1);
        return weight_of(running[span * kLinearSpan], running[end_of(span)]);
    }

    void carry(const float* from, float* to, float factor) const {
        for (int64_t i = 0; i < state_size; i++) to[i] += factor * from[i];
    }

    // One chunk of one key-value head in a thread's scratch, and the state that it reads: the sum over what stands
    // before it, or in the backward pass the gradient of that sum, from what stands after it.
    struct Chunk {
        const LinearPass& pass;
        const Linear& call;
        const int64_t M, W, M_, W_;
        float *K, *K_state, *KT, *V, *VT, *Q, *Q_state, *A, *dA, *G, *O, *dQ, *dK, *dV, *S, *z, *ST, *d_den, *key_unit, *row_unit, *units;
        float* before;  // S^T and z before each chunk of the span
        float kept;     // of the state before the chunk, in the units of the one after it

        explicit Chunk(const LinearPass& pass)
            : pass(pass), call(pass.call), M(pass.M), W(pass.W), M_(pass.M_), W_(pass.W_), kept(1) {
            const bool scaled = call.running;
            const int64_t square = kChunk * kChunk, wide = kChunk * M_, tall = kChunk * W_, chunks = kLinearSpan / kChunk;
            float** buffers[] = {&K, &KT, &Q, &dQ, &dK, &V, &VT, &G, &O, &dV, &A, &dA, &S, &ST, &z, &d_den, &key_unit, &row_unit, &units, &before, &K_state, &Q_state};
            const int64_t sizes[] = {wide, wide, wide, wide, wide, tall, tall, tall, tall, tall, square, square, M_ * W_, M_ * W_, M_, kChunk,
                                     kChunk, kChunk, kChunk, call.d_states ? chunks * M_ * (W_ + 1) : 0, scaled ? wide : 0, scaled ? wide : 0};
            int64_t all = 0;
            for (int64_t size : sizes) all += (size + 15) / 16 * 16;
            float* memory = static_cast<float*>(scratch(0, all * (int64_t)sizeof(float)));
            for (int n = 0; n < (int)(sizeof sizes / sizeof *sizes); n++) {
                *buffers[n] = memory;
                memory += (sizes[n] + 15) / 16 * 16;
            }
            if (!scaled) K_state = K, Q_state = Q;
        }

        // --- the state ---

        void begin(const float* from) {
            std::fill(S, S + M_ * W_, 0.0f);
            std::fill(z, z + M_, 0.0f);
            if (!from) return;
            for (int64_t m = 0; m < M; m++) {
                std::copy(from + m * (W + 1), from + m * (W + 1) + W, S + m * W_);
                z[m] = from[m * (W + 1) + W];
            }
        }

        void give_state(float* to) const {
            for (int64_t m = 0; m < M; m++) {
                std::copy(S + m * W_, S + m * W_ + W, to + m * (W + 1));
                to[m * (W + 1) + W] = z[m];
            }
        }

        void decay() {
            if (kept == 1) return;
            for (int64_t m = 0; m < M; m++) scale_row(S + m * W_, kept, W_);
            scale_row(z, kept, M_);
        }

        void add_keys() {
            decay();
            product<turned, true>(M, W_, kChunk, K_state, M_, V, W_, S, W_);
            for (int64_t j = 0; j < kChunk; j++) add_scaled(z, 1, K_state + j * M_, M_);
        }

        void add_rows() {
            product<turned, true>(M, W_, kChunk, Q_state, M_, G, W_, S, W_);
            for (int64_t i = 0; i < kChunk; i++) add_scaled(z, d_den[i], Q_state + i * M_, M_);
        }

        // S^T and z before every chunk of a span.
        void remake(int64_t n, int64_t span, const float* from) {
            begin(from);
            turn(S, W_, whole_vectors(M), W_, before, M_);
            std::copy(z, z + M_, before + M_ * W_);
            float* here = before;
            const int64_t size = M_ * (W_ + 1);
            pass.each_chunk(span, [&](int64_t first, int64_t count) {
                if (first + count == pass.end_of(span)) return;
                take_keys(n, first, count);
                float* next = here + size;
                for (int64_t i = 0; i < size; i += lanes) store(next + i, splat(kept) * load(here + i));
                product<turned, true>(W, M_, kChunk, V, W_, K_state, M_, next, M_);
                for (int64_t j = 0; j < kChunk; j++) add_scaled(next + M_ * W_, 1, K_state + j * M_, M_);
                here = next;
            });
        }

        // --- packing ---

        template <class U> static const U* row_of(const Input& input, int64_t b, int64_t h, int64_t i) {
            return static_cast<const U*>(input.data) + b * input.batch + h * input.head + i * input.row;
        }
        template <class U> static U* row_of(const Output& output, int64_t b, int64_t h, int64_t i) {
            return static_cast<U*>(output.data) + b * output.batch + h * output.head + i * output.row;
        }

        SACCADE_INLINE vf feature(vf x, int64_t width) const {
            if (call.map == Linear::elu_plus_one) x = x > vf{} ? x + splat(1.0f) : exp2_of<5>(x, splat(log2_e));
            return width >= lanes ? x : select((1u << width) - 1, x, vf{});
        }

        // Rows [first, first + count) of a head, 0 where `kept_rows` is 0 and after the last one.
        void pack(const Input& input, int64_t b, int64_t h, int64_t first, int64_t count, const uint8_t* kept_rows, int64_t width, bool map,
                  float* to) const {
            const int64_t whole = whole_vectors(width);
            for (int64_t i = 0; i < kChunk; i++) {
                float* row = to + i * whole;
                if (i >= count || (kept_rows && !kept_rows[first + i])) {
                    std::fill(row, row + whole, 0.0f);
                    continue;
                }
                const T* from = row_of<T>(input, b, h, first + i);
                for (int64_t n = 0; n < width; n += lanes) {
                    const vf x = load_as_float(from + n, width - n);
                    store(row + n, map ? feature(x, width - n) : x);
                }
            }
        }

        void take_units(int64_t n, int64_t first, int64_t count) {
            if (!call.running) return;
            const float *own = call.log_scale + n * (call.length + 1) + first + 1, *running = call.running + n * (call.length + 1) + first;
            for (int64_t i = 0; i < kChunk; i++) {
                units[i] = i < count ? own[i] : -infinity;
                row_unit[i] = running[std::min(i, count - 1) + 1];
            }
            for (int64_t i = 0; i < kChunk; i++) key_unit[i] = weight_of(units[i], row_unit[kChunk - 1]);
            kept = weight_of(running[0], row_unit[kChunk - 1]);
        }

        void take_keys(int64_t n, int64_t first, int64_t count) {
            const int64_t b = n / call.kv_heads, h = n % call.kv_heads;
            const uint8_t* kept_keys = call.keys ? call.keys + b * call.keys_batch : nullptr;
            take_units(n, first, count);
            pack(call.key, b, h, first, count, kept_keys, M, true, K);
            pack(call.value, b, h, first, count, kept_keys, W, false, V);
            if (!call.running) return;
            std::copy(K, K + kChunk * M_, K_state);
            for (int64_t j = 0; j < kChunk; j++) scale_row(K_state + j * M_, key_unit[j], M_);
        }

        void take_turned_keys() { turn(K, M_, kChunk, M_, KT, kChunk); }
        void take_turned_values() { turn(V, W_, kChunk, W_, VT, kChunk); }

        const uint8_t* kept_rows(int64_t b) const { return call.rows ? call.rows + b * call.rows_batch : nullptr; }
        float* denominators(int64_t b, int64_t h, int64_t first) const { return call.denominator + (b * call.heads + h) * call.length + first; }

        void take_queries(int64_t n, int64_t b, int64_t h, int64_t first, int64_t count) {
            pack(call.query, b, h, first, count, kept_rows(b), M, true, Q);
            if (!call.running) return;
            const float before_chunk = call.running[n * (call.length + 1) + first];
            std::copy(Q, Q + kChunk * M_, Q_state);
            for (int64_t i = 0; i < kChunk; i++) scale_row(Q_state + i * M_, weight_of(before_chunk, row_unit[i]), M_);
        }

        // Queries, and gradients of numerator and denominator.
        void take_rows(int64_t n, int64_t g, int64_t first, int64_t count) {
            const int64_t b = n / call.kv_heads, h = n % call.kv_heads * pass.group + g;
            take_queries(n, b, h, first, count);
            pack(call.d_out, b, h, first, count, kept_rows(b), W, false, G);
            std::fill(d_den, d_den + kChunk, 0.0f);
            if (!call.normalise) return;
            const float* denominator = denominators(b, h, first);
            for (int64_t i = 0; i < count; i++) {
                const bool live = !(std::fabs(denominator[i]) < call.least);
                const float inverse = live ? 1 / denominator[i] : 0;
                const T* out = row_of<T>(call.out_read, b, h, first + i);
                vf sum = {};
                for (int64_t k = 0; k < W; k += lanes) {
                    sum += load(G + i * W_ + k) * load_as_float(out + k, W - k);
                    store(G + i * W_ + k, live ? load(G + i * W_ + k) * splat(inverse) : vf{});
                }
                d_den[i] = live ? -total(sum) * inverse : 0;
            }
        }

        // --- reading ---

        // Products in the rows' units, 0 for later keys.
        void scale_products(float* products) const {
            for (int64_t i = 0; i < kChunk; i++) {
                float* row = products + i * kChunk;
                const int64_t end = (i / kBlock + 1) * kBlock;
                if (call.running)
                    for (int64_t j = 0; j < end; j += lanes) {
                        const vf away = load(units + j) - splat(row_unit[i]);
                        const vf weight = exp2_of<5>(away < vf{} ? away : vf{}, splat(log2_e));
                        store(row + j, load(units + j) > splat(-infinity) ? load(row + j) * weight : vf{});
                    }
                cut_off(row, i);
            }
        }

        void read(int64_t n, int64_t g, int64_t first, int64_t count) {
            const int64_t b = n / call.kv_heads, h = n % call.kv_heads * pass.group + g;
            take_queries(n, b, h, first, count);
            lower_products(Q, M_, KT, M, A);
            scale_products(A);
            product<natural, false>(kChunk, W_, M, Q_state, M_, S, W_, O, W_);
            add_lower(A, V, W_, O);
            float* denominator = denominators(b, h, first);
            for (int64_t i = 0; i < count; i++) {
                vf sum = {};
                for (int64_t j = 0; j < (i / kBlock + 1) * kBlock; j += lanes) sum += load(A + i * kChunk + j);
                for (int64_t m = 0; m < M_; m += lanes) sum += load(Q_state + i * M_ + m) * load(z + m);
                denominator[i] = total(sum);
                const bool live = !(std::fabs(denominator[i]) < call.least);
                const float factor = !call.normalise ? 1 : live ? 1 / denominator[i] : 0;
                T* out = row_of<T>(call.out, b, h, first + i);
                for (int64_t k = 0; k < W; k += lanes)
                    store_from_float(out + k, live || !call.normalise ? load(O + i * W_ + k) * splat(factor) : vf{}, W - k);
            }
        }

        // --- gradients ---

        // Through the state: V dS^T + dz and K dS, S being the gradient of the state after the chunk.
        void begin_gradients() {
            turn(S, W_, M_, W_, ST, M_);
            product<natural, false>(kChunk, M_, W, V, W_, ST, M_, dK, M_);
            product<natural, false>(kChunk, W_, M, K_state, M_, S, W_, dV, W_);
            for (int64_t j = 0; j < kChunk; j++) {
                add_scaled(dK + j * M_, 1, z, M_);
                if (call.running) scale_row(dK + j * M_, key_unit[j], M_);
            }
        }

        void read_back(int64_t n, int64_t g, int64_t first, int64_t count) {
            const int64_t b = n / call.kv_heads, h = n % call.kv_heads * pass.group + g;
            take_rows(n, g, first, count);
            lower_products(Q, M_, KT, M, A);
            scale_products(A);
            lower_products(G, W_, VT, W, dA);
            for (int64_t i = 0; i < kChunk; i++)
                for (int64_t j = 0; j < (i / kBlock + 1) * kBlock; j += lanes) store(dA + i * kChunk + j, load(dA + i * kChunk + j) + splat(d_den[i]));
            scale_products(dA);

            const float* state = before + first % kLinearSpan / kChunk * (M_ * (W_ + 1));
            product<natural, false>(kChunk, M_, W, G, W_, state, M_, dQ, M_);
            const float before_chunk = call.running ? call.running[n * (call.length + 1) + first] : 0;
            for (int64_t i = 0; i < kChunk; i++) {
                add_scaled(dQ + i * M_, d_den[i], state + M_ * W_, M_);
                if (call.running) scale_row(dQ + i * M_, weight_of(before_chunk, row_unit[i]), M_);
            }
            add_lower(dA, K, M_, dQ);
            add_lower_turned(dA, Q, M_, dK);
            add_lower_turned(A, G, W_, dV);
            for (int64_t i = 0; i < count; i++) give(dQ + i * M_, Q + i * M_, M, row_of<T>(call.d_query, b, h, first + i));
        }

        void give_gradients(int64_t n, int64_t first, int64_t count) const {
            const int64_t b = n / call.kv_heads, h = n % call.kv_heads;
            const uint8_t* kept_keys = call.keys ? call.keys + b * call.keys_batch : nullptr;
            for (int64_t j = 0; j < count; j++) {
                if (kept_keys && !kept_keys[first + j]) {
                    T *d_key = row_of<T>(call.d_key, b, h, first + j), *d_value = row_of<T>(call.d_value, b, h, first + j);
                    std::fill(d_key, d_key + M, T{}), std::fill(d_value, d_value + W, T{});
                    continue;
                }
                give(dK + j * M_, K + j * M_, M, row_of<T>(call.d_key, b, h, first + j));
                T* d_value = row_of<T>(call.d_value, b, h, first + j);
                for (int64_t k = 0; k < W; k += lanes) store_from_float(d_value + k, load(dV + j * W_ + k), W - k);
            }
        }

        // Through the map: where x > 0 the feature is above 1 and the slope is 1, elsewhere the feature is the slope.
        void give(const float* gradient, const float* features, int64_t width, T* to) const {
            for (int64_t n = 0; n < width; n += lanes) {
                const vf feature = load(features + n), one = splat(1.0f);
                const vf slope = call.map == Linear::elu_plus_one ? (feature > one ? one : feature) : one;
                store_from_float(to + n, load(gradient + n) * slope, width - n);
            }
        }
    };

    // Every span of every key-value head.
    template <class F> void each_span(F&& body) const {
        parallel(call.threads, call.batch * call.kv_heads * spans, [&](int64_t task, int) {
            Chunk chunk(*this);
            body(chunk, task / spans, task % spans);
        });
    }
};

inline void linear(const Linear& call) {
    auto run = [&](auto pass) { call.d_states ? pass.backward() : pass.forward(); };
    switch (call.type) {
        case Type::f32: return run(LinearPass<float>(call));
        case Type::bf16: return run(LinearPass<bf16>(call));
        case Type::f16: return run(LinearPass<f16>(call));
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade

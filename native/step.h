// A step of decoding: one token of each item through blocks of a decoder, with few rows of products, one query's attention,
// and no allocation. The weights and the cache are read once, and that is the cost; what lies between the products stays in
// the first-level cache, in float32 whatever the type of the model.
//
// Shape legend: R items, E width, Hq / Hkv query and key-value heads, D, Dv widths of key and value, F hidden width.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "call.h"
#include "decode.h"
#include "few_rows.h"
#include "groups.h"
#include "int8.h"
#include "norm.h"
#include "program_run.h"
#include "round_rows.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

template <class T> class StepPass {
  public:
    explicit StepPass(const Step& call) : call(call), R(call.items), E(call.width) {
        for (int64_t n = 0; n < call.layer_count; n++) {
            const StepLayer& layer = call.layers[n];
            most = std::max({most, layer.projected(), layer.heads * std::max(layer.width, layer.value_width), E,
                             layer.up.features + layer.gate.features});
        }
    }

    // How many rows of products of bytes were not finite: then the result is of no use.
    int64_t run() {
        const Workspace workspace((4 * R * E + 3 * R * most) * (int64_t)sizeof(float) + R * most * (int64_t)sizeof(T));
        float* at = static_cast<float*>(workspace.data());
        x = at, normed = x + R * E, read = normed + R * E, fed = read + R * E;
        wide = fed + R * E, inner = wide + R * most, heads = inner + R * most;
        given = reinterpret_cast<T*>(heads + R * most);
        read_in(call.x);
        for (int64_t n = 0; n < call.layer_count; n++) {
            block(call.layers[n]);
            if (call.layers[n].out) convert(x, R * E, static_cast<T*>(call.layers[n].out)), read_in(call.layers[n].out);
        }
        if (call.norm.kind != StepNorm::none) norm(call.norm, x, x, R, E);
        convert(x, R * E, static_cast<T*>(call.out));
        return odd;
    }

  private:
    const Step& call;
    const int64_t R, E;
    int64_t most = 0, odd = 0;
    float *x = nullptr, *normed = nullptr, *read = nullptr, *fed = nullptr;  // (R, E)
    float *wide = nullptr, *inner = nullptr, *heads = nullptr;               // (R, most)
    T* given = nullptr;  // (R, most): queries, then outputs, as attention takes and gives them

    void read_in(const void* from) {
        for (int64_t n = 0; n < R * E; n += lanes) store_from_float(x + n, load_as_float(static_cast<const T*>(from) + n, R * E - n), R * E - n);
    }

    void block(const StepLayer& layer) {
        norm(layer.attention_norm, x, normed, R, E);
        attend(layer, normed, read);
        norm(layer.after_attention, read, read, R, E);
        if (!layer.parallel) add(read, x);
        if (layer.down.features) {
            if (!layer.parallel || layer.feed_forward_norm.kind != StepNorm::none) norm(layer.feed_forward_norm, x, normed, R, E);
            feed_forward(layer, normed, fed);
            norm(layer.after_feed_forward, fed, fed, R, E);
            add(fed, x);
        }
        if (layer.parallel) add(read, x);
    }

    void attend(const StepLayer& layer, const float* from, float* to) {
        const int64_t D = layer.width, queries = layer.heads * D, keys = layer.kv_heads * D, values = layer.kv_heads * layer.value_width;
        float *query = wide, *key = wide + R * queries, *value = key + R * keys;
        if (layer.key.features) {
            product(layer.query, from, E, query), product(layer.key, from, E, key), product(layer.value, from, E, value);
        } else {
            product(layer.query, from, E, inner);
            const int64_t whole = layer.projected();
            for (int64_t r = 0; r < R; r++) {
                std::copy_n(inner + r * whole, queries, query + r * queries);
                std::copy_n(inner + r * whole + queries, keys, key + r * keys);
                std::copy_n(inner + r * whole + queries + keys, values, value + r * values);
            }
        }
        norm(layer.query_norm, query, query, R * layer.heads, D), norm(layer.key_norm, key, key, R * layer.kv_heads, D);
        for (int64_t r = 0; r < R; r++) {
            turn(layer, r, query + r * queries, layer.heads), turn(layer, r, key + r * keys, layer.kv_heads);
            append(layer, layer.key_cache, r, key + r * keys, D);
            append(layer, layer.value_cache, r, value + r * values, layer.value_width);
        }
        convert(query, R * queries, given);
        if (layer.query_seen) std::copy_n(given, R * queries, static_cast<T*>(layer.query_seen));
        look(layer);
        const int64_t got = layer.heads * layer.value_width;
        if (layer.out_seen) std::copy_n(given, R * got, static_cast<T*>(layer.out_seen));
        for (int64_t n = 0; n < R * got; n += lanes) store_from_float(heads + n, load_as_float(given + n, R * got - n), R * got - n);
        product(layer.output, heads, got, to);
    }

    // Attention of the queries in `given` to the cache; the outputs take their place.
    void look(const StepLayer& layer) {
        const int64_t D = layer.width, got = layer.heads * layer.value_width;
        T* const out = reinterpret_cast<T*>(inner);
        Forward f;
        Problem& p = f.problem;
        p.heads = layer.heads, p.kv_heads = layer.kv_heads, p.length_q = 1, p.width = D, p.value_width = layer.value_width;
        p.type = call.type, p.scale = layer.scale, p.softcap = layer.softcap, p.sink = layer.sink, p.threads = call.threads;
        f.int8_rows = layer.int8_cache, f.quads = call.quads;
        const auto first_of = [&](int64_t r) {
            return layer.first ? layer.first[r] : layer.window ? std::max<int64_t>(call.held[r] - layer.window, 0) : 0;
        };
        bool alike = true;
        for (int64_t r = 1; r < R; r++) alike &= call.held[r] == call.held[0] && first_of(r) == first_of(0);
        p.batch = alike ? R : 1;
        for (int64_t r = 0; r < (alike ? 1 : R); r++) {
            const int64_t first = first_of(r);
            p.length_k = call.held[r] - first;
            f.query = {given + r * layer.heads * D, layer.heads * D, D, D};
            f.key = seen(layer, layer.key_cache, r, first), f.value = seen(layer, layer.value_cache, r, first);
            f.out = {out + r * got, got, layer.value_width, layer.value_width};
            decode(f);
        }
        std::copy_n(out, R * got, given);
    }

    static Input seen(const StepLayer& layer, const Output& cache, int64_t r, int64_t first) {
        const int64_t at = (r * cache.batch + first * cache.row) * (layer.int8_cache ? 1 : sizeof(T));
        return {static_cast<const char*>(cache.data) + at, cache.batch, cache.head, cache.row};
    }

    // Rows of 8 bits are those of the numbers as the step's type has them, as everywhere.
    void append(const StepLayer& layer, const Output& cache, int64_t r, const float* from, int64_t width) {
        for (int64_t h = 0; h < layer.kv_heads; h++) {
            const int64_t at = r * cache.batch + (call.held[r] - 1) * cache.row + h * cache.head;
            convert(from + h * width, width, layer.int8_cache ? given : static_cast<T*>(cache.data) + at);
            if (layer.int8_cache) round_row(given, width, static_cast<int8_t*>(cache.data) + at);
        }
    }

    // cos and sin of item r's position: of pairs (i, i + n) or, interleaved, (2 i, 2 i + 1).
    void turn(const StepLayer& layer, int64_t r, float* rows, int64_t count) const {
        const int64_t n = layer.pairs, step = layer.interleaved ? 2 : 1, other = layer.interleaved ? 1 : n;
        const float *cos = layer.cos + r * layer.cos_stride, *sin = layer.sin + r * layer.cos_stride;
        for (int64_t h = 0; n && h < count; h++) {
            float* const row = rows + h * layer.width;
            for (int64_t i = 0; i < n; i++) {
                const float a = row[i * step], b = row[i * step + other];
                row[i * step] = a * cos[i] - b * sin[i];
                row[i * step + other] = b * cos[i] + a * sin[i];
            }
        }
    }

    void feed_forward(const StepLayer& layer, const float* from, float* to) {
        const int64_t F = layer.hidden, up = layer.up.features;
        product(layer.up, from, E, wide);
        if (layer.gate.features) product(layer.gate, from, E, wide + R * up);
        for (int64_t r = 0; r < R; r++) {
            // Gate and up in one matrix, gate first; or in two, or no gate.
            const float* const gate = layer.gate.features ? wide + R * up + r * F : wide + r * up;
            const float* const with = layer.gate.features ? wide + r * up : up > F ? wide + r * up + F : nullptr;
            activate(layer.activation, gate, with, F, inner + r * F);
        }
        product(layer.down, inner, F, to);
    }

    void activate(StepLayer::Activation kind, const float* from, const float* with, int64_t count, float* to) const {
        for (int64_t n = 0; n < count; n += lanes) {
            const int64_t left = count - n;
            const vf a = load_as_float(from + n, left);
            vf y = a;
            switch (kind) {
                case StepLayer::relu: y = a > vf{} || a != a ? a : vf{}; break;
                case StepLayer::silu: y = a * sigmoid_of(a); break;
                case StepLayer::gelu_tanh:
                    y = splat(0.5f) * a * (splat(1.0f) + tanh_of(splat(0.7978845608f) * (a + splat(0.044715f) * a * a * a)));
                    break;
                case StepLayer::gelu:
                    for (int l = 0; l < lanes; l++) y[l] = 0.5f * a[l] * (1 + std::erf(a[l] * 0.70710678f));
                    break;
            }
            if (with) y *= load_as_float(with + n, left);
            store_from_float(to + n, y, left);
        }
    }

    // x (R, width) W^T + b.
    void product(const StepMatrix& matrix, const float* from, int64_t width, float* to) {
        if (matrix.kind == StepMatrix::int8) {
            Int8Product one;
            one.weight = static_cast<const int8_t*>(matrix.weight), one.scales = static_cast<const float*>(matrix.scales);
            odd += of_bytes(one, matrix, from, width, to);
        } else if (matrix.kind == StepMatrix::groups) {
            GroupProduct one;
            one.form = GroupForm(matrix.form);
            one.weight = static_cast<const uint8_t*>(matrix.weight), one.scales = static_cast<const uint16_t*>(matrix.scales);
            odd += of_bytes(one, matrix, from, width, to);
        } else {
            for (int64_t r = 0; r < R; r += kFewRows) {
                FewRows one;
                one.rows = std::min<int64_t>(R - r, kFewRows), one.width = width, one.features = matrix.features, one.threads = call.threads;
                one.half = matrix.kind == StepMatrix::bf16, one.weight = matrix.weight, one.x = from + r * width;
                one.out = to + r * matrix.features;
                few_rows(one);
            }
        }
        if (!matrix.bias) return;
        for (int64_t r = 0; r < R; r++)
            for (int64_t f = 0; f < matrix.features; f += lanes) {
                float* const at = to + r * matrix.features + f;
                const int64_t left = matrix.features - f;
                store_from_float(at, load_as_float(at, left) + load_as_float(static_cast<const T*>(matrix.bias) + f, left), left);
            }
    }

    template <class Product> int64_t of_bytes(Product& one, const StepMatrix& matrix, const float* from, int64_t width, float* to) {
        one.rows = R, one.width = width, one.features = matrix.features, one.threads = call.threads, one.x = from, one.out = to;
        return multiplied(one, call.quads);
    }
    static int64_t multiplied(const Int8Product& one, [[maybe_unused]] bool quads) {
#if defined(__AVX512F__)
        if (quads) return int8_product_quads(one);
#endif
        return int8_product(one);
    }
    static int64_t multiplied(const GroupProduct& one, [[maybe_unused]] bool quads) {
#if defined(__AVX512F__)
        if (quads) return group_product_quads(one);
#endif
        return group_product(one);
    }

    // Rows of `width`; to may be from. Without a kind a copy.
    static void norm(const StepNorm& norm, const float* from, float* to, int64_t rows, int64_t width) {
        if (norm.kind != StepNorm::none) normalise<T>(norm, from, to, rows, width);
        else if (from != to) std::copy_n(from, rows * width, to);
    }

    void add(const float* from, float* to) const {
        for (int64_t n = 0; n < R * E; n += lanes) store_from_float(to + n, load_as_float(to + n, R * E - n) + load_as_float(from + n, R * E - n), R * E - n);
    }

    static void convert(const float* from, int64_t count, T* to) {
        for (int64_t n = 0; n < count; n += lanes) store_from_float(to + n, load_as_float(from + n, count - n), count - n);
    }
};

inline int64_t step(const Step& call) {
    return call.type == Type::f32 ? StepPass<float>(call).run() : StepPass<bf16>(call).run();
}

}  // namespace SACCADE_SET
}  // namespace saccade

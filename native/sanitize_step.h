// A step of decoding in plain loops over doubles, and the kernel's against it.
#pragma once

#include <deque>

#include "dispatch.h"
#include "sanitize_oracle.h"

namespace saccade::sanitize {

// One layer and a last norm in float32; every tensor ends where its memory does.
struct StepRun {
    typedef std::vector<double> Row;

    Step call;
    StepLayer layer;
    std::deque<std::vector<float>> held;  // addresses stay
    std::deque<std::vector<int8_t>> rows;
    std::vector<float> x, out;
    std::vector<int64_t> tokens, first;
    Random& random;

    StepRun(Random& random, int threads) : random(random) {
        call.items = draw(random, 1, 9), call.width = draw(random, 2, 70), call.threads = threads;
        layer.kv_heads = draw(random, 1, 3), layer.heads = layer.kv_heads * draw(random, 1, 3);
        layer.width = 2 * draw(random, 1, 18), layer.value_width = draw(random, 1, 35), layer.hidden = draw(random, 1, 90);
        layer.parallel = chance(random, 0.3), layer.interleaved = chance(random, 0.5);
        layer.activation = (StepLayer::Activation)draw(random, 0, 3), layer.scale = 0.3f, layer.softcap = chance(random, 0.3) ? 2 : 0;
        const int64_t E = call.width, D = layer.width, Dv = layer.value_width;
        const bool joined = chance(random, 0.5), gated = chance(random, 0.5), own = chance(random, 0.5);
        layer.attention_norm = norm(E, 2), layer.feed_forward_norm = norm(E, layer.parallel ? 0 : 2);
        layer.after_attention = norm(E, 0), layer.after_feed_forward = norm(E, 0), call.norm = norm(E, 0);
        layer.query_norm = norm(D, 0), layer.key_norm = norm(D, 0);
        layer.query = matrix(joined ? layer.projected() : layer.heads * D, E);
        if (!joined) layer.key = matrix(layer.kv_heads * D, E), layer.value = matrix(layer.kv_heads * Dv, E);
        layer.output = matrix(E, layer.heads * Dv), layer.down = matrix(E, layer.hidden);
        layer.up = matrix(gated && !own ? 2 * layer.hidden : layer.hidden, E);
        if (gated && own) layer.gate = matrix(layer.hidden, E);
        layer.pairs = chance(random, 0.7) ? draw(random, 1, D / 2) : 0, layer.cos_stride = layer.pairs;
        layer.cos = numbers(call.items * layer.pairs), layer.sin = numbers(call.items * layer.pairs);
        if (chance(random, 0.5)) layer.sink = numbers(layer.heads);
        const bool alike = chance(random, 0.5);
        int64_t most = 1;
        for (int64_t r = 0; r < call.items; r++) {
            tokens.push_back(alike && r ? tokens[0] : draw(random, 1, 600)), most = std::max(most, tokens[r]);
            first.push_back(draw(random, 0, tokens[r] - 1));
        }
        if (chance(random, 0.3)) layer.first = first.data();
        if (chance(random, 0.5)) layer.window = draw(random, 1, 40);
        layer.int8_cache = chance(random, 0.4), call.quads = sums_quads() && chance(random, 0.7);
        layer.key_cache = cache(most, D), layer.value_cache = cache(most, Dv);
        numbers(call.items * E);
        x = held.back();
        out.assign(call.items * E, float(kNan));
        call.layers = &layer, call.layer_count = 1, call.held = tokens.data(), call.x = x.data(), call.out = out.data();
        kernels().step(call);
    }

    const float* numbers(int64_t count) {
        std::vector<float>& made = held.emplace_back(count);
        for (float& number : made) number = draw(random, -64, 64) / 64.0f;
        return made.data();
    }

    StepNorm norm(int64_t width, int least) {
        StepNorm norm;
        norm.kind = (StepNorm::Kind)(least ? draw(random, 1, 2) : draw(random, 0, 2)), norm.eps = 0.25f, norm.plus = draw(random, 0, 1);
        if (chance(random, 0.8)) norm.weight = numbers(width);
        if (norm.kind == StepNorm::layer && chance(random, 0.5)) norm.bias = numbers(width);
        return norm;
    }

    StepMatrix matrix(int64_t features, int64_t width) {
        StepMatrix matrix;
        matrix.features = features, matrix.weight = numbers(features * width);
        if (chance(random, 0.5)) matrix.bias = numbers(features);
        return matrix;
    }

    Output cache(int64_t slots, int64_t width) {
        Output cache;
        cache.row = layer.int8_cache ? width + 4 : width, cache.head = slots * cache.row, cache.batch = layer.kv_heads * cache.head;
        const int64_t count = call.items * layer.kv_heads * slots;
        const float* given = numbers(count * width);
        cache.data = const_cast<float*>(given);
        if (!layer.int8_cache) return cache;
        RoundRows call;
        call.batch = call.heads = 1, call.rows = count, call.width = width, call.x = {given, 0, 0, width};
        call.out = rows.emplace_back(count * cache.row).data(), cache.data = call.out;
        kernels().round_rows(call);
        return cache;
    }

    // Row j of a head of item r, or the fresh one. In 8 bits that is what the kernel has put there, too: NaN where it is not near.
    Row cached(const Output& cache, int64_t width, int64_t r, int64_t g, int64_t j, const double* fresh) const {
        const int64_t at = r * cache.batch + g * cache.head + j * cache.row;
        const int8_t* bytes = static_cast<const int8_t*>(cache.data) + at;
        float scale = 0;
        if (layer.int8_cache) std::memcpy(&scale, bytes + width, sizeof scale);
        Row row(width);
        for (int64_t d = 0; d < width; d++) {
            row[d] = layer.int8_cache ? double(bytes[d]) * scale : fresh ? fresh[d] : static_cast<const float*>(cache.data)[at + d];
            if (layer.int8_cache && fresh && !(std::fabs(row[d] - fresh[d]) <= 0.51 * scale)) row[d] = kNan;
        }
        return row;
    }

    // ---- the same in doubles

    static Row product(const StepMatrix& matrix, const Row& from) {
        Row to(matrix.features);
        const float *w = static_cast<const float*>(matrix.weight), *b = static_cast<const float*>(matrix.bias);
        for (int64_t f = 0; f < matrix.features; f++) {
            for (size_t k = 0; k < from.size(); k++) to[f] += double(w[f * from.size() + k]) * from[k];
            if (b) to[f] += b[f];
        }
        return to;
    }

    // In pieces of `width`, as heads have them.
    static Row normed(const StepNorm& norm, Row row, size_t width) {
        const float *w = static_cast<const float*>(norm.weight), *b = static_cast<const float*>(norm.bias);
        for (size_t at = 0; norm.kind && at < row.size(); at += width) {
            double mean = 0, square = 0;
            for (size_t n = at; n < at + width; n++) mean += norm.kind == StepNorm::layer ? row[n] / width : 0;
            for (size_t n = at; n < at + width; n++) square += (row[n] - mean) * (row[n] - mean) / width;
            for (size_t n = at; n < at + width; n++) {
                row[n] = (row[n] - mean) / std::sqrt(square + norm.eps);
                if (w) row[n] *= w[n - at] + norm.plus;
                if (b) row[n] += b[n - at];
            }
        }
        return row;
    }

    void turn(int64_t r, Row& row) const {
        const int64_t n = layer.pairs;
        for (size_t at = 0; at < row.size(); at += layer.width)
            for (int64_t i = 0; i < n; i++) {
                double &a = row[at + (layer.interleaved ? 2 * i : i)], &b = row[at + (layer.interleaved ? 2 * i + 1 : n + i)];
                const double cos = layer.cos[r * n + i], sin = layer.sin[r * n + i], before = a;
                a = a * cos - b * sin, b = b * cos + before * sin;
            }
    }

    double activated(double a) const {
        switch (layer.activation) {
            case StepLayer::relu: return std::max(a, 0.0);
            case StepLayer::silu: return a / (1 + std::exp(-a));
            case StepLayer::gelu: return a / 2 * (1 + std::erf(a / std::sqrt(2.0)));
            default: return a / 2 * (1 + std::tanh(std::sqrt(2 / M_PI) * (a + 0.044715 * a * a * a)));
        }
    }

    Row attended(int64_t r, const Row& from) const {
        const int64_t D = layer.width, Dv = layer.value_width, Q = layer.heads * D, K = layer.kv_heads * D;
        Row query = product(layer.query, from), key, value;
        if (layer.key.features) {
            key = product(layer.key, from), value = product(layer.value, from);
        } else {
            key.assign(query.begin() + Q, query.begin() + Q + K), value.assign(query.begin() + Q + K, query.end()), query.resize(Q);
        }
        query = normed(layer.query_norm, query, D), key = normed(layer.key_norm, key, D);
        turn(r, query), turn(r, key);
        const int64_t last = tokens[r] - 1;
        const int64_t begin = layer.first ? first[r] : layer.window ? std::max<int64_t>(tokens[r] - layer.window, 0) : 0;
        Row read(layer.heads * Dv);
        for (int64_t h = 0; h < layer.heads; h++) {
            const int64_t g = h / (layer.heads / layer.kv_heads);
            double whole = layer.sink ? std::exp(double(layer.sink[h])) : 0;
            for (int64_t j = begin; j <= last; j++) {
                double logit = 0;
                const Row one = cached(layer.key_cache, D, r, g, j, j == last ? &key[g * D] : nullptr);
                const Row other = cached(layer.value_cache, Dv, r, g, j, j == last ? &value[g * Dv] : nullptr);
                for (int64_t d = 0; d < D; d++) logit += query[h * D + d] * one[d];
                logit *= layer.scale;
                if (layer.softcap) logit = layer.softcap * std::tanh(logit / layer.softcap);
                whole += std::exp(logit);
                for (int64_t d = 0; d < Dv; d++) read[h * Dv + d] += std::exp(logit) * other[d];
            }
            for (int64_t d = 0; d < Dv; d++) read[h * Dv + d] /= whole;
        }
        return normed(layer.after_attention, product(layer.output, read), call.width);
    }

    Row fed(const Row& from) const {
        const int64_t F = layer.hidden;
        Row up = product(layer.up, from), gate, inner(F);
        if (layer.gate.features) {
            gate = product(layer.gate, from);
        } else if ((int64_t)up.size() > F) {
            gate.assign(up.begin(), up.begin() + F), up.erase(up.begin(), up.begin() + F);
        }
        for (int64_t f = 0; f < F; f++) inner[f] = gate.empty() ? activated(up[f]) : activated(gate[f]) * up[f];
        return normed(layer.after_feed_forward, product(layer.down, inner), call.width);
    }

    Row expected(int64_t r) const {
        Row row(x.begin() + r * call.width, x.begin() + (r + 1) * call.width);
        const Row before = normed(layer.attention_norm, row, call.width), read = attended(r, before);
        Row middle = row;
        for (size_t n = 0; n < row.size(); n++) middle[n] += read[n];
        const bool shares = layer.parallel && !layer.feed_forward_norm.kind;
        const Row added = fed(shares ? before : normed(layer.feed_forward_norm, layer.parallel ? row : middle, call.width));
        for (size_t n = 0; n < row.size(); n++) middle[n] += added[n];
        return normed(call.norm, middle, call.width);
    }
};

template <class Judge> void check_step_run(const StepRun& run, Judge& judge) {
    for (int64_t r = 0; r < run.call.items; r++) {
        const StepRun::Row want = run.expected(r);
        double size = 1;
        for (const double number : want) size = std::max(size, std::fabs(number));
        for (int64_t n = 0; n < run.call.width; n++) judge.near("step", run.out[r * run.call.width + n], want[n], 16 * size);
    }
}

}  // namespace saccade::sanitize

// Few query rows against many keys: keys and values are read once from memory and nothing of them is copied.
//
// A task is one chunk of keys of one item and kv head; all query rows of the head's group share what it reads. It leaves
// (top, sum, out) of each row, and the task that comes last of its head merges them in the order of the keys, so the bits
// depend neither on the threads nor on the other items ("Flash-Decoding", Dao, Haziza, Massa, Sizov 2023).
//
// R rows of a group = (Hq / Hkv) * Lq, row r is query r % Lq of the group's head r / Lq; D, Dv widths of key and value.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>

#include "decode_tiles.h"
#include "mask.h"
#include "pack.h"
#include "parallel.h"
#include "weights.h"

namespace saccade {
namespace SACCADE_SET {

template <class T> class DecodePass {
    static constexpr int step = Rows<T>::step;
    static constexpr int wide = 512;      // keys in a chunk
    static constexpr int words = wide / 64;
    static constexpr int stretch = 32;    // keys whose values stay in the first-level cache between register tiles

    // The keys some row of a group sees, and where the results of its chunks stand.
    struct Head {
        Span seen;
        int64_t first;  // number of its first task
        int64_t chunks() const { return seen.empty() ? 0 : (seen.stop - 1) / wide - seen.start / wide + 1; }
    };

    // What a thread works on: keys [first, first + count) of one head.
    struct Chunk {
        int64_t b, kv, first, count;
        bool masked;      // some row has bits
        float *query, *scores, *out;
        uint64_t* bits;   // [rows][words]
    };

    const Forward& f;
    const Problem& p;
    const Scale scale;
    const Logits logits;
    const Width keys, values;
    const int64_t rows, columns, result;  // floats in a row's result: out, top, sum
    std::vector<Head> heads;

  public:
    explicit DecodePass(const Forward& f)
        : f(f), p(f.problem), scale(p.scale), logits(p, scale.rest), keys(p.width, step), values(p.value_width, step),
          rows(p.group() * p.length_q), columns(up_to(std::max<int64_t>(p.value_width, step), lanes)), result(columns + 2) {}

    void run() {
        const int64_t count = p.batch * p.kv_heads;
        if (count * rows == 0) return;
        heads.resize(count);
        int64_t tasks = 0;
        for (int64_t n = 0; n < count; n++) {
            heads[n] = {seen_by(n / p.kv_heads, n % p.kv_heads), tasks};
            tasks += heads[n].chunks();
        }
        Workspace workspace(tasks * rows * result * sizeof(float));
        float* results = static_cast<float*>(workspace.data());
        std::vector<std::atomic<int64_t>> left(count);
        for (int64_t n = 0; n < count; n++) {
            left[n].store(heads[n].chunks(), std::memory_order_relaxed);
            if (heads[n].chunks() == 0) merge(n, results);
        }
        parallel(p.threads, tasks, [&](int64_t task, int) {
            const auto after = std::upper_bound(heads.begin(), heads.end(), task, [](int64_t t, const Head& x) { return t < x.first; });
            const int64_t n = after - heads.begin() - 1;
            attend(n, task - heads[n].first, results + task * rows * result);
            if (left[n].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(n, results);
        });
    }

  private:
    // Heads that share one mask need it asked once.
    int64_t masks() const { return p.mask && p.mask->heads > 1 ? p.group() : 1; }

    Span seen_by(int64_t b, int64_t kv) const {
        if (!p.mask) return {0, p.length_k};
        Span all = {p.length_k, 0};
        for (int64_t g = 0; g < masks(); g++) {
            const Span one = p.mask->keys_of(b, kv * p.group() + g, {0, p.length_q});
            if (!one.empty()) all = {std::min(all.start, one.start), std::max(all.stop, one.stop)};
        }
        return {std::max<int64_t>(all.start, 0), std::min(all.stop, p.length_k)};
    }

    // Fills in the bits of a chunk. False: no row sees any of it.
    bool look(Chunk& c) const {
        c.masked = false;
        if (!p.mask) return true;
        bool any = false;
        const Span all = {0, p.length_q}, span = {c.first, c.first + c.count};
        Kind kinds[64];
        std::vector<Kind> more;
        Kind* kind = kinds;
        if (masks() > 64) more.resize(masks()), kind = more.data();
        for (int64_t g = 0; g < masks(); g++) {
            kind[g] = p.mask->kind(c.b, c.kv * p.group() + g, all, span);
            any |= kind[g] != Kind::empty;
            c.masked |= kind[g] != Kind::full;
        }
        if (!any || !c.masked) return any;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t g = r / p.length_q, i = r % p.length_q;
            uint64_t* bits = c.bits + r * words;
            if (g >= masks()) {
                std::copy_n(c.bits + i * words, words, bits);
            } else if (kind[g] == Kind::partial) {
                p.mask->row_bits(c.b, c.kv * p.group() + g, i, c.first, (int)c.count, bits);
            } else {
                std::fill_n(bits, words, kind[g] == Kind::full ? ~uint64_t(0) : 0);
            }
        }
        return true;
    }

    void attend(int64_t n, int64_t chunk, float* to) const {
        const Head& head = heads[n];
        Chunk c;
        c.b = n / p.kv_heads, c.kv = n % p.kv_heads;
        const int64_t start = (head.seen.start / wide + chunk) * wide;
        c.first = std::max(start, head.seen.start);
        c.count = std::min(start + wide, head.seen.stop) - c.first;
        float* room = static_cast<float*>(scratch(0, rows * (keys.padded() + values.padded() + wide + 2 * words) * sizeof(float)));
        c.query = room;
        c.out = c.query + rows * keys.padded();
        c.scores = c.out + rows * values.padded();
        c.bits = reinterpret_cast<uint64_t*>(c.scores + rows * wide);
        if (!look(c)) {
            for (int64_t r = 0; r < rows; r++) to[r * result + columns] = -infinity, to[r * result + columns + 1] = 0;
            return;
        }
        const T* key = static_cast<const T*>(f.key.data) + c.b * f.key.batch + c.kv * f.key.head + c.first * f.key.row;
        const T* value = static_cast<const T*>(f.value.data) + c.b * f.value.batch + c.kv * f.value.head + c.first * f.value.row;
        take_query(c);
        score(c, key);
        for (int64_t r = 0; r < rows; r++) weigh(c, r, to[r * result + columns], to[r * result + columns + 1]);
        add_values(c, value);
        for (int64_t r = 0; r < rows; r++) {
            float* out = to + r * result;
            values.template natural<T>(c.out + r * values.padded(), out);
            if ((c.masked || p.bias.form != Bias::none) && !finite(out)) add_seen_values(c, r, value, out);
        }
    }

    void take_query(Chunk& c) const {
        for (int64_t r = 0; r < rows; r++) {
            const int64_t h = c.kv * p.group() + r / p.length_q, i = r % p.length_q;
            const T* from = static_cast<const T*>(f.query.data) + c.b * f.query.batch + h * f.query.head + i * f.query.row;
            keys.template spread<T>(from, scale.power, c.query + r * keys.padded());
        }
    }

    void score(Chunk& c, const T* key) const {
        const int64_t whole = keys.width < step ? 0 : c.count / lanes * lanes;
        for (int64_t j = 0; j < whole; j += lanes) score_some(c, key + j * f.key.row, f.key.row, j);
        T some[lanes * most_copied];
        for (int64_t j = whole; j < c.count; j += lanes)
            if (keys.copied() <= most_copied) {
                keys.copy(key + j * f.key.row, f.key.row, std::min<int64_t>(c.count - j, lanes), lanes, some);
                score_some(c, some, keys.copied(), j);
            } else {
                T* large = static_cast<T*>(scratch(1, lanes * keys.copied() * sizeof(T)));
                keys.copy(key + j * f.key.row, f.key.row, std::min<int64_t>(c.count - j, lanes), lanes, large);
                score_some(c, large, keys.copied(), j);
            }
    }
    static constexpr int64_t most_copied = 256;

    // Products of all rows with keys j ... j + lanes - 1.
    void score_some(Chunk& c, const T* key, int64_t stride, int64_t j) const {
        int64_t r = 0;
        for (; r + 4 <= rows; r += 4) products<T, 4>(keys, c.query + r * keys.padded(), key, stride, c.scores + r * wide + j, wide);
        if (rows - r >= 2) products<T, 2>(keys, c.query + r * keys.padded(), key, stride, c.scores + r * wide + j, wide), r += 2;
        if (rows - r >= 1) products<T, 1>(keys, c.query + r * keys.padded(), key, stride, c.scores + r * wide + j, wide);
    }

    // Products of a row to weights 2^(logit - top), the logits in units of log 2.
    void weigh(const Chunk& c, int64_t r, float& top, float& sum) const {
        const int64_t h = c.kv * p.group() + r / p.length_q, i = r % p.length_q, width = up_to(c.count, lanes);
        float* s = c.scores + r * wide;
        const bool plain = logits.plain();
        if (!plain) logits.turn(s, width, c.b, h, i, c.first, c.count);
        const vf factor = splat(plain ? scale.rest * log2_e : 1.0f), none = splat(-infinity);
        vf high = none;
        for (int64_t j = 0; j < width; j += lanes) {
            vf x = load(s + j) * factor;
            if (c.masked) x = select((uint32_t)(c.bits[r * words + j / 64] >> (j % 64)), x, none);
            if (j + lanes > c.count) x = select((1u << (c.count - j)) - 1, x, none);
            high = maximum(x, high);
            store(s + j, x);
        }
        top = greatest(high);
        const vf pivot = splat(top == -infinity ? 0 : top);
        vf all = {};
        for (int64_t j = 0; j < width; j += lanes) {
            const vf x = exp2_of(load(s + j) - pivot);
            all += x;
            store(s + j, x);
        }
        sum = total(all);
        if (p.dropout.on) {
            const DropoutRow dropout(p.dropout, c.b, h, i);
            for (int64_t j = 0; j < width; j += lanes) store(s + j, load(s + j) * dropout.at(c.first + j + p.dropout.key_origin));
        }
    }

    void add_values(Chunk& c, const T* value) const {
        std::fill_n(c.out, rows * values.padded(), 0.0f);
        T some[stretch * step];
        for (int64_t j = 0; j < c.count; j += stretch) {
            const int64_t count = std::min<int64_t>(stretch, c.count - j);
            const T* from = value + j * f.value.row;
            int64_t stride = f.value.row;
            if (values.width < step) {
                values.copy(from, stride, count, count, some);
                from = some, stride = step;
            }
            int64_t r = 0;
            const auto out = [&] { return c.out + r * values.padded(); };
            for (; r + 4 <= rows; r += 4) weighted<T, 4>(values, c.scores + r * wide + j, wide, from, stride, count, out());
            if (rows - r >= 2) weighted<T, 2>(values, c.scores + r * wide + j, wide, from, stride, count, out()), r += 2;
            if (rows - r >= 1) weighted<T, 1>(values, c.scores + r * wide + j, wide, from, stride, count, out());
        }
    }

    bool finite(const float* out) const {
        Finite finite;
        for (int64_t c = 0; c < p.value_width; c += lanes) finite.see(load_as_float(out + c, p.value_width - c));
        return finite.all();
    }

    // The same sum over what row r sees alone: 0 * NaN is NaN, so a value that it does not see may have got into it.
    void add_seen_values(const Chunk& c, int64_t r, const T* value, float* out) const {
        const BiasRow bias(p.bias, c.b, c.kv * p.group() + r / p.length_q, r % p.length_q);
        std::fill_n(out, p.value_width, 0.0f);
        for (int64_t j = 0; j < c.count; j++) {
            if (c.masked && !(c.bits[r * words + j / 64] >> (j % 64) & 1)) continue;
            if (p.bias.form != Bias::none && bias.at(c.first + j, 1)[0] == -infinity) continue;
            for (int64_t d = 0; d < p.value_width; d++) out[d] += c.scores[r * wide + j] * to_float(value[j * f.value.row + d]);
        }
    }

    // The results of a head's chunks, in the order of the keys, to out and lse.
    void merge(int64_t n, const float* results) const {
        const int64_t b = n / p.kv_heads, chunks = heads[n].chunks();
        for (int64_t r = 0; r < rows; r++) {
            const int64_t h = n % p.kv_heads * p.group() + r / p.length_q, i = r % p.length_q, next = rows * result;
            const float* part = results + (heads[n].first * rows + r) * result;
            float top = -infinity, sum = 0;
            for (int64_t k = 0; k < chunks; k++) top = std::max(top, part[k * next + columns]);
            const float pivot = top == -infinity ? 0 : top;
            const auto share = [&](int64_t k) { return exp2_of(part[k * next + columns] - pivot); };
            for (int64_t k = 0; k < chunks; k++) sum += share(k) * part[k * next + columns + 1];
            if (f.lse) f.lse[(b * p.heads + h) * p.length_q + i] = sum == 0 ? -infinity : pivot * ln_2 + std::log(sum);
            const float whole = p.sink ? sum + exp2_of(p.sink[h] * log2_e - pivot) : sum;
            write(part, chunks, share, sum == 0 ? 0 : 1 / whole, static_cast<T*>(f.out.data) + b * f.out.batch + h * f.out.head + i * f.out.row);
        }
    }

    template <class Share>
    void write(const float* part, int64_t chunks, const Share& share, float inverse, T* out) const {
        for (int64_t c = 0; c < p.value_width; c += lanes) {
            vf sum = {};
            for (int64_t k = 0; k < chunks; k++) {
                const float* one = part + k * rows * result;
                if (one[columns + 1] != 0) sum += splat(share(k)) * load(one + c);
            }
            store_from_float(out + c, inverse == 0 ? vf{} : sum * splat(inverse), p.value_width - c);
        }
    }
};

inline void decode(const Forward& f) {
    switch (f.problem.type) {
        case Type::f32: return DecodePass<float>(f).run();
        case Type::bf16: return DecodePass<bf16>(f).run();
        case Type::f16: return DecodePass<f16>(f).run();
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade

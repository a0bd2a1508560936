// Few query rows against many keys: keys and values are read from memory once, and nothing of them is copied.
//
// A unit of work is one chunk of keys of one item and kv head; all query rows of the head's group share what it reads. It
// leaves (out, top, sum) of each row, and the unit that comes last of its head merges them in the order of the keys. So
// the bits depend neither on the threads nor on the other items ("Flash-Decoding", Dao, Haziza, Massa, Sizov 2023).
//
// Rows of a group: (Hq / Hkv) * Lq; row r is query r % Lq of the group's head r / Lq. D, Dv widths of key and value.
#pragma once

#include <algorithm>
#include <atomic>
#include <cmath>
#include <optional>
#include <vector>

#include "decode_quads.h"
#include "decode_tiles.h"
#include "mask.h"
#include "pack.h"
#include "parallel.h"
#include "program_run.h"
#include "weights.h"

namespace saccade {
namespace SACCADE_SET {

// T: the type of queries and outputs, K: that of keys and values.
template <class T, class K = T> class DecodePass {
    typedef typename Rows<K>::weight Weight;
    static constexpr int step = Rows<K>::step, behind = scaled<K> ? sizeof(float) : 0;
    static constexpr int wide = 512;     // keys in a chunk
    static constexpr int words = wide / 64;
    static constexpr int stretch = 32;   // keys whose values stay in the first-level cache between register tiles
    static constexpr int far = 4096;     // bytes that are asked for ahead: 2 to 8 KiB are equally fast

    // The keys that some row of a group sees, and where the results of its chunks stand.
    struct Head {
        Span seen;
        int64_t result;
        int64_t low() const { return seen.start / wide; }
        int64_t chunks() const { return seen.empty() ? 0 : (seen.stop - 1) / wide + 1 - low(); }
    };

    // The chunks that some head of an item sees, and the number of its first unit.
    struct Item {
        int64_t low, high, unit;
    };

    // Keys `seen` of kv head `kv`, and what a thread needs for them. `key`, `value` point at the first of them.
    struct Chunk {
        int64_t n, b, kv, result;
        Span seen;
        const K *key, *value, *next;  // next: keys that this thread reads afterwards, or null
        int64_t count() const { return seen.stop - seen.start; }
        bool masked = false;  // rows have bits, [rows][words]
        float *query, *scores, *out;
        uint64_t* bits;
        Kind* kinds;
    };

    const Forward& f;
    const Problem& p;
    const Scale scale;
    const Logits logits;
    const float exponent;  // from a difference of scores to an exponent of 2
    const Width keys, values;
    const int64_t rows, columns, size;  // size: floats in a row's result, columns of out, top, sum
    std::vector<Head> heads;
    std::vector<Item> items;
    mutable std::vector<float> shares;  // what a head's weights are multiplied by on their way to the values
    mutable std::vector<char> unbounded;  // heads with a result that is not finite
    float* results = nullptr;

  public:
    explicit DecodePass(const Forward& f)
        : f(f), p(f.problem), scale(p.scale, Rows<K>::pairs ? 2 : 1), logits(p, scale.rest), exponent(logits.natural() * log2_e), keys(p.width, step, behind), values(p.value_width, step, behind),
          rows(p.group() * p.length_q), columns(up_to(std::max<int64_t>(p.value_width, step), lanes)), size(columns + 2) {}

    void run() {
        const int64_t count = p.batch * p.kv_heads;
        if (count * rows == 0) return;
        int64_t chunks = 0, units = 0;
        for (int64_t b = 0; b < p.batch; b++) units += survey(b, units, chunks);
        Workspace workspace(chunks * rows * size * sizeof(float));
        results = static_cast<float*>(workspace.data());
        shares.assign(count, 1.0f), unbounded.assign(count, 1);
        pass(count, units);
        // Values near the largest number: their sum may overflow where their mean does not.
        if (std::find(unbounded.begin(), unbounded.end(), 1) == unbounded.end()) return;
        std::fill(shares.begin(), shares.end(), std::ldexp(1.0f, -std::ilogb((float)std::max<int64_t>(p.length_k, 1)) - 1));
        pass(count, units);
    }

  private:
    // Computes the heads that are marked, and leaves marked those whose result is not finite.
    void pass(int64_t count, int64_t units) const {
        const std::vector<char> wanted = unbounded;
        std::vector<std::atomic<int64_t>> left(count);
        for (int64_t n = 0; n < count; n++) {
            left[n].store(heads[n].chunks(), std::memory_order_relaxed);
            if (heads[n].chunks() == 0) merge(n);
        }
        const int64_t run = units_at_once(units);
        parallel(p.threads, (units + run - 1) / run, [&](int64_t task, int) {
            for (int64_t unit = task * run; unit < std::min(units, task * run + run); unit++) {
                Chunk c = chunk_of(unit);
                if (c.seen.empty() || !wanted[c.n]) continue;
                if (unit + 1 < std::min(units, task * run + run)) c.next = chunk_of(unit + 1).key;
                attend(c);
                if (left[c.n].fetch_sub(1, std::memory_order_acq_rel) == 1) merge(c.n);
            }
        });
    }

    // Enters an item and its heads. Its number of units.
    int64_t survey(int64_t b, int64_t unit, int64_t& chunks) {
        Item item = {p.length_k, 0, unit};
        for (int64_t kv = 0; kv < p.kv_heads; kv++) {
            const Head head = {keys_seen(p, b, kv), chunks};
            heads.push_back(head);
            chunks += head.chunks();
            if (head.chunks() == 0) continue;
            item.low = std::min(item.low, head.low());
            item.high = std::max(item.high, head.low() + head.chunks());
        }
        item.high = std::max(item.low, item.high);
        items.push_back(item);
        return (item.high - item.low) * p.kv_heads;
    }

    // Heads that share a mask ask it once.
    int64_t masks() const { return p.mask && p.mask->heads > 1 ? p.group() : 1; }

    // Whether the heads of one key stand together, so that one head's rows have gaps.
    bool interleaved() const { return p.kv_heads > 1 && std::abs(f.key.head) < std::abs(f.key.row); }

    // Units that a thread does one after another: the more, the less it waits for the first keys of each; but all
    // threads are to be busy to the end.
    int64_t units_at_once(int64_t units) const {
        const int64_t most = p.threads == 1 ? units : std::max<int64_t>(1, std::min<int64_t>(units / (8 * p.threads), 64));
        return std::max<int64_t>(1, interleaved() && most > p.kv_heads ? most / p.kv_heads * p.kv_heads : most);
    }

    // Chunk by chunk where heads are interleaved: their rows share pages and, read ahead by the processor, lines.
    Chunk chunk_of(int64_t unit) const {
        const auto after = std::upper_bound(items.begin(), items.end(), unit, [](int64_t u, const Item& x) { return u < x.unit; });
        const Item& item = *(after - 1);
        const int64_t within = unit - item.unit, chunks = item.high - item.low;
        Chunk c;
        c.b = after - 1 - items.begin();
        c.kv = interleaved() ? within % p.kv_heads : within / chunks;
        c.n = c.b * p.kv_heads + c.kv;
        const Head& head = heads[c.n];
        const int64_t chunk = item.low + (interleaved() ? within / p.kv_heads : within % chunks);
        c.result = head.result + chunk - head.low();
        c.seen = {std::max(chunk * wide, head.seen.start), std::min(chunk * wide + wide, head.seen.stop)};
        c.key = static_cast<const K*>(f.key.data) + c.b * f.key.batch + c.kv * f.key.head + c.seen.start * f.key.row;
        c.value = static_cast<const K*>(f.value.data) + c.b * f.value.batch + c.kv * f.value.head + c.seen.start * f.value.row;
        c.next = nullptr;
        return c;
    }

    float* result_of(int64_t chunk, int64_t r) const { return results + (chunk * rows + r) * size; }
    int64_t head_of(const Chunk& c, int64_t r) const { return c.kv * p.group() + r / p.length_q; }

    void attend(Chunk& c) const {
        const int64_t floats = keys.padded() + values.padded() + wide;
        char* room = static_cast<char*>(scratch(0, rows * (floats * sizeof(float) + words * sizeof(uint64_t)) + p.group() * sizeof(Kind)));
        c.query = reinterpret_cast<float*>(room);
        c.out = c.query + rows * keys.padded();
        c.scores = c.out + rows * values.padded();
        c.bits = reinterpret_cast<uint64_t*>(c.scores + rows * wide);
        c.kinds = reinterpret_cast<Kind*>(c.bits + rows * words);
        if (!look(c)) {
            for (int64_t r = 0; r < rows; r++) result_of(c.result, r)[columns] = -infinity, result_of(c.result, r)[columns + 1] = 0;
            return;
        }
        if (by_bytes()) {
            score_bytes(c);
        } else {
            for (int64_t r = 0; r < rows; r++) take_query(c, r);
            score(c);
        }
        for (int64_t r = 0; r < rows; r++) weigh(c, r, result_of(c.result, r) + columns), round(c, r);
        std::fill_n(c.out, rows * values.padded(), 0.0f);
        by_bytes() ? add_bytes(c) : add_values(c);
        for (int64_t r = 0; r < rows; r++) {
            float* out = result_of(c.result, r);
            values.template natural<K>(c.out + r * values.padded(), out);
            if ((c.masked || p.bias.form != Bias::none) && !finite(out)) add_seen_values(c, r, out);
        }
    }

    // Fills in the bits of the rows where some are needed. False: no row sees any of these keys.
    bool look(Chunk& c) const {
        if (!p.mask) return true;
        bool any = false;
        for (int64_t g = 0; g < masks(); g++) {
            c.kinds[g] = p.mask->kind(c.b, c.kv * p.group() + g, {0, p.length_q}, c.seen);
            any |= c.kinds[g] != Kind::empty;
            c.masked |= c.kinds[g] != Kind::full;
        }
        if (!any || !c.masked) return any;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t g = r / p.length_q, i = r % p.length_q;
            uint64_t* bits = c.bits + r * words;
            if (g >= masks()) {
                std::copy_n(c.bits + i * words, words, bits);
            } else if (c.kinds[g] == Kind::partial) {
                p.mask->row_bits(c.b, head_of(c, r), i, c.seen.start, (int)c.count(), bits);
            } else {
                std::fill_n(bits, words, c.kinds[g] == Kind::full ? ~uint64_t(0) : 0);
            }
        }
        return true;
    }

    const T* query_of(const Chunk& c, int64_t r) const {
        return static_cast<const T*>(f.query.data) + c.b * f.query.batch + head_of(c, r) * f.query.head + r % p.length_q * f.query.row;
    }

    void take_query(const Chunk& c, int64_t r) const { keys.template spread<T, K>(query_of(c, r), scale.power, c.query + r * keys.padded()); }

#if defined(__AVX512F__)
    // Whether decode_quads.h multiplies: one or two rows are as fast in floats, and values are written in sixteens.
    bool by_bytes() const { return scaled<K> && f.quads && rows > 2 && rows <= most_quad_rows && p.value_width % lanes == 0; }

    void score_bytes(const Chunk& c) const {
        if constexpr (scaled<K>) {
            const int64_t D = p.width, room = keys.padded(), stride = f.key.row;
            float scales[lanes] = {}, units[most_quad_rows];
            for (int64_t r = 0; r < rows; r++) {
                float* const query = c.query + r * room;
                for (int64_t d = 0; d < D; d += lanes) store(query + d, load_as_float(query_of(c, r) + d, D - d) * splat(scale.power));
                units[r] = split(query, room, 8355000, 0x808080);  // bytes of both signs, plus 128
            }
            uint32_t* const turned = static_cast<uint32_t*>(scratch(1, up_to(D, 64) * sizeof(vu) / 4));
            for (int64_t j = 0; j < c.count(); j += lanes) {
                const int64_t count = std::min<int64_t>(c.count() - j, lanes);
                turn_rows(c.key + j * stride, stride, count, D, turned, ahead_of(c.key, stride, keys, j, c.count(), c.value, f.value.row));
                for (int64_t k = 0; k < count; k++) scales[k] = scale_behind(c.key + (j + k) * stride, D);
                in_tiles(rows, [&](auto tile, int64_t r) {
                    quad_products<tile.value>(turned, load(scales), c.query + r * room, room, units + r, c.scores + r * wide + j, wide);
                });
            }
        }
    }

    void add_bytes(const Chunk& c) const {
        if constexpr (scaled<K>) {
            const int64_t Dv = p.value_width, stride = f.value.row;
            float weights[most_quad_rows * quad_stretch], units[most_quad_rows], scales[quad_stretch];
            for (int64_t j = 0; j < c.count(); j += quad_stretch) {
                const int64_t count = std::min(c.count() - j, quad_stretch), whole = up_to(count, lanes);
                for (int64_t k = 0; k < whole; k++) scales[k] = k < count ? scale_behind(c.value + (j + k) * stride, Dv) : 0;
                for (int64_t r = 0; r < rows; r++) {
                    float* const row = weights + r * quad_stretch;
                    for (int64_t k = 0; k < whole; k += lanes) store(row + k, load(c.scores + r * wide + j + k) * load(scales + k));
                    units[r] = split(row, whole, 16777000, 0);
                }
                const Ahead<K> ahead = ahead_of(c.value, stride, values, j, c.count(), c.next, f.key.row);
                for (int64_t d = 0; d < Dv; d += 64)
                    in_tiles(rows, [&](auto tile, int64_t r) {
                        quad_values<tile.value>(c.value + j * stride + d, stride, count, Dv - d, weights + r * quad_stretch, units + r,
                                                c.out + r * Dv + d, Dv, {ahead.rows + d, ahead.stride}, r == 0);
                    });
            }
        }
    }
#else
    static bool by_bytes() { return false; }
    static void score_bytes(const Chunk&) {}
    static void add_bytes(const Chunk&) {}
#endif

    // What to ask for while row j of `rows` is used: rows further on, or of what comes next.
    static Ahead<K> ahead_of(const K* rows, int64_t stride, const Width& width, int64_t j, int64_t count, const K* next,
                             int64_t next_stride) {
        const int64_t there = j + up_to(far / (width.padded() * (int64_t)sizeof(K)) + 1, lanes);
        if (there < count) return {rows + there * stride, stride};
        if (next && there < 2 * count) return {next + (there - count) * next_stride, next_stride};
        return {rows + j * stride, stride};
    }

    void score(const Chunk& c) const {
        const int64_t stride = f.key.row, whole = keys.width < step ? 0 : c.count() / lanes * lanes;
        for (int64_t j = 0; j < whole; j += lanes)
            score_some(c, c.key + j * stride, stride, j, ahead_of(c.key, stride, keys, j, c.count(), c.value, f.value.row));
        for (int64_t j = whole; j < c.count(); j += lanes) {
            K* room = static_cast<K*>(scratch(1, lanes * keys.copied() * sizeof(K)));
            keys.copy(c.key + j * stride, stride, std::min<int64_t>(c.count() - j, lanes), lanes, room);
            score_some(c, room, keys.copied(), j, {room, 0});
        }
    }

    // Products of all rows with keys j ... j + lanes - 1.
    void score_some(const Chunk& c, const K* key, int64_t stride, int64_t j, Ahead<K> ahead) const {
        in_tiles(rows, [&](auto tile, int64_t r) {
            products<K, tile.value>(keys, c.query + r * keys.padded(), key, stride, c.scores + r * wide + j, wide, ahead, r == 0);
        });
    }

    // Products of a row to weights exp(logit - top); top in units of the scores, see `Logits::natural`.
    void weigh(const Chunk& c, int64_t r, float* top_and_sum) const {
        const int64_t h = head_of(c, r), i = r % p.length_q, count = c.count(), width = up_to(count, lanes);
        float* s = c.scores + r * wide;
        if (p.sigmoid) spoil(s, width);
        if (!logits.plain()) logits.turn(s, width, c.b, h, i, c.seen.start, count);
        std::optional<ProgramRun> run;
        if (p.bias.form == Bias::program) {
            run.emplace(p, up_to(wide, grain), c.b, h);
            run->columns(up_to(count, grain) / grain, i, [&](int64_t n) { return c.seen.start + n * grain; });
            run->row(i, 0, s, width);
        }
        const vf share = splat(shares[c.n]), none = splat(-infinity);
        vf high = none, all = {};
        for (int64_t j = 0; j < width; j += lanes) {
            vf x = load(s + j);
            if (c.masked) x = select((uint32_t)(c.bits[r * words + j / 64] >> (j % 64)), x, none);
            if (j + lanes > count) x = select((1u << (count - j)) - 1, x, none);
            high = maximum(x, high);
            store(s + j, x);
        }
        if (run && run->strayed(s, width)) p.bias.outside->store(true, std::memory_order_relaxed);
        const float top = greatest(high);
        const SoftmaxWeight relative(top == -infinity ? 0 : top, exponent);  // -inf - -inf is NaN
        const SigmoidWeight alone(p.sigmoid ? p.sigmoid.at(c.b, h, i) : 1, exponent);
        for (int64_t j = 0; j < width; j += lanes) {
            const vf x = p.sigmoid ? alone.of<5>(load(s + j)) : relative.of<5>(load(s + j));
            all += x;
            store(s + j, x * share);
        }
        top_and_sum[0] = p.sigmoid ? 0 : top;
        top_and_sum[1] = p.sigmoid ? 1 : total(all);
        if (!p.dropout.on) return;
        const DropoutRow dropout(p.dropout, c.b, h, i);
        for (int64_t j = 0; j < width; j += lanes) store(s + j, load(s + j) * dropout.at(c.seen.start + j + p.dropout.key_origin));
    }

    // Where the weights of a row stand once `weigh` and `round` are through with its scores.
    const Weight* weights_of(const Chunk& c, int64_t r) const { return reinterpret_cast<const Weight*>(c.scores + r * wide); }

    // Weights as the values are multiplied by them; a row of bf16 takes the first half of the row's scores.
    void round(const Chunk& c, int64_t r) const {
        if constexpr (Rows<T>::pairs) {
            float* s = c.scores + r * wide;
            T* to = reinterpret_cast<T*>(s);
            for (int64_t j = 0; j < c.count(); j += lanes) store_from_float(to + j, load(s + j));
        }
    }

    void add_values(const Chunk& c) const {
        K some[stretch * (step + behind)];
        for (int64_t j = 0; j < c.count(); j += stretch) {
            const int64_t count = std::min<int64_t>(stretch, c.count() - j);
            const K* from = c.value + j * f.value.row;
            int64_t stride = f.value.row;
            const Ahead<K> ahead = ahead_of(c.value, stride, values, j, c.count(), c.next, f.key.row);
            if (values.width < step) {
                values.copy(from, stride, count, count, some);
                from = some, stride = values.copied();
            }
            in_tiles(rows, [&](auto tile, int64_t r) {
                weighted<K, tile.value>(values, weights_of(c, r) + j, wide * sizeof(float) / sizeof(Weight), from, stride, count,
                                        c.out + r * values.padded(), ahead, r == 0);
            });
        }
    }

    bool finite(const float* out) const {
        Finite finite;
        for (int64_t d = 0; d < p.value_width; d += lanes) finite.see(load_as_float(out + d, p.value_width - d));
        return finite.all();
    }

    // The same sum over what row r sees alone: a value that it does not see may have got into it, for 0 * NaN is NaN.
    void add_seen_values(const Chunk& c, int64_t r, float* out) const {
        const BiasRow bias(p.bias, c.b, head_of(c, r), r % p.length_q);
        std::fill_n(out, p.value_width, 0.0f);
        for (int64_t j = 0; j < c.count(); j++) {
            if (c.masked && !(c.bits[r * words + j / 64] >> (j % 64) & 1)) continue;
            if (p.bias.added() && bias.at(c.seen.start + j, 1)[0] == -infinity) continue;
            if (p.bias.form == Bias::program && to_float(weights_of(c, r)[j]) == 0) continue;  // its score was -inf
            float weight = to_float(weights_of(c, r)[j]);
            if constexpr (scaled<K>) weight *= scale_behind(c.value + j * f.value.row, p.value_width);
            for (int64_t d = 0; d < p.value_width; d++) out[d] += weight * to_float(c.value[j * f.value.row + d]);
        }
    }

    // The results of a head's chunks, in the order of the keys, to out and lse.
    void merge(int64_t n) const {
        const int64_t b = n / p.kv_heads, chunks = heads[n].chunks(), next = rows * size;
        bool finite = true;
        for (int64_t r = 0; r < rows; r++) {
            const int64_t h = n % p.kv_heads * p.group() + r / p.length_q, i = r % p.length_q;
            float* part = result_of(heads[n].result, r);
            float top = -infinity, sum = 0;
            for (int64_t k = 0; k < chunks; k++) top = std::max(top, part[k * next + columns]);
            const float pivot = top == -infinity ? 0 : top, logit = pivot * logits.natural();
            for (int64_t k = 0; k < chunks; k++) {
                float& top_k = part[k * next + columns];
                top_k = exp2_of((top_k - pivot) * exponent);
                sum += top_k * part[k * next + columns + 1];
            }
            const int64_t place = (b * p.heads + h) * p.length_q + i;
            const float log = std::log(sum), lse = logit + log, added = lse - logit, low = (logit - (lse - added)) + (log - added);
            if (f.lse) f.lse[place] = sum == 0 ? -infinity : lse;
            if (f.lse_low) f.lse_low[place] = std::isfinite(low) ? low : 0;  // Knuth's two-sum
            const float whole = p.sink ? sum + exp2_of((p.sink[h] - logit) * log2_e) : sum;
            T* out = static_cast<T*>(f.out.data) + b * f.out.batch + h * f.out.head + i * f.out.row;
            finite &= write(part, chunks, sum == 0 ? 0 : 1 / ((p.sigmoid ? 1 : whole) * shares[n]), out);
        }
        unbounded[n] = !finite;
    }

    // The parts times their shares; a part without any weight is not read. False: something is not finite.
    bool write(const float* part, int64_t chunks, float inverse, T* out) const {
        Finite finite;
        for (int64_t d = 0; d < p.value_width; d += lanes) {
            vf sum = {};
            for (const float* one = part; one < part + chunks * rows * size; one += rows * size)
                if (one[columns + 1] != 0) sum += splat(one[columns]) * load(one + d);
            finite.see(d + lanes <= p.value_width ? sum : select((1u << (p.value_width - d)) - 1, sum, vf{}));
            store_from_float(out + d, inverse == 0 ? vf{} : sum * splat(inverse), p.value_width - d);
        }
        return inverse == 0 || finite.all();
    }
};

inline void decode(const Forward& f) {
    if (f.int8_rows) {
        switch (f.problem.type) {
            case Type::f32: return DecodePass<float, int8_t>(f).run();
            case Type::bf16: return DecodePass<bf16, int8_t>(f).run();
            case Type::f16: return DecodePass<f16, int8_t>(f).run();
        }
    }
    switch (f.problem.type) {
        case Type::f32: return DecodePass<float>(f).run();
        case Type::bf16:
#if defined(SACCADE_PAIRS)
            // One row is bound by memory, and reads it a little slower in pairs; from two on there is more to multiply.
            if (f.problem.group() * f.problem.length_q > 1) return DecodePass<paired>(f).run();
#endif
            return DecodePass<bf16>(f).run();
        case Type::f16: return DecodePass<f16>(f).run();
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade

// The forward pass: online softmax over packed key panels (Milakov & Gimelshein 2018; Dao et al. 2022, FlashAttention).
//
// A task is one block of query rows of one head. It walks the pieces of the work list in chunks of keys: products into a
// block of scores that stays in the cache, weights in place of the scores, weighted values onto a block of output.
// Block and chunk sizes depend on the instruction set alone, so a row's bits depend on nothing but its own item and head.
#pragma once

#include <algorithm>
#include <type_traits>

#include "scores.h"

namespace saccade {
namespace SACCADE_SET {

template <class Math, class T> class ForwardPass {
    typedef typename Math::unit unit;
    typedef Scores<Math, T> Chunks;
    static constexpr int rows = Chunks::rows, wide = Chunks::wide, team = Chunks::team;
    static constexpr int stretch = 96;  // keys whose values stay in the first-level cache between register tiles

    const Forward& f;
    const Problem& p;
    Chunks scores;
    const int64_t columns;
    const bool in_place;  // values are read where they are
    const int64_t line;   // units from one line of values to the next

    // The packed keys and values of one item and kv head.
    struct Head {
        unit* keys;
        unit* copies;       // [keys / pack][columns], unless values are read in place
        const unit* values;
        uint8_t* poisoned;  // [grain]: a value in it is not finite
        Span seen;          // keys outside are seen by no query of the item, and are not read
    };

    // What a thread works on.
    struct Block : Chunks::Block {
        float *out, *top, *sum;
        float share;  // what weights are multiplied by on their way to the values
    };

  public:
    explicit ForwardPass(const Forward& f)
        : f(f), p(f.problem), scores(p, f.query, f.key), columns(up_to(p.value_width, lanes)), in_place(readable()),
          line(in_place ? f.value.row : columns) {}

    void run() {
        if (p.batch * p.heads * p.length_q == 0) return;
        scores.read_list();
        by_heads(p, head_bytes(), scores.grains, {scores.blocks},
                 [&](char* memory, int64_t n, int64_t from, int64_t to) { pack(head_at(memory, n), n, from, to); },
                 [&](int, char* memory, int64_t n, int64_t h, int64_t number) {  // causal: the long blocks first
                     attend(head_at(memory, n), n / p.kv_heads, h, scores.blocks - 1 - number);
                 });
    }

  private:
    // Values need no copy when their rows are whole aligned vectors, close enough together for the caches.
    bool readable() const {
        if constexpr (std::is_same_v<unit, T>)
            return p.value_width == columns && f.value.row <= 2 * columns && reinterpret_cast<uintptr_t>(f.value.data) % (4 * lanes) == 0 &&
                   f.value.row % lanes == 0 && f.value.head % lanes == 0 && f.value.batch % lanes == 0;
        return false;
    }

    int64_t values_bytes() const { return in_place ? 0 : up_to(scores.grains * grain / Math::pack * columns * 4, 64); }
    int64_t head_bytes() const { return scores.keys_bytes() + values_bytes() + up_to(scores.grains, 64); }
    Head head_at(char* memory, int64_t n) const {
        unit* const copies = reinterpret_cast<unit*>(memory + scores.keys_bytes());
        const unit* values = copies;
        if constexpr (std::is_same_v<unit, T>)
            if (in_place) values = at<T>(f.value, n / p.kv_heads, n % p.kv_heads, 0);
        return {reinterpret_cast<unit*>(memory), copies, values, reinterpret_cast<uint8_t*>(memory + scores.keys_bytes() + values_bytes()),
                keys_seen(p, n / p.kv_heads, n % p.kv_heads)};
    }

    // Packs grains [from, to) of head n. Keys that no query of the item may see are not read; zeros stand for them.
    void pack(const Head& head, int64_t n, int64_t from, int64_t to) const {
        const int64_t b = n / p.kv_heads, h = n % p.kv_heads;
        const bool may_hide = p.mask || p.bias.form != Bias::none;
        for (int64_t g = from; g < to; g++) {
            const Span part = scores.part_of(g, head.seen);
            if (part.empty()) continue;  // never visited
            if (g + 1 < to) {
                const Span next = scores.part_of(g + 1, head.seen);
                ask_rows(at<T>(f.key, b, h, (g + 1) * grain), f.key.row, next.start, next.stop, p.width);
                if (!in_place || may_hide)
                    ask_rows(at<T>(f.value, b, h, (g + 1) * grain), f.value.row, next.start, next.stop, p.value_width);
            }
            scores.pack_keys(head.keys, b, h, g, part);
            const T* values = at<T>(f.value, b, h, g * grain);
            head.poisoned[g] = in_place ? may_hide && !finite_rows(values, f.value.row, part.start, part.stop, p.value_width)
                                        : !pack_rows<Math, T>(values, f.value.row, part.start, part.stop, scores.width_of(g), p.value_width,
                                                              head.copies + g * grain / Math::pack * columns, columns);
        }
    }

    void attend(const Head& head, int64_t b, int64_t h, int64_t number) const {
        thread_local Block storage;
        thread_local std::vector<Piece> pieces;
        Block& block = storage;
        scores.place(block, b, h, number);
        ask_rows(at<T>(f.query, b, h, block.first), f.query.row, 0, block.count, p.width);
        scores.list->keys_of(b, h, {block.first, block.first + block.count}, pieces);
        walk(block, head, pieces, 1);
        // Values near the largest number: their sum may overflow where their mean does not.
        if (!bounded(block)) walk(block, head, pieces, std::ldexp(1.0f, -std::ilogb((float)p.length_k) - 1));
        finish(block);
    }

    // All pieces of a block; weights are multiplied by `share`.
    void walk(Block& block, const Head& head, const std::vector<Piece>& pieces, float share) const {
        block.share = share;
        prepare(block, pieces.empty());
        scores.walk(block, pieces, [&] { take(block, head); });
    }

    bool bounded(const Block& block) const {
        Finite finite;
        for (int64_t n = 0; n < block.count * columns; n += lanes) finite.see(load(block.out + n));
        return finite.all();
    }

    void prepare(Block& block, bool blind) const {
        const int64_t query_size = scores.query_size(), out_size = rows * columns;
        float* at_ = static_cast<float*>(scratch(0, (query_size + out_size + rows * wide + 2 * rows) * 4));
        block.query = reinterpret_cast<unit*>(at_), block.out = at_ + query_size, block.scores = block.out + out_size;
        block.top = block.scores + rows * wide, block.sum = block.top + rows;
        if (!blind) scores.take_query(block);
        std::fill_n(block.out, out_size, 0.0f);
        std::fill_n(block.top, rows, -infinity);
        std::fill_n(block.sum, rows, 0.0f);
    }

    // One chunk of keys: scores, weights, output.
    void take(Block& block, const Head& head) const {
        scores.fill(block, head.keys);
        for (int64_t i = 0; i < block.count; i++)
            if (!block.seen[i / team].empty()) weigh(block, i);
        gather(block, head);
    }

    // Row i of the scores becomes weights relative to the row's largest logit so far; what is summed already is rescaled.
    // Sigmoid's weights are relative to nothing.
    void weigh(Block& block, int64_t i) const {
        float* s = block.scores + i * wide;
        const Span seen = block.seen[i / team];
        scores.form(block, i);
        if (p.sigmoid) {
            weights(block, i, SigmoidWeight(p.sigmoid.at(block.b, block.h, block.first + i), scores.exponent));
            return;
        }
        vf highest[2] = {splat(-infinity), splat(-infinity)};
        int64_t j = seen.start;
        for (; j + 2 * lanes <= seen.stop; j += 2 * lanes) {
            highest[0] = maximum(load(s + j), highest[0]);
            highest[1] = maximum(load(s + j + lanes), highest[1]);
        }
        if (j < seen.stop) highest[0] = maximum(load(s + j), highest[0]);
        const float before = block.top[i], top = std::max(before, greatest(maximum(highest[0], highest[1])));
        const float pivot = top == -infinity ? 0 : top;  // -inf - -inf is NaN
        const float sum = weights(block, i, SoftmaxWeight(pivot, scores.exponent));
        const float carry = before == -infinity ? 0 : exp2_of((before - pivot) * scores.exponent);
        block.sum[i] = block.sum[i] * carry + sum;
        block.top[i] = top;
        if (carry != 1 && before != -infinity)
            for (int64_t c = 0; c < columns; c += lanes)
                store(block.out + i * columns + c, load(block.out + i * columns + c) * splat(carry));
    }

    // The weights of row i, in units, in place of its scores; softmax's sum before dropout.
    template <class Weight> float weights(const Block& block, int64_t i, const Weight& weight) const {
        return p.dropout.on || block.share != 1 ? weights<true>(block, i, weight) : weights<false>(block, i, weight);
    }

    template <bool altered, class Weight> float weights(const Block& block, int64_t i, const Weight& weight_of) const {
        float* s = block.scores + i * wide;
        const Span seen = block.seen[i / team];
        const DropoutRow dropout(p.dropout, block.b, block.h, block.first + i);
        vf sum[2] = {};
        const auto weight = [&](int64_t j, vf& sum) SACCADE_LAMBDA {
            vf x = weight_of.template of<Math::degree>(load(s + j));
            if constexpr (Weight::summed) sum += x;
            if constexpr (altered) {
                x *= splat(block.share);
                if (p.dropout.on) x *= dropout.at(block.grain_of[j / grain] * grain + j % grain + p.dropout.key_origin);
            }
            return x;
        };
        int64_t j = seen.start;
        for (; j + 2 * lanes <= seen.stop; j += 2 * lanes) {
            const vf low = weight(j, sum[0]), high = weight(j + lanes, sum[1]);
            Math::put(s, j, low, high);
        }
        if (j < seen.stop) Math::put(s, j, weight(j, sum[0]));
        return total(sum[0] + sum[1]);
    }

    // Weighted values onto the output, run by run of neighbouring grains.
    void gather(Block& block, const Head& head) const {
        for (int n = 0; n < block.filled;) {
            if (head.poisoned[block.grain_of[n]] && (block.partial[n] || p.bias.form != Bias::none)) {
                gather_seen(block, head, n++);
                continue;
            }
            const int64_t first = block.grain_of[n] * grain;
            int64_t count = std::min<int64_t>(grain, p.length_k - first);
            int next = n + 1;
            while (next < block.filled && count + grain <= stretch && block.grain_of[next] * grain == first + count && !head.poisoned[block.grain_of[next]])
                count = std::min<int64_t>(count + grain, p.length_k - first), next++;
            const int64_t at = n * grain, reach = at + count;
            bool all = true;
            for (int64_t i = 0; i < block.count; i += team) all &= block.seen[i / team].start <= at && block.seen[i / team].stop >= reach;
            const int step = all ? rows : team;
            for (int64_t i = 0; i < block.count; i += step) {
                int64_t low = all ? at : std::max<int64_t>(at, block.seen[i / team].start);
                int64_t high = all ? reach : std::min<int64_t>(reach, block.seen[i / team].stop);
                if (in_place) low = std::max(low, head.seen.start - first + at), high = std::min(high, head.seen.stop - first + at);
                if (low >= high) continue;
                multiply<Math, natural, true>(std::min<int64_t>(step, block.count - i), columns, up_to(high - low, Math::pack) / Math::pack,
                                              reinterpret_cast<const unit*>(block.scores + i * wide) + low / Math::pack, wide,
                                              head.values + (first + low - at) / Math::pack * line, line,
                                              block.out + i * columns, columns);
            }
            n = next;
        }
    }

    // The same for a grain that holds a NaN or Inf which not every row may see: pair by pair, as 0 * NaN is NaN.
    void gather_seen(Block& block, const Head& head, int n) const {
        const int64_t first = block.grain_of[n] * grain, count = std::min<int64_t>(grain, p.length_k - first);
        for (int64_t i = 0; i < block.count; i++) {
            const unit* weights = reinterpret_cast<const unit*>(block.scores + i * wide) + n * grain / Math::pack;
            const BiasRow bias(p.bias, block.b, block.h, block.first + i);
            for (int64_t j = 0; j < count; j++) {
                if (block.partial[n] && !(block.bits[i][n] >> j & 1)) continue;
                if (p.bias.added() && bias.at(first + j, 1)[0] == -infinity) continue;
                if (p.bias.form == Bias::program && Math::entry(weights[j / Math::pack], j) == 0) continue;  // its score was -inf
                const unit* value = head.values + (first + j) / Math::pack * line;
                for (int64_t c = 0; c < p.value_width; c++)
                    block.out[i * columns + c] += Math::entry(weights[j / Math::pack], j) * Math::entry(value[c], j);
            }
        }
    }

    // Divide by the denominator, the sink's share included. A row that saw nothing is 0, its lse -inf. Sigmoid has neither.
    void finish(const Block& block) const {
        float inverse[rows], lse[rows], low[rows];
        const vf sink = splat(p.sink ? p.sink[block.h] : 0), natural = splat(scores.logits.natural());
        for (int64_t i = 0; i < rows; i += lanes) {
            const vf score = load(block.top + i), top = score * natural, sum = load(block.sum + i);
            vf whole = sum;
            if (p.sink) whole += exp2_of((sink - top) * splat(log2_e));
            store(inverse + i, sum == splat(0.0f) ? vf{} : splat(1.0f) / (whole * splat(block.share)));
            const vf log = log2_of(sum) * splat(ln_2), whole_log = top + log, part = whole_log - top;
            const vf rest = (top - (whole_log - part)) + (log - part) + (score * natural - top);  // Knuth's two-sum
            store(lse + i, sum == splat(0.0f) ? splat(-infinity) : whole_log);
            store(low + i, rest - rest == splat(0.0f) ? rest : vf{});
        }
        const int64_t place = (block.b * p.heads + block.h) * p.length_q + block.first;
        if (p.sigmoid) std::fill_n(inverse, rows, 1 / block.share);
        if (f.lse) std::copy_n(lse, block.count, f.lse + place);
        if (f.lse_low) std::copy_n(low, block.count, f.lse_low + place);
        for (int64_t i = 0; i < block.count; i++) {
            const vf factor = splat(inverse[i]);
            T* to = at<T>(f.out, block.b, block.h, block.first + i);
            for (int64_t c = 0; c < p.value_width; c += lanes)
                store_from_float(to + c, load(block.out + i * columns + c) * factor, p.value_width - c);
        }
    }
};

inline void forward(const Forward& f) { run_pass<ForwardPass>(f); }

}  // namespace SACCADE_SET
}  // namespace saccade

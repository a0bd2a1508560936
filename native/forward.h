// The forward pass: online softmax over packed key panels (Milakov & Gimelshein 2018; Dao et al. 2022, FlashAttention).
//
// A task is one block of query rows of one head. It walks the pieces of the work list in chunks of keys: products into a
// block of scores that stays in the cache, weights in place of the scores, weighted values onto a block of output.
// Block and chunk sizes depend on the instruction set alone, so a row's bits depend on nothing but its own item and head.
#pragma once

#include <algorithm>
#include <type_traits>

#include "mask.h"
#include "pack.h"
#include "parallel.h"
#include "weights.h"

namespace saccade {
namespace SACCADE_SET {

template <class Math, class T> class ForwardPass {
    typedef typename Math::unit unit;
    static constexpr int rows = grain;          // query rows in a block
    static constexpr int chunk = 8;             // grains of keys taken at once
    static constexpr int wide = chunk * grain;  // scores in a row of the block
    static constexpr int team = 12;             // rows that skip the same columns of a partial chunk: whole register tiles
    static constexpr int64_t kept_bytes = 1 << 26;
    static constexpr int stretch = 96;          // keys whose values stay in the first-level cache between register tiles

    const Forward& f;
    const Problem& p;
    const Scale scale;
    const Logits logits;
    const float exponent;  // from a difference of scores to an exponent of 2
    const int64_t units, columns, grains, blocks;
    const bool in_place;    // values are read where they are
    const int64_t line;     // units from one line of values to the next
    std::shared_ptr<const WorkList> list;

    // The packed keys and values of one item and kv head.
    struct Head {
        unit* keys;         // [grain][panel][units][panel keys]
        unit* copies;       // [keys / pack][columns], unless values are read in place
        const unit* values;
        uint8_t* poisoned;  // [grain]: a value in it is not finite
        Span seen;          // keys outside are seen by no query of the item, and are not read
    };

    // What a thread works on. `grain_of` are the grains of the chunk, `partial` which of them have mask bits.
    struct Block {
        int64_t b, h, first, count;  // rows first ... first + count - 1
        unit* query;
        float *scores, *out, *top, *sum;
        int64_t grain_of[chunk];
        bool partial[chunk];
        int filled;
        float share;                 // what weights are multiplied by on their way to the values
        int64_t width;               // scores in a row of the chunk
        uint64_t bits[rows][chunk];  // one word for each grain
        Span seen[rows / team];      // columns of the chunk that a team of rows sees something in
    };

  public:
    explicit ForwardPass(const Forward& f)
        : f(f), p(f.problem), scale(p.scale, Math::pack), logits(p, scale.rest), exponent(logits.natural() * log2_e), units(up_to(p.width, Math::pack) / Math::pack),
          columns(up_to(p.value_width, lanes)), grains(up_to(p.length_k, grain) / grain),
          blocks(up_to(p.length_q, rows) / rows), in_place(readable()), line(in_place ? f.value.row : columns) {}

    void run() {
        if (p.batch * p.heads * p.length_q == 0) return;
        list = work_list(p.mask, p.length_q, p.length_k, rows, grain);
        const int64_t heads = p.batch * p.kv_heads, bytes = head_bytes();
        // Small heads are packed by the thread that uses them, into memory that is still in its cache.
        if (bytes <= (1 << 19) && (heads % p.threads == 0 || heads >= 8 * p.threads)) {
            parallel(p.threads, heads, [&](int64_t n, int) {
                const Head head = head_at(scratch(1, bytes), n);
                pack(head, n, 0, grains);
                for (int64_t g = 0; g < p.group(); g++)
                    for (int64_t block = blocks - 1; block >= 0; block--) attend(head, n / p.kv_heads, n % p.kv_heads * p.group() + g, block);
            });
            return;
        }
        // Otherwise by all threads, as many heads at a time as fit into a buffer that is kept from call to call.
        const int64_t most = std::max<int64_t>(1, std::min(heads, kept_bytes / std::max<int64_t>(bytes, 1))), parts = (grains + 7) / 8;
        Workspace workspace(most * bytes);
        for (int64_t first = 0; first < heads; first += most) {
            const int64_t some = std::min(most, heads - first), group = p.group() * blocks;
            const auto packed = [&](int64_t n) { return head_at(static_cast<char*>(workspace.data()) + n * bytes, first + n); };
            parallel(p.threads, some * parts, [&](int64_t n, int) {
                pack(packed(n / parts), first + n / parts, n % parts * 8, std::min(grains, n % parts * 8 + 8));
            });
            parallel(p.threads, some * group, [&](int64_t n, int) {
                const int64_t head = first + n / group;  // causal: the long blocks first
                attend(packed(n / group), head / p.kv_heads, head % p.kv_heads * p.group() + n % group / blocks, blocks - 1 - n % blocks);
            });
        }
    }

  private:
    int64_t keys_bytes() const { return up_to(grains * grain * units * 4, 64); }

    // Values need no copy when their rows are whole aligned vectors, close enough together for the caches.
    bool readable() const {
        if constexpr (std::is_same_v<unit, T>)
            return p.value_width == columns && f.value.row <= 2 * columns && reinterpret_cast<uintptr_t>(f.value.data) % (4 * lanes) == 0 &&
                   f.value.row % lanes == 0 && f.value.head % lanes == 0 && f.value.batch % lanes == 0;
        return false;
    }


    int64_t values_bytes() const { return in_place ? 0 : up_to(grains * grain / Math::pack * columns * 4, 64); }
    int64_t head_bytes() const { return keys_bytes() + values_bytes() + up_to(grains, 64); }
    Head head_at(void* memory, int64_t n) const {
        char* at_ = static_cast<char*>(memory);
        unit* const copies = reinterpret_cast<unit*>(at_ + keys_bytes());
        const unit* values = copies;
        if constexpr (std::is_same_v<unit, T>)
            if (in_place) values = at<T>(f.value, n / p.kv_heads, n % p.kv_heads, 0);
        return {reinterpret_cast<unit*>(at_), copies, values, reinterpret_cast<uint8_t*>(at_ + keys_bytes() + values_bytes()),
                keys_seen(p, n / p.kv_heads, n % p.kv_heads)};
    }

    // Packs grains [from, to) of head n. Keys that no query of the item may see are not read; zeros stand for them.
    void pack(const Head& head, int64_t n, int64_t from, int64_t to) const {
        const int64_t b = n / p.kv_heads, h = n % p.kv_heads;
        const Span seen = head.seen;
        const bool may_hide = p.mask || p.bias.form != Bias::none;
        for (int64_t g = from; g < to; g++) {
            const int64_t start = g * grain, low = std::max<int64_t>(seen.start - start, 0);
            const int64_t high = std::min<int64_t>(std::min(seen.stop, p.length_k) - start, grain);
            if (low >= high) continue;  // never visited
            const int64_t width = width_of(g);
            for (int64_t j = 0; j < width; j += panel)
                pack_panel<Math, T>(at<T>(f.key, b, h, start + j), f.key.row, low - j, high - j, std::min<int64_t>(width - j, panel),
                                    p.width, head.keys + (start + j) * units);
            const T* values = at<T>(f.value, b, h, start);
            head.poisoned[g] = in_place ? may_hide && !finite_rows(values, f.value.row, low, high, p.value_width)
                                        : !pack_rows<Math, T>(values, f.value.row, low, high, width, p.value_width,
                                                              head.copies + start / Math::pack * columns, columns);
        }
    }

    // Scores that a grain takes: the last one may end early, at whole vectors.
    int64_t width_of(int64_t g) const { return std::min<int64_t>(grain, up_to(p.length_k - g * grain, lanes)); }

    void attend(const Head& head, int64_t b, int64_t h, int64_t number) const {
        thread_local Block storage;
        thread_local std::vector<Piece> pieces;
        Block& block = storage;
        block.first = number * rows, block.count = std::min<int64_t>(rows, p.length_q - block.first);
        list->keys_of(b, h, {block.first, block.first + block.count}, pieces);
        block.b = b, block.h = h;
        walk(block, head, pieces, 1);
        // Values near the largest number: their sum may overflow where their mean does not.
        if (!bounded(block)) walk(block, head, pieces, std::ldexp(1.0f, -std::ilogb((float)p.length_k) - 1));
        finish(block);
    }

    // All pieces of a block; weights are multiplied by `share`.
    void walk(Block& block, const Head& head, const std::vector<Piece>& pieces, float share) const {
        block.share = share;
        prepare(block, pieces.empty());
        for (const Piece& piece : pieces)
            for (int64_t g = piece.first; g < piece.last; g++) {
                block.partial[block.filled] = !piece.full;
                block.grain_of[block.filled++] = g;
                if (block.filled == chunk) take(block, head);
            }
        if (block.filled) take(block, head);
    }

    bool bounded(const Block& block) const {
        Finite finite;
        for (int64_t n = 0; n < block.count * columns; n += lanes) finite.see(load(block.out + n));
        return finite.all();
    }

    void prepare(Block& block, bool blind) const {
        block.filled = 0;
        const int64_t query_size = up_to(rows * units, 16), out_size = rows * columns;
        float* at_ = static_cast<float*>(scratch(0, (query_size + out_size + rows * wide + 2 * rows) * 4));
        block.query = reinterpret_cast<unit*>(at_), block.out = at_ + query_size, block.scores = block.out + out_size;
        block.top = block.scores + rows * wide, block.sum = block.top + rows;
        if (!blind) take_query(block);
        std::fill_n(block.out, out_size, 0.0f);
        std::fill_n(block.top, rows, -infinity);
        std::fill_n(block.sum, rows, 0.0f);
    }

    // Rows at the ends that see nothing (padding) are not read; zeros stand for them.
    void take_query(Block& block) const {
        Span seeing{block.first, block.first + block.count};
        if (p.mask) {
            const Span all = p.mask->rows_of(block.b, block.h, {0, p.length_k});
            seeing = {std::max(seeing.start, all.start), std::max(seeing.start, std::min(seeing.stop, all.stop))};
        }
        const int64_t low = std::min(seeing.start - block.first, block.count), high = std::max(low, seeing.stop - block.first);
        std::fill_n(block.query, low * units, unit{});
        std::fill_n(block.query + high * units, (block.count - high) * units, unit{});
        pack_query<Math, T>(at<T>(f.query, block.b, block.h, block.first + low), f.query.row, high - low, p.width, scale.power,
                            block.query + low * units, units);
    }

    // One chunk of keys: scores, weights, output.
    void take(Block& block, const Head& head) const {
        block.width = (block.filled - 1) * grain + width_of(block.grain_of[block.filled - 1]);
        look(block);
        for (int n = 0; n < block.filled; n++) score(block, head, n);
        for (int64_t i = 0; i < block.count; i++)
            if (!block.seen[i / team].empty()) weigh(block, i);
        gather(block, head);
        block.filled = 0;
    }

    // Mask bits of the partial grains, and which columns each team of rows has any use for.
    void look(Block& block) const {
        for (Span& seen : block.seen) seen = {0, block.width};
        bool any = false;
        for (int n = 0; n < block.filled; n++) {
            if (!block.partial[n]) continue;
            const int64_t start = block.grain_of[n] * grain;
            p.mask->block_bits(block.b, block.h, {block.first, block.first + block.count}, start,
                               (int)std::min<int64_t>(grain, p.length_k - start), &block.bits[0][n], chunk);
            any = true;
        }
        if (!any) return;
        for (int64_t first = 0; first < block.count; first += team) {
            int64_t low = block.width, high = 0;
            for (int n = 0; n < block.filled; n++) {
                const uint64_t word = block.partial[n] ? bits_of(block, n, first, team) : ~uint64_t{0} >> (64 - width_of(block.grain_of[n]));
                if (!word) continue;
                low = std::min<int64_t>(low, n * grain + __builtin_ctzll(word));
                high = std::max<int64_t>(high, n * grain + 64 - __builtin_clzll(word));
            }
            block.seen[first / team] = {low - low % (2 * lanes), up_to(high, lanes)};
        }
    }

    // Keys of grain n that any of these rows sees.
    static uint64_t bits_of(const Block& block, int n, int64_t first, int64_t count) {
        uint64_t word = 0;
        for (int64_t i = first; i < std::min(first + count, block.count); i++) word |= block.bits[i][n];
        return word;
    }

    // Products with the keys of grain n; in a partial one each register tile takes the vectors it sees something in.
    void score(Block& block, const Head& head, int n) const {
        const int64_t width = width_of(block.grain_of[n]);
        const int step = block.partial[n] ? tile_rows(3) : rows;
        for (int64_t i = 0; i < block.count; i += step) {
            const int64_t count = std::min<int64_t>(step, block.count - i);
            Span seen{0, width};
            if (block.partial[n]) {
                const uint64_t word = bits_of(block, n, i, count);
                if (!word) continue;
                seen = {__builtin_ctzll(word) / lanes * lanes, up_to(64 - __builtin_clzll(word), lanes)};
            }
            for (int64_t j = 0; j < width; j += panel) {
                const int64_t low = std::max<int64_t>(seen.start - j, 0), high = std::min<int64_t>(seen.stop - j, panel);
                if (low >= high) continue;
                multiply<Math, natural, false>(count, high - low, units, block.query + i * units, units,
                                               head.keys + (block.grain_of[n] * grain + j) * units + low, panel,
                                               block.scores + i * wide + n * grain + j + low, wide);
            }
        }
    }

    // Row i of the scores becomes weights relative to the row's largest logit so far; what is summed already is rescaled.
    void weigh(Block& block, int64_t i) const {
        float* s = block.scores + i * wide;
        const Span seen = block.seen[i / team];
        const int64_t row = block.first + i;
        if (!logits.plain())
            for (int n = 0; n < block.filled; n++)
                logits.turn(s + n * grain, width_of(block.grain_of[n]), block.b, block.h, row, block.grain_of[n] * grain, p.length_k - block.grain_of[n] * grain);
        for (int n = 0; n < block.filled; n++) {
            const int64_t start = block.grain_of[n] * grain;
            if (block.partial[n]) {
                hide(s + n * grain, width_of(block.grain_of[n]), &block.bits[i][n]);
            } else if (start + grain > p.length_k && p.length_k % lanes) {
                const uint64_t bits = (uint64_t(1) << (p.length_k - start)) - 1;
                hide(s + n * grain, width_of(block.grain_of[n]), &bits);
            }
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
        const float sum = p.dropout.on || block.share != 1 ? weights<true>(block, i, pivot) : weights<false>(block, i, pivot);
        const float carry = before == -infinity ? 0 : exp2_of((before - pivot) * exponent);
        block.sum[i] = block.sum[i] * carry + sum;
        block.top[i] = top;
        if (carry != 1 && before != -infinity)
            for (int64_t c = 0; c < columns; c += lanes)
                store(block.out + i * columns + c, load(block.out + i * columns + c) * splat(carry));
    }

    // The weights of row i, in units, in place of its scores; their sum before dropout.
    template <bool altered> float weights(const Block& block, int64_t i, float pivot) const {
        float* s = block.scores + i * wide;
        const Span seen = block.seen[i / team];
        const DropoutRow dropout(p.dropout, block.b, block.h, block.first + i);
        const vf factor = splat(exponent), shift = splat(pivot);
        vf sum[2] = {};
        const auto weight = [&](int64_t j, vf& sum) SACCADE_LAMBDA {
            vf x = exp2_of<Math::degree>(load(s + j) - shift, factor);  // subtracted first: there is no overflow
            sum += x;
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
                if (p.bias.form != Bias::none && bias.at(first + j, 1)[0] == -infinity) continue;
                const unit* value = head.values + (first + j) / Math::pack * line;
                for (int64_t c = 0; c < p.value_width; c++)
                    block.out[i * columns + c] += Math::entry(weights[j / Math::pack], j) * Math::entry(value[c], j);
            }
        }
    }

    // Divide by the denominator, the sink's share included. A row that saw nothing is 0, its lse -inf.
    void finish(const Block& block) const {
        float inverse[rows], lse[rows], low[rows];
        const vf sink = splat(p.sink ? p.sink[block.h] : 0), natural = splat(logits.natural());
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

inline void forward(const Forward& f) {
    switch (f.problem.type) {
        case Type::f32: return ForwardPass<Single, float>(f).run();
#if defined(__AVX512BF16__)
        case Type::bf16: return ForwardPass<Pairs, bf16>(f).run();
#else
        case Type::bf16: return ForwardPass<Single, bf16>(f).run();
#endif
        case Type::f16: return ForwardPass<Single, f16>(f).run();
    }
}

}  // namespace SACCADE_SET
}  // namespace saccade

// Weights of one head pooled over bins of rows and keys, without the weights: sums, largest, and how many pairs are visible.
//
//     p_ij = exp(s_ij - lse_i)      sums[n, m] = sum of p_ij over rows of bin n and keys of bin m that are visible
//
// A task is one bin of rows, or a few; it walks the keys once, in blocks of `grain` rows, and sums in vectors: those of a
// bin of keys share one, and of bins narrower than a vector each lane is summed by itself. Without an lse the keys are
// walked once more before, for the rows' largest scores and denominators. An lse is a double: rounded to a float, one of
// 1000 would shift all weights of its row by 3e-5 of themselves.
#pragma once

#include "scores.h"

namespace saccade {
namespace SACCADE_SET {

template <class Math, class T> class PooledPass {
    typedef typename Math::unit unit;
    typedef Scores<Math, T> Chunks;
    typedef typename Chunks::Block Block;
    static constexpr int rows = Chunks::rows, wide = Chunks::wide, team = Chunks::team;

    const Pooled& f;
    const Problem& p;
    const bool pools;  // there are keys to pool, and memory for what comes of it
    Chunks scores;
    const float natural;        // from a score to a logit
    const int64_t cell, cells;  // keys whose weights share a vector; how many such vectors a bin of rows has
    const int64_t keys_out;     // bins of keys
    int64_t first_grain, last_grain;
    unit* keys = nullptr;       // packed; that of grain 0, which may lie before what is there

    // Sums of a task: [bin of rows][cell], a vector each.
    struct Sums {
        float *sums, *largest, *counts;
    };

    struct Rows {
        float pivot[rows], inverse[rows];  // p = exp2((s - pivot) * exponent) * inverse
    };

  public:
    explicit PooledPass(const Pooled& f)
        : f(f), p(f.problem), pools(f.out && f.key_start < f.key_stop), scores(p, f.query, f.key),
          natural(scores.logits.natural()), cell(std::max<int64_t>(f.key_bin, lanes)), cells((f.key_stop - f.key_start + cell - 1) / cell), keys_out((f.key_stop - f.key_start + f.key_bin - 1) / f.key_bin) {
        const bool all = weighs();  // the denominators run over every key
        first_grain = all ? 0 : f.key_start / grain;
        last_grain = all ? scores.grains : (f.key_stop + grain - 1) / grain;
    }

    void run() {
        if (f.row_count == 0 || !(pools || f.row_lse)) return;
        scores.read_list();
        const int64_t grain_units = grain * scores.units, count = last_grain - first_grain, parts = (count + 7) / 8;
        Workspace packed(count * grain_units * 4);
        keys = static_cast<unit*>(packed.data()) - first_grain * grain_units;
        const int64_t kv_head = f.head / p.group();
        const Span seen = keys_seen(p, f.item, kv_head);
        parallel(p.threads, parts, [&](int64_t n, int) {
            for (int64_t g = first_grain + 8 * n; g < std::min(last_grain, first_grain + 8 * n + 8); g++) {
                const Span part = scores.part_of(g, seen);
                scores.pack_keys(keys, f.item, kv_head, g, part.empty() ? Span{0, 0} : part);
            }
        });
        const int64_t bins = bins_of_task(), tasks = (f.row_count + bins * f.row_bin - 1) / (bins * f.row_bin);
        // From the last one: of a causal mask it is the longest.
        parallel(p.threads, tasks, [&](int64_t n, int) { pool(tasks - 1 - n, bins); });
    }

  private:
    bool weighs() const { return !f.lse && !f.logits; }

    // As many bins of rows as make whole blocks, where a few do.
    int64_t bins_of_task() const {
        if (f.row_bin < grain) return std::max<int64_t>(1, (f.row_bin == 32 ? 96 : grain) / f.row_bin);
        return 4 * grain % f.row_bin == 0 ? 4 * grain / f.row_bin : 1;
    }

    void pool(int64_t task, int64_t bins) const {
        const int64_t first = task * bins * f.row_bin, last = std::min(first + bins * f.row_bin, f.row_count);
        const int64_t used = (last - first + f.row_bin - 1) / f.row_bin, size = pools ? used * cells * lanes : 0;
        float* const memory = static_cast<float*>(scratch(1, 3 * size * 4));
        const Sums sums{memory, memory + size, memory + 2 * size};
        std::fill_n(sums.sums, size, 0.0f), std::fill_n(sums.largest, size, -infinity), std::fill_n(sums.counts, size, 0.0f);
        for (int64_t at = first; at < last;) {
            // A block of listed rows is any; others end where the blocks of the work list do.
            const int64_t row = f.row_start + at;
            const int64_t stop = std::min(last, f.rows ? at + rows : at + rows - row % rows);
            take_rows(sums, at, stop, first);
            at = stop;
        }
        if (pools) finish(sums, first / f.row_bin, used);
    }

    void take_rows(const Sums& sums, int64_t from, int64_t to, int64_t first) const {
        thread_local Block storage;
        thread_local std::vector<Piece> pieces;
        Block& block = storage;
        Rows of{};
        block.b = f.item, block.h = f.head, block.filled = 0;
        block.first = f.row_start + from, block.count = to - from;
        block.listed = f.rows ? f.rows + from : nullptr;
        const int64_t query_size = scores.query_size();
        char* const memory = static_cast<char*>(scratch(0, (query_size + rows * wide) * 4));
        block.query = reinterpret_cast<unit*>(memory);
        block.scores = reinterpret_cast<float*>(memory) + query_size;
        find(block, pieces);
        if (!pieces.empty()) scores.take_query(block);
        if (weighs()) {
            weigh_all(block, pieces, of, f.row_lse ? f.row_lse + from : nullptr);
            if (!pools) return;
        } else {
            for (int64_t i = 0; i < block.count; i++) {
                const double lse = f.lse ? f.lse[block.row(i)] : -infinity;
                of.pivot[i] = lse == -infinity ? 0 : (float)(lse / natural);
                of.inverse[i] = lse == -infinity ? 1 : (float)std::exp((double)of.pivot[i] * natural - lse);
            }
        }
        const int32_t low = (int32_t)(f.key_start / grain), high = (int32_t)((f.key_stop + grain - 1) / grain);
        for (Piece& piece : pieces) piece.first = std::max(piece.first, low), piece.last = std::min(piece.last, high);
        scores.walk(block, pieces, [&] {
            scores.fill(block, keys);
            for (int64_t i = 0; i < block.count; i++)
                if (!block.seen[i / team].empty()) add(block, i, of, sums, (from + i - first) / f.row_bin);
        });
    }

    void find(const Block& block, std::vector<Piece>& pieces) const {
        if (block.listed) {
            pieces.assign(1, Piece{(int32_t)first_grain, (int32_t)last_grain, p.mask == nullptr});
            return;
        }
        const int64_t start = block.first / rows * rows;
        scores.list->keys_of(f.item, f.head, {start, std::min(start + rows, p.length_q)}, pieces);
    }

    // The largest score of each row and the sum relative to it, over all keys.
    void weigh_all(Block& block, const std::vector<Piece>& pieces, Rows& of, double* lse) const {
        float top[rows];
        double sum[rows];
        std::fill_n(top, rows, -infinity), std::fill_n(sum, rows, 0.0);
        const vf factor = splat(scores.exponent);
        scores.walk(block, pieces, [&] {
            scores.fill(block, keys);
            for (int64_t i = 0; i < block.count; i++) {
                const Span seen = block.seen[i / team];
                if (seen.empty()) continue;
                scores.form(block, i);
                const float* const s = block.scores + i * wide;
                vf highest = splat(-infinity), part = {};
                for (int64_t j = seen.start; j < seen.stop; j += lanes) highest = maximum(load(s + j), highest);
                const float before = top[i], now = std::max(before, greatest(highest));
                if (now == -infinity) {  // the maximum passes over NaN
                    for (int64_t j = seen.start; j < seen.stop; j++)
                        if (s[j] != s[j]) sum[i] = s[j];
                    continue;
                }
                const vf shift = splat(now);
                for (int64_t j = seen.start; j < seen.stop; j += lanes) part += exp2_of(load(s + j) - shift, factor);
                if (before != now) sum[i] *= before == -infinity ? 0 : exp2_of((before - now) * scores.exponent);
                sum[i] += total(part), top[i] = now;
            }
        });
        const float sink = p.sink ? p.sink[f.head] : -infinity;
        for (int64_t i = 0; i < block.count; i++) {
            const bool none = top[i] == -infinity && sum[i] == 0;
            const double most = (double)top[i] * natural, whole = sum[i] + (p.sink ? std::exp(sink - most) : 0);
            of.pivot[i] = none ? 0 : top[i], of.inverse[i] = none ? 0 : (float)(1 / whole);
            if (lse) lse[i] = none ? -infinity : most + std::log(whole);
        }
    }

    // The weights of row i onto the sums of its bin, run by run of adjacent keys.
    void add(Block& block, int64_t i, const Rows& of, const Sums& sums, int64_t bin) const {
        scores.form(block, i);
        const float* const s = block.scores + i * wide;
        const Span seen = block.seen[i / team];
        const vf factor = splat(scores.exponent), shift = splat(of.pivot[i]), inverse = splat(of.inverse[i]);
        const vf none = splat(-infinity), one = splat(1.0f), zero = {}, unit_of = splat(natural);
        const int64_t base = bin * cells * lanes;
        for (int n = 0; n < block.filled; n++) {
            const int64_t start = block.grain_of[n] * grain - n * grain;  // the key of column 0, were all in one run
            int64_t j = std::max(std::max<int64_t>(seen.start, n * grain), f.key_start - start);
            const int64_t stop = std::min(std::min(seen.stop, n * grain + scores.width_of(block.grain_of[n])), up_to(f.key_stop, lanes) - start);
            while (j < stop) {
                const int64_t at = (start + j - f.key_start) / cell;
                const int64_t end = std::min(stop, (at + 1) * cell + f.key_start - start);
                float *const sum = sums.sums + base + at * lanes, *const largest = sums.largest + base + at * lanes;
                float* const count = sums.counts + base + at * lanes;
                vf total = load(sum), most = load(largest), pairs = load(count);
                for (; j < end; j += lanes) {
                    const vf x = load(s + j);
                    const auto hidden = x == none;
                    const vf value = f.logits ? x * unit_of : exp2_of(x - shift, factor) * inverse;
                    total += hidden ? zero : value;
                    most = maximum(hidden ? none : value, most);
                    pairs += hidden ? zero : one;
                }
                store(sum, total), store(largest, most), store(count, pairs);
            }
        }
    }

    void finish(const Sums& sums, int64_t bin, int64_t used) const {
        const int64_t lines = (f.row_count + f.row_bin - 1) / f.row_bin, plane = lines * keys_out;
        const int64_t share = f.key_bin < lanes ? lanes / f.key_bin : 1, width = lanes / share;  // bins of a vector; lanes of a bin
        for (int64_t n = 0; n < used; n++)
            for (int64_t m = 0; m < keys_out; m++) {
                const int64_t from = (n * cells + m / share) * lanes + m % share * width;
                double sum = 0, count = 0;
                float largest = -infinity;
                for (int64_t c = from; c < from + width; c++)
                    sum += sums.sums[c], count += sums.counts[c], largest = std::max(largest, sums.largest[c]);
                if (sum != sum) largest = (float)sum;  // the vectors' maximum passes over NaN
                float* const to = f.out + (bin + n) * keys_out + m;
                to[0] = (float)sum, to[plane] = largest, to[2 * plane] = (float)count;
            }
    }
};

inline void pooled(const Pooled& f) { run_pass<PooledPass>(f); }

}  // namespace SACCADE_SET
}  // namespace saccade

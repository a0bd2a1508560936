// Whole rows of softmax weights of some heads, written out, for functions of them; and such rows times values.
//
//     p_ij = exp(s_ij) / (exp sink + sum_j exp s_ij)      out_i = sum_j p_ij v_j
//
// A task is a block of `grain` query rows of one head. Scores go from the block in the cache to the tile; a second pass over
// each row makes weights of them. Keys that the block's rows do not see are not multiplied.
#pragma once

#include "scores.h"

namespace saccade {
namespace SACCADE_SET {

template <class Math, class T> class WeightTilePass {
    typedef typename Math::unit unit;
    typedef Scores<Math, T> Chunks;
    typedef typename Chunks::Block Block;
    static constexpr int rows = Chunks::rows, wide = Chunks::wide, team = Chunks::team;

    const WeightTile& f;
    const Problem& p;
    Chunks scores;

  public:
    explicit WeightTilePass(const WeightTile& f) : f(f), p(f.problem), scores(p, f.query, f.key) {}

    void run() {
        scores.read_list();
        if (!f.packed) pack();
        const int64_t first = f.row_start / rows, blocks = (f.row_start + f.row_count - 1) / rows - first + 1;
        parallel(p.threads, p.batch * f.chosen_count * blocks, [&](int64_t n, int) {
            fill(n / blocks / f.chosen_count, n / blocks % f.chosen_count, first + n % blocks);
        });
    }

  private:
    unit* keys_of(int64_t b, int64_t kv_head) const {
        return reinterpret_cast<unit*>(f.keys) + (b * p.kv_heads + kv_head) * up_to(p.length_k, grain) * p.width;
    }

    // Keys of the heads that are chosen. Those that no query sees are not read.
    void pack() const {
        std::vector<int64_t> used;
        for (int64_t n = 0; n < f.chosen_count; n++) {
            const int64_t kv_head = f.chosen[n] / p.group();
            if (std::find(used.begin(), used.end(), kv_head) == used.end()) used.push_back(kv_head);
        }
        const int64_t parts = (scores.grains + 7) / 8, count = (int64_t)used.size();
        parallel(p.threads, p.batch * count * parts, [&](int64_t n, int) {
            const int64_t b = n / parts / count, kv_head = used[n / parts % count], from = n % parts * 8;
            const Span seen = keys_seen(p, b, kv_head);
            for (int64_t g = from; g < std::min(scores.grains, from + 8); g++) {
                const Span part = scores.part_of(g, seen);
                if (!part.empty()) scores.pack_keys(keys_of(b, kv_head), b, kv_head, g, part);
            }
        });
    }

    void fill(int64_t b, int64_t n, int64_t number) const {
        thread_local Block storage;
        thread_local std::vector<Piece> pieces;
        Block& block = storage;
        scores.place(block, b, f.chosen[n], number);
        scores.list->keys_of(b, block.h, {block.first, block.first + block.count}, pieces);
        const int64_t stop = std::min(block.first + block.count, f.row_start + f.row_count);
        block.first = std::max(block.first, f.row_start), block.count = stop - block.first;
        const int64_t query_size = scores.query_size();
        block.query = static_cast<unit*>(scratch(0, (query_size + rows * wide) * 4));
        block.scores = reinterpret_cast<float*>(block.query) + query_size;
        float* const out = f.out + ((b * f.chosen_count + n) * f.row_count + block.first - f.row_start) * p.length_k;
        clear(out, block.count, pieces);
        if (pieces.empty()) return;
        float top[rows];
        std::fill_n(top, rows, -infinity);
        scores.take_query(block);
        const unit* const keys = keys_of(b, block.h / p.group());
        scores.walk(block, pieces, [&] {
            scores.fill(block, keys);
            for (int64_t i = 0; i < block.count; i++) top[i] = std::max(top[i], put(block, i, out + i * p.length_k));
        });
        for (int64_t i = 0; i < block.count; i++) weigh(out + i * p.length_k, pieces, top[i], block.h);
    }

    Span columns_of(const Piece& piece) const { return {piece.first * grain, std::min<int64_t>(piece.last * grain, p.length_k)}; }

    // Zeros where nothing will be written.
    void clear(float* out, int64_t count, const std::vector<Piece>& pieces) const {
        int64_t from = 0;
        const auto until = [&](int64_t stop) {
            for (int64_t i = 0; from < stop && i < count; i++) std::fill_n(out + i * p.length_k + from, stop - from, 0.0f);
        };
        for (const Piece& piece : pieces) {
            const Span columns = columns_of(piece);
            until(columns.start);
            from = columns.stop;
        }
        until(p.length_k);
    }

    // The scores of row i of the chunk in their places; gives the largest.
    float put(Block& block, int64_t i, float* row) const {
        const bool blind = block.seen[i / team].empty();  // nothing was multiplied
        if (!blind) scores.form(block, i);
        vf highest = splat(-infinity);
        for (int n = 0; n < block.filled; n++) {
            const float* const s = block.scores + i * wide + n * grain;
            const int64_t start = block.grain_of[n] * grain, count = std::min<int64_t>(grain, p.length_k - start);
            for (int64_t j = 0; j < count; j += lanes) {
                const vf x = blind ? splat(-infinity) : load(s + j);  // -inf behind the last key
                highest = maximum(x, highest);
                if (count - j >= lanes) store(row + start + j, x);
                else store_from_float(row + start + j, x, count - j);
            }
        }
        return greatest(highest);
    }

    // Scores of a row to weights, in place.
    void weigh(float* row, const std::vector<Piece>& pieces, float top, int64_t h) const {
        const bool none = top == -infinity;
        double sum = 0;
        for (const Piece& piece : pieces) {
            const Span columns = columns_of(piece);
            if (none) std::fill(row + columns.start, row + columns.stop, 0.0f);
            else sum += exponentials(row + columns.start, columns.stop - columns.start, top);
        }
        if (none) return;
        const double sink = p.sink ? std::exp(p.sink[h] - (double)top * scores.logits.natural()) : 0;
        const vf share = splat((float)(1 / (sum + sink)));
        for (const Piece& piece : pieces) {
            const Span columns = columns_of(piece);
            int64_t j = columns.start;
            for (; j + lanes <= columns.stop; j += lanes) store(row + j, load(row + j) * share);
            if (j < columns.stop) store_from_float(row + j, load_as_float(row + j, columns.stop - j) * share, columns.stop - j);
        }
    }

    // exp(logit - the row's largest) in place of scores, and their sum. Sums over a chunk are floats, sums of chunks doubles.
    double exponentials(float* s, int64_t count, float top) const {
        const vf factor = splat(scores.exponent), shift = splat(top);
        double sum = 0;
        for (int64_t from = 0; from < count; from += wide) {
            const int64_t stop = std::min<int64_t>(from + wide, count);
            vf part[2] = {};
            int64_t j = from;
            for (; j + lanes <= stop; j += lanes) {
                const vf x = exp2_of(load(s + j) - shift, factor);
                part[j / lanes % 2] += x;
                store(s + j, x);
            }
            sum += total(part[0] + part[1]);
            for (; j < stop; j++) sum += s[j] = exp2_of((s[j] - top) * scores.exponent);
        }
        return sum;
    }
};

inline void weight_tile(const WeightTile& f) { run_pass<WeightTilePass>(f); }

// Whether some of the weights is not 0.
SACCADE_INLINE bool any_weight(const float* weights, int64_t stride, int64_t rows, int64_t count) {
    vu bits = {};
    for (int64_t i = 0; i < rows; i++) {
        const float* const row = weights + i * stride;
        int64_t j = 0;
        for (; j + lanes <= count; j += lanes) bits |= (vu)load(row + j);
        if (j < count) bits |= (vu)load_as_float(row + j, count - j);
    }
    uint32_t any = 0;
    for (int n = 0; n < lanes; n++) any |= bits[n];
    return any << 1;  // -0 is none
}

inline void weighted_values(const WeightedValues& f) {
    constexpr int rows = grain, stretch = 2 * grain;  // keys whose values stay in the first-level cache
    const int64_t blocks = (f.rows + rows - 1) / rows, tasks = f.batch * f.heads * blocks;
    parallel(f.threads, tasks, [&](int64_t task, int) {
        const int64_t b = task / blocks / f.heads, h = task / blocks % f.heads, first = task % blocks * rows;
        const int64_t count = std::min<int64_t>(rows, f.rows - first);
        const float* const weights = f.weights + ((b * f.heads + h) * f.rows + first) * f.length_k;
        float* const sums = static_cast<float*>(scratch(0, rows * f.value_width * 4));
        std::fill_n(sums, count * f.value_width, 0.0f);
        for (int64_t j = 0; j < f.length_k; j += stretch) {
            const int64_t keys = std::min<int64_t>(stretch, f.length_k - j);
            if (!any_weight(weights + j, f.length_k, count, keys)) continue;
            multiply<Single, natural, true>(count, f.value_width, keys, weights + j, f.length_k, at<float>(f.value, b, h, j), f.value.row,
                                            sums, f.value_width);
        }
        for (int64_t i = 0; i < count; i++)
            std::copy_n(sums + i * f.value_width, f.value_width, at<float>(f.out, b, h, first + i));
    });
}

}  // namespace SACCADE_SET
}  // namespace saccade

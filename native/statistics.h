// Statistics of attention weights without the weights: what the forward pass would multiply with values is summed instead.
//
//     p_ij = exp(s_ij - lse_i),  m_i = max_j s_ij:  entropy, distance, largest, masses of chosen keys ... of each row i
//
// First stage, by blocks of query rows: online sums relative to the row's largest logit so far. With S = sum e^(s - m) and
// E = sum e^(s - m) (s - m), the entropy is log S - E / S: both terms are >= 0, so nothing cancels. When m rises by d,
// E becomes e^-d (E - d S). Sums over a chunk are floats, sums of chunks doubles.
// Second stage, by chunks of keys: what each key receives, from the rows' m and 1 / S. One task sums all rows of a key in
// ascending order, so the bits do not depend on the number of threads.
#pragma once

#include "scores.h"
#include "statistics_row.h"
#include "statistics_top.h"

namespace saccade {
namespace SACCADE_SET {

template <class Math, class T> class StatisticsPass {
    typedef typename Math::unit unit;
    typedef Scores<Math, T> Chunks;
    static constexpr int rows = Chunks::rows, wide = Chunks::wide, team = Chunks::team;

    const Statistics& f;
    const Problem& p;
    Chunks scores;
    const float natural;  // from a score to a logit
    float sizes[2 * wide + lanes];  // |n - wide|
    std::unique_ptr<Workspace> ends;
    float *pivots = nullptr, *inverses = nullptr;  // (B, Hq, Lq): m, in scores, and 1 / (S + the sink's share), for the second stage

    // The packed keys of one item and kv head.
    struct Head {
        unit* keys;
        float* peaks;  // [grain]: largest size of an entry
        Span seen;
    };

    // Adjacent grains of a chunk: columns [at, at + width) are keys start, start + 1, ...
    struct Run {
        int64_t at, width, start;
    };

    struct Block : Chunks::Block {
        RowSums<rows> sums;
        float peak;      // largest size of an entry of the queries
        Run runs[Chunks::chunk];
        int run_count;
        bool hidden;     // some score of the chunk may be -inf
        bool suspect;    // some score of the chunk may not be finite
        double* groups;  // [group][rows]
        float* members;  // [group][wide]: 1 or 0
        std::vector<int64_t> present;  // groups with a member in the chunk
        Best<rows> best;
        float* received;     // [wide]
    };

  public:
    explicit StatisticsPass(const Statistics& f)
        : f(f), p(f.problem), scores(p, f.query, f.key), natural(scores.logits.natural()) {
        for (int n = 0; n < 2 * wide + lanes; n++) sizes[n] = (float)std::abs(n - wide);
    }

    void run() {
        const int64_t every = p.batch * p.heads * p.length_q;
        if (every == 0) {
            if (f.received) std::fill_n(f.received, p.batch * p.heads * p.length_k, 0.0f);
            return;
        }
        if (f.received) {
            ends = std::make_unique<Workspace>(2 * every * 4);
            pivots = static_cast<float*>(ends->data()), inverses = pivots + every;
        }
        scores.read_list();
        const int64_t sections = f.received ? up_to(scores.grains, Chunks::chunk) / Chunks::chunk : 0;
        by_heads(p, scores.keys_bytes() + up_to(scores.grains * 4, 64), scores.grains, {scores.blocks, sections},
                 [&](char* memory, int64_t n, int64_t from, int64_t to) { pack(head_at(memory, n), n, from, to); },
                 [&](int stage, char* memory, int64_t n, int64_t h, int64_t number) {
                     if (stage == 0) attend(head_at(memory, n), n / p.kv_heads, h, scores.blocks - 1 - number);
                     else collect(head_at(memory, n), n / p.kv_heads, h, number);
                 });
    }

  private:
    Head head_at(char* memory, int64_t n) const {
        return {reinterpret_cast<unit*>(memory), reinterpret_cast<float*>(memory + scores.keys_bytes()), keys_seen(p, n / p.kv_heads, n % p.kv_heads)};
    }

    void pack(const Head& head, int64_t n, int64_t from, int64_t to) const {
        for (int64_t g = from; g < to; g++) {
            const Span part = scores.part_of(g, head.seen);
            if (part.empty()) continue;
            scores.pack_keys(head.keys, n / p.kv_heads, n % p.kv_heads, g, part);
            Peak peak;
            const int64_t width = scores.width_of(g);
            for (int64_t j = 0; j < width; j += panel) {
                const unit* keys = head.keys + (g * grain + j) * scores.units;
                for (int64_t u = 0; u < scores.units; u++)
                    for (int64_t c = 0; c < std::min<int64_t>(panel, width - j); c += lanes) peak.see(load(keys + u * panel + c));
            }
            head.peaks[g] = peak.value();
        }
    }

    // --- first stage ---

    void attend(const Head& head, int64_t b, int64_t h, int64_t number) const {
        thread_local Block storage;
        thread_local std::vector<Piece> pieces;
        Block& block = storage;
        scores.place(block, b, h, number);
        scores.list->keys_of(b, h, {block.first, block.first + block.count}, pieces);
        prepare(block), clear(block);
        if (!pieces.empty()) take_query(block);
        scores.walk(block, pieces, [&] { take(block, head); });
        finish(block);
    }

    void prepare(Block& block) const {
        const int64_t query_size = scores.query_size(), groups = f.groups.count;
        const int64_t bytes = up_to((query_size + rows * wide + wide + groups * wide) * 4, 64);
        char* const memory = static_cast<char*>(scratch(0, bytes + groups * rows * 8 + Best<rows>::bytes_for(f.top)));
        block.query = reinterpret_cast<unit*>(memory);
        block.scores = reinterpret_cast<float*>(memory) + query_size;
        block.received = block.scores + rows * wide;
        block.members = block.received + wide;
        block.groups = reinterpret_cast<double*>(memory + bytes);
    }

    void clear(Block& block) const {
        block.sums.clear(), block.present.clear();
        std::fill_n(block.groups, f.groups.count * rows, 0.0);
        if (f.top) block.best.start(f.top, block.groups + f.groups.count * rows);
    }

    void take_query(Block& block) const {
        scores.take_query(block);
        Peak peak;
        for (int64_t n = 0; n < block.count * scores.units; n++) peak.see(block.query[n]);
        block.peak = peak.value();
    }

    void take(Block& block, const Head& head) const {
        scores.fill(block, head.keys);
        survey(block, head);
        if (f.groups.count) find_members(block);
        for (int64_t i = 0; i < block.count; i++)
            if (!block.seen[i / team].empty()) sum(block, i);
    }

    // What a chunk is made of.
    void survey(Block& block, const Head& head) const {
        float peak = 0;
        block.run_count = 0;
        block.hidden = p.bias.form != Bias::none;
        for (int n = 0; n < block.filled; n++) {
            const int64_t g = block.grain_of[n], width = scores.width_of(g);
            peak = head.peaks[g] > peak || head.peaks[g] != head.peaks[g] ? head.peaks[g] : peak;
            block.hidden |= block.partial[n] || g * grain + width > p.length_k;
            if (n > 0 && block.grain_of[n - 1] == g - 1) block.runs[block.run_count - 1].width += width;
            else block.runs[block.run_count++] = {n * grain, width, g * grain};
        }
        // No sum of products comes near the largest float, or something may not be finite.
        block.suspect = !((double)block.peak * peak * p.width * std::max(1.0f, std::fabs(scores.logits.rest)) < 1e37);
        block.hidden |= block.suspect;
    }

    void find_members(Block& block) const {
        block.present.clear();
        for (int64_t group = 0; group < f.groups.count; group++) {
            float* const to = block.members + group * wide;
            bool any = false;
            for (int n = 0; n < block.filled; n++) {
                const int64_t start = block.grain_of[n] * grain;
                const uint8_t* from = f.groups.data + group * f.groups.group + block.b * f.groups.batch + start;
                for (int64_t j = 0; j < std::min<int64_t>(grain, p.length_k - start); j++) any |= (to[n * grain + j] = from[j] != 0) != 0;
                for (int64_t j = p.length_k - start; j < grain; j++) to[n * grain + j] = 0;
            }
            if (any) block.present.push_back(group);
        }
    }

    // The scores of row i into its sums.
    void sum(Block& block, int64_t i) const {
        scores.form(block, i);
        float* const s = block.scores + i * wide;
        const Span seen = block.seen[i / team];
        RowSums<rows>& sums = block.sums;
        const Range range = block.hidden ? range_of<true>(s, seen) : range_of<false>(s, seen);
        const float before = sums.top[i], highest = greatest(range.high());
        if (block.suspect || range.odd()) {
            inspect(block, i);
        } else if (highest > -infinity) {
            const float lowest = -greatest(-range.low);
            sums.lowest[i] = std::min(sums.lowest[i], lowest), sums.least[i] = std::min(sums.least[i], lowest);
            sums.highest[i] = std::max(sums.highest[i], highest);
        }
        if (highest > before) sums.top[i] = highest, sums.largest_at[i] = key_at(block, first_equal(s, seen, highest));
        note(block, i);
        if (f.top) block.best.take(i, s, seen, range.highest, [&](int64_t column) { return key_at(block, column); });
        if (sums.top[i] != before && before != -infinity) rescale(block, i, before);
        add(block, i);
    }

    // What is summed already becomes relative to the new largest score.
    void rescale(Block& block, int64_t i, float before) const {
        RowSums<rows>& sums = block.sums;
        const float top = sums.top[i];
        const double fall = (double)before - top, carry = exp2_of((before - top) * scores.exponent);
        sums.entropy[i] = carry == 0 ? 0 : carry * (sums.entropy[i] + fall * sums.total[i]);
        sums.total[i] *= carry, sums.distance[i] *= carry;
        for (int64_t group = 0; group < f.groups.count; group++) block.groups[group * rows + i] *= carry;
    }

    // The weights of a row onto its sums, run by run.
    void add(Block& block, int64_t i) const {
        RowSums<rows>& sums = block.sums;
        float* const s = block.scores + i * wide;
        const Span seen = block.seen[i / team];
        const float pivot = sums.top[i] == -infinity ? 0 : sums.top[i];  // -inf - -inf is NaN
        const int64_t own = block.first + i + f.placed(block.b);
        const bool kept = !block.present.empty();
        for (int n = 0; n < block.run_count; n++) {
            const Run& run = block.runs[n];
            const Span span{std::max(seen.start, run.at), std::min(seen.stop, run.at + run.width)};
            if (span.empty()) continue;
            // |own - key| = away + |column - near|, both counted from the run's first one: `near` lies within the run.
            const int64_t ahead = own - run.start, near = std::min(std::max<int64_t>(ahead, 0), run.width);
            const float* const size = sizes + wide - near - run.at;
            const Part part = block.hidden ? kept ? weigh<true, true>(s, span, size, pivot) : weigh<true, false>(s, span, size, pivot)
                                           : kept ? weigh<false, true>(s, span, size, pivot) : weigh<false, false>(s, span, size, pivot);
            sums.total[i] += part.total, sums.entropy[i] += part.entropy;
            const double away = std::fabs((double)(ahead - near));
            sums.distance[i] += part.distance + away * part.total;
        }
        for (const int64_t group : block.present) {
            const float* const member = block.members + group * wide;
            vf mass = {};
            for (int64_t j = seen.start; j < seen.stop; j += lanes) mass += load(s + j) * load(member + j);
            block.groups[group * rows + i] += total(mass);
        }
    }

    struct Part {
        float total, entropy, distance;
    };

    // Sums over columns of a row; `size[j]` is added up with the weights. kept: the weights take the place of the scores.
    template <bool hidden, bool kept> Part weigh(float* s, Span span, const float* size, float pivot) const {
        const vf factor = splat(scores.exponent), shift = splat(pivot), least = splat(-1e30f);
        vf sum[2] = {}, entropy[2] = {}, distance[2] = {};
        const auto take = [&](int64_t j, int n) SACCADE_LAMBDA {
            vf x = load(s + j) - shift;
            if constexpr (hidden) x = maximum(least, x);  // 0 * -inf is NaN
            const vf weight = exp2_of(x, factor);
            sum[n] += weight, entropy[n] += weight * x, distance[n] += weight * load(size + j);
            if constexpr (kept) store(s + j, weight);
        };
        int64_t j = span.start;
        for (; j + 2 * lanes <= span.stop; j += 2 * lanes) take(j, 0), take(j + lanes, 1);
        if (j < span.stop) take(j, 0);
        return {total(sum[0] + sum[1]), total(entropy[0] + entropy[1]), total(distance[0] + distance[1])};
    }

    static int64_t key_at(const Block& block, int64_t column) { return block.grain_of[column / grain] * grain + column % grain; }

    // The column of a key in the chunk, or -1.
    static int64_t column_of(const Block& block, int64_t key) {
        for (int n = 0; n < block.run_count; n++) {
            const Run& run = block.runs[n];
            if (key >= run.start && key < run.start + run.width) return run.at + key - run.start;
        }
        return -1;
    }

    // Scores of the keys whose weights are wanted one by one.
    void note(Block& block, int64_t i) const {
        const Run &head = block.runs[0], &tail = block.runs[block.run_count - 1];
        const int64_t own = block.first + i + f.placed(block.b), first = f.first ? f.first[block.b] : -1;
        const auto look = [&](int64_t key, float& to) {
            const int64_t column = key < p.length_k ? column_of(block, key) : -1;
            const Span seen = block.seen[i / team];
            if (column >= seen.start && column < seen.stop) to = block.scores[i * wide + column];
        };
        if (first >= head.start && first < tail.start + tail.width) look(first, block.sums.first[i]);
        if (own + 1 < head.start || own > tail.start + tail.width) return;
        look(own, block.sums.own[i]), look(own - 1, block.sums.previous[i]), look(own + 1, block.sums.next[i]);
    }

    // Logits that are not finite, of a chunk where there may be some, one by one; range over the others.
    void inspect(Block& block, int64_t i) const {
        RowSums<rows>& sums = block.sums;
        const BiasRow bias(p.bias, block.b, block.h, block.first + i);
        for (int n = 0; n < block.filled; n++) {
            const int64_t start = block.grain_of[n] * grain;
            for (int64_t j = 0; j < std::min<int64_t>(grain, p.length_k - start); j++) {
                if (block.partial[n] && !(block.bits[i][n] >> j & 1)) continue;
                if (p.bias.added() && bias.at(start + j, 1)[0] == -infinity) continue;
                const float x = block.scores[i * wide + n * grain + j];
                if (p.bias.form == Bias::program && x == -infinity) continue;
                if (x < sums.least[i]) sums.least[i] = x;
                if (x - x == 0) {
                    sums.lowest[i] = std::min(sums.lowest[i], x), sums.highest[i] = std::max(sums.highest[i], x);
                } else if (sums.nonfinite[i]++ == 0) {
                    sums.nonfinite_at[i] = start + j;
                }
            }
        }
    }

    // --- results ---

    void finish(Block& block) const {
        const int64_t place = (block.b * p.heads + block.h) * p.length_q + block.first, step = p.batch * p.heads * p.length_q;
        float inverse[rows];
        alignas(64) float numbers[Statistics::numbers_count][rows];
        block.sums.finish(numbers, inverse, natural, p.sink ? p.sink + block.h : nullptr);
        for (int n = 0; n < Statistics::numbers_count; n++) std::copy_n(numbers[n], block.count, f.numbers + n * step + place);
        for (int64_t i = 0; i < block.count; i++) {
            const bool spoilt = !(block.sums.total[i] == block.sums.total[i]);
            f.largest_at[place + i] = spoilt ? block.sums.nonfinite_at[i] : block.sums.total[i] == 0 ? -1 : block.sums.largest_at[i];
            f.nonfinite[place + i] = block.sums.nonfinite[i], f.nonfinite_at[place + i] = block.sums.nonfinite_at[i];
            for (int64_t group = 0; group < f.groups.count; group++) {
                const double mass = block.groups[group * rows + i];
                f.groups.mass[group * step + place + i] = mass == 0 && !spoilt ? 0 : (float)(mass * inverse[i]);
            }
            if (f.top) finish_best(block, i, place + i, inverse[i]);
        }
        if (!f.received) return;
        for (int64_t i = 0; i < block.count; i++) pivots[place + i] = block.sums.top[i] == -infinity ? 0 : block.sums.top[i];
        std::copy_n(inverse, block.count, inverses + place);
    }

    void finish_best(Block& block, int64_t i, int64_t place, float inverse) const {
        block.best.settle(i);
        const int64_t count = block.best.count[i], at_ = i * block.best.room;
        float* const weights = f.top_weights + place * f.top;
        int64_t* const keys = f.top_keys + place * f.top;
        for (int64_t n = 0; n < f.top; n++) {
            keys[n] = n < count ? block.best.keys[at_ + n] : -1;
            weights[n] = n < count ? block.best.scores[at_ + n] - block.sums.top[i] : -infinity;
        }
        for (int64_t n = 0; n < f.top; n += lanes) {
            const vf weight = exp2_of(load_as_float(weights + n, f.top - n), splat(scores.exponent)) * splat(inverse);
            store_from_float(weights + n, weight, f.top - n);
        }
        std::fill_n(weights + count, f.top - count, 0.0f);
    }

    // --- second stage: what keys receive ---

    void collect(const Head& head, int64_t b, int64_t h, int64_t section) const {
        thread_local Block storage;
        thread_local std::vector<Piece> pieces, parts;
        Block& block = storage;
        const int64_t first = section * Chunks::chunk, last = std::min(scores.grains, first + Chunks::chunk);
        const int64_t count = std::min<int64_t>(last * grain, p.length_k) - first * grain;
        double whole[wide] = {};
        const Span seeing = p.mask ? p.mask->rows_of(b, h, {first * grain, first * grain + count}) : Span{0, p.length_q};
        for (int64_t number = std::max<int64_t>(seeing.start, 0) / rows; number * rows < std::min(seeing.stop, p.length_q); number++) {
            scores.place(block, b, h, number);
            scores.list->keys_of(b, h, {block.first, block.first + block.count}, pieces);
            parts.clear();
            for (const Piece& piece : pieces)
                if (piece.first < last && piece.last > first)
                    parts.push_back({std::max<int32_t>(piece.first, (int32_t)first), std::min<int32_t>(piece.last, (int32_t)last), piece.full});
            if (parts.empty()) continue;
            prepare(block);
            scores.take_query(block);
            std::fill_n(block.received, wide, 0.0f);
            scores.walk(block, parts, [&] { give(block, head, first); });
            for (int64_t j = 0; j < count; j++) whole[j] += block.received[j];
        }
        std::transform(whole, whole + count, f.received + (b * p.heads + h) * p.length_k + first * grain, [](double x) { return (float)x; });
    }

    // The weights of all rows onto their keys.
    void give(Block& block, const Head& head, int64_t first) const {
        scores.fill(block, head.keys);
        const vf factor = splat(scores.exponent);
        for (int64_t i = 0; i < block.count; i++) {
            const Span seen = block.seen[i / team];
            if (seen.empty()) continue;
            scores.form(block, i);
            const int64_t place = (block.b * p.heads + block.h) * p.length_q + block.first + i;
            const float* const s = block.scores + i * wide;
            const bool spoilt = !(inverses[place] == inverses[place]);
            const vf shift = splat(pivots[place]), inverse = splat(inverses[place]);
            for (int n = 0; n < block.filled; n++) {
                float* const to = block.received + (block.grain_of[n] - first) * grain - n * grain;
                const int64_t stop = std::min(seen.stop, n * grain + scores.width_of(block.grain_of[n]));
                for (int64_t j = std::max<int64_t>(seen.start, n * grain); j < stop; j += lanes) {
                    const vf x = load(s + j);
                    vf weight = exp2_of(x - shift, factor) * inverse;
                    if (spoilt) weight = x == splat(-infinity) ? vf{} : inverse;  // hidden ones among them stay out
                    store(to + j, load(to + j) + weight);
                }
            }
        }
    }
};

inline void statistics(const Statistics& f) { run_pass<StatisticsPass>(f); }

}  // namespace SACCADE_SET
}  // namespace saccade

// One tile of the backward pass: from products to weights and to the slopes of the logits.
//
//     p_ij = exp(s_ij - lse_i)            ds_ij = p_ij (dp_ij - delta_i)
//     p_ij = sigmoid(s_ij - log n_i)      ds_ij = p_ij (1 - p_ij) dp_ij         of sigmoid attention
//
// s = q . k and dp = do . v come as floats; p (times its dropout factor) and ds leave as units of the products that
// follow: turned, where a unit holds `pack` rows of one key (a of dv = p^T do and dk = ds^T q), and ds also natural,
// where it holds `pack` keys of one row (a of dq = ds k). For single floats all of it stays in place.
#pragma once

#include <optional>

#include "backward_bias.h"
#include "backward_program.h"
#include "pack.h"
#include "weights.h"

namespace saccade {
namespace SACCADE_SET {

constexpr int tile_grains = 2, tile_keys = tile_grains * grain;

// Rows of one query block, and what is known of them.
struct BackwardRows {
    int64_t b, h, first, count;  // rows first ... first + count - 1 of the item
    float lse[grain + 1];        // the sink's share included; +inf where a row sees nothing, so that its weights are 0. Sigmoid: n
    float low[grain + 1];        // what rounding took from the lse: beside logits of 1e9 it is all that their number leaves
    float delta[grain + 1];
    bool blind;                  // some row sees nothing
};

template <class Math> struct BackwardTile {
    typedef typename Math::unit unit;
    float *s, *dp;                 // [grain][tile_keys]
    unit *weights, *slopes;        // turned, [grain / pack][tile_keys]
    unit* natural;                 // ds, [grain][tile_keys / pack]
    float* raw;                    // [2][tile_keys]: ds before softcap, for the bias
    uint64_t bits[grain][tile_grains];
    int64_t first, offset, width, keys;  // first key; within the block; columns, a multiple of lanes; keys that exist

    bool sees(int64_t i, int64_t j) const { return bits[i][j / grain] >> (j % grain) & 1; }
    SACCADE_INLINE uint32_t lane_bits(int64_t i, int64_t j) const { return (uint32_t)(bits[i][j / grain] >> (j % grain)); }
};

// The weights of a row's logits, natural * x each, and the slopes that dp times its dropout factor, dw, leads to.
struct SoftmaxRow {
    vf natural, lse, low, delta;
    SoftmaxRow(const BackwardRows& rows, int64_t i, float natural)
        : natural(splat(natural)), lse(splat(rows.lse[i])), low(splat(rows.low[i])), delta(splat(rows.delta[i])) {}
    template <int degree> SACCADE_INLINE vf weight(vf x) const { return exp2_of<degree>(x * natural - lse - low, splat(log2_e)); }
    SACCADE_INLINE vf slope(vf weight, vf dw) const { return weight * (dw - delta); }
};
struct SigmoidRow {
    SigmoidWeight of;
    SigmoidRow(const BackwardRows& rows, int64_t i, float natural) : of(rows.lse[i] == infinity ? 1 : rows.lse[i], natural * log2_e) {}
    template <int degree> SACCADE_INLINE vf weight(vf x) const { return of.of<degree>(x); }
    SACCADE_INLINE vf slope(vf weight, vf dw) const { return weight * dw - weight * (weight * dw); }
};

// How the slopes of one logit come about, beside the plain case.
class Slopes {
  public:
    Slopes(const Backward& f, float rest, const BiasGradient& gradient) : p(f.problem), rest(rest), inverse(p.softcap == 0 ? 0 : 1 / p.softcap), gradient(gradient) {}

    // `local` and `row_sums` take the gradient of the bias; of a program `local` takes that of its tables.
    template <class Math> void form(BackwardTile<Math>& tile, const BackwardRows& rows, bool masked, float* local, float* row_sums) const {
        return p.sigmoid ? form<SigmoidRow>(tile, rows, masked, local, row_sums) : form<SoftmaxRow>(tile, rows, masked, local, row_sums);
    }

    // delta of rows that see no key outside of this tile: sum_j p_ij dp_ij - dlse_i. The same sum from an output that is
    // rounded to half precision errs by half a unit of it, which long rows average out and short ones do not.
    template <class Math> void sum_delta(BackwardTile<Math>& tile, BackwardRows& rows, const float* d_lse, float* delta) const {
        alignas(64) float scores[tile_keys], steep[tile_keys];
        std::optional<ProgramRun> run;
        if (p.bias.form == Bias::program) run.emplace(started(tile, rows));
        for (int64_t i = 0; i < rows.count; i++) {
            if (rows.lse[i] == infinity) continue;
            const int64_t n = (rows.b * p.heads + rows.h) * p.length_q + rows.first + i;
            const BiasRow bias(p.bias, rows.b, rows.h, rows.first + i);
            const DropoutRow dropout(p.dropout, rows.b, rows.h, rows.first + i);
            vf sum = {};
            if (p.bias.form == Bias::program) {
                const SoftmaxRow row(rows, i, 1);
                to_scores(tile.s + i * tile_keys, scores, steep, tile.width);
                run->row(rows.first + i, i, scores, tile.width);
                for (int64_t j = 0; j < tile.width; j += lanes) {
                    const vf keep = p.dropout.on ? dropout.at(tile.first + j + p.dropout.key_origin) : splat(1.0f);
                    const vf part = row.weight<Math::degree>(load(scores + j)) * load(tile.dp + i * tile_keys + j) * keep;
                    sum += select(tile.lane_bits(i, j) & ~below_all(load(scores + j)), part, vf{});
                }
            } else {
                for (int64_t j = 0; j < tile.width; j += lanes) {
                    const Entries x = entries(SoftmaxRow(rows, i, 1), tile, bias, dropout, i, j);
                    sum += select(x.seen, x.weight * x.dw, vf{});
                }
            }
            delta[n] = rows.delta[i] = total(sum) - (d_lse ? d_lse[n] : 0);
        }
    }

  private:
    const Problem& p;
    const float rest, inverse;  // inverse: of softcap
    const BiasGradient& gradient;

    template <class Row, class Math>
    void form(BackwardTile<Math>& tile, const BackwardRows& rows, bool masked, float* local, float* row_sums) const {
        if (p.bias.form == Bias::program) return programmed<Row>(tile, rows, local);
        if (p.bias.form != Bias::none || p.softcap != 0 || p.dropout.on) return decorated<Row>(tile, rows, local, row_sums);
        return masked ? plain<Row, true>(tile, rows) : plain<Row, false>(tile, rows);
    }

    template <class Row, bool masked, class Math> void plain(BackwardTile<Math>& tile, const BackwardRows& rows) const {
        for (int64_t i = 0; i < rows.count; i += Math::pack) {
            const Row own[2] = {{rows, i, rest}, {rows, std::min(i + Math::pack, rows.count) - 1, rest}};
            const auto one = [&](int64_t i, int64_t j, const Row& row, vf& weight, vf& slope) SACCADE_LAMBDA {
                weight = row.template weight<Math::degree>(load(tile.s + i * tile_keys + j));
                slope = row.slope(weight, load(tile.dp + i * tile_keys + j));
                if constexpr (masked) {
                    weight = select(tile.lane_bits(i, j), weight, vf{});
                    slope = select(tile.lane_bits(i, j), slope, vf{});
                }
            };
            for (int64_t j = 0; j < tile.width; j += lanes) {
                vf weight[2] = {}, slope[2] = {};
                one(i, j, own[0], weight[0], slope[0]);
                if (Math::pack == 2 && i + 1 < rows.count) one(i + 1, j, own[1], weight[1], slope[1]);
                put(tile, i, j, weight, slope);
            }
        }
    }

    // `lanes` pairs of a row: p, dp times the factor of dropout, and who of them is seen. A bias of -inf clears mask bits.
    struct Entries {
        vf weight, dw, keep, steep;  // steep: the slope of softcap
        uint32_t seen;
    };

    template <class Row, class Math>
    SACCADE_INLINE Entries entries(const Row& row, BackwardTile<Math>& tile, const BiasRow& bias, const DropoutRow& dropout, int64_t i,
                                   int64_t j) const {
        vf x = load(tile.s + i * tile_keys + j) * splat(rest), steep = splat(1.0f), keep = splat(1.0f);
        uint32_t seen = tile.lane_bits(i, j);
        if (p.softcap != 0) {
            const vf t = tanh_of(x * splat(inverse));
            x = t * splat(p.softcap);
            steep = splat(1.0f) - t * t;
        }
        if (p.bias.form != Bias::none) {
            const vf y = bias.at(tile.first + j, tile.keys - j);
            x += y;
            if (const uint32_t hidden = below_all(y)) hide(tile, i, j, hidden), seen &= ~hidden;
        }
        if (p.dropout.on) keep = dropout.at(tile.first + j + p.dropout.key_origin);
        const vf weight = select(seen, row.template weight<Math::degree>(x), vf{});
        return {weight, load(tile.dp + i * tile_keys + j) * keep, keep, steep, seen};
    }

    // Softcap, bias and dropout. Mask bits are always set here, and a bias of -inf clears them.
    template <class Row, class Math>
    void decorated(BackwardTile<Math>& tile, const BackwardRows& rows, float* local, float* row_sums) const {
        for (int64_t i = 0; i < rows.count; i++) {
            const Row row(rows, i, 1);
            const BiasRow bias(p.bias, rows.b, rows.h, rows.first + i);
            const DropoutRow dropout(p.dropout, rows.b, rows.h, rows.first + i);
            float *s = tile.s + i * tile_keys, *dp = tile.dp + i * tile_keys;
            for (int64_t j = 0; j < tile.width; j += lanes) {
                const Entries x = entries(row, tile, bias, dropout, i, j);
                const vf slope = select(x.seen, row.slope(x.weight, x.dw), vf{});
                store(tile.raw + j, slope);
                store(s + j, select(x.seen, x.weight * x.keep, vf{}));
                store(dp + j, select(x.seen, slope * x.steep, vf{}));
            }
            if (gradient.form != BiasGradient::none)
                gradient.take(tile.raw, rows.b, rows.h, rows.first + i, tile.first, tile.offset, tile.width, tile.keys, local, row_sums[i]);
        }
        put_all(tile, rows);
    }

    // The same of a program, which follows the softcap. Its result is of no use where nobody looks, and may be anything.
    template <class Row, class Math> void programmed(BackwardTile<Math>& tile, const BackwardRows& rows, float* tables) const {
        const ScoreProgram& program = *p.bias.code;
        ProgramRun run = started(tile, rows);
        TableSums sums(p, tables, gradient.of_tables());
        alignas(64) float steep[tile_keys];  // the slope of softcap
        for (int64_t i = 0; i < rows.count; i++) {
            const Row row(rows, i, 1);
            const DropoutRow dropout(p.dropout, rows.b, rows.h, rows.first + i);
            float *s = tile.s + i * tile_keys, *dp = tile.dp + i * tile_keys;
            to_scores(s, s, steep, tile.width);
            run.row(rows.first + i, i, s, tile.width);
            for (int64_t j = 0; j < tile.width; j += lanes) {
                const uint32_t hidden = below_all(load(s + j));
                if (hidden) hide(tile, i, j, hidden);
                const uint32_t seen = tile.lane_bits(i, j);
                const vf keep = p.dropout.on ? dropout.at(tile.first + j + p.dropout.key_origin) : splat(1.0f);
                const vf weight = select(seen, row.template weight<Math::degree>(load(s + j)), vf{});
                const vf slope = select(seen, row.slope(weight, load(dp + j) * keep), vf{});
                store(tile.raw + j, slope);
                store(dp + j, select(seen, slope * run.value(program.slope, j, s) * load(steep + j), vf{}));
                store(s + j, weight * keep);
            }
            sums.take(run, tile.raw, i, tile.width, s, [&](int64_t j) SACCADE_LAMBDA { return tile.lane_bits(i, j); });
        }
        sums.finish(run, up_to(tile.width, grain) / grain);
        put_all(tile, rows);
    }

    template <class Math> ProgramRun started(const BackwardTile<Math>& tile, const BackwardRows& rows) const {
        ProgramRun run(p, tile_keys, rows.b, rows.h);
        run.columns(up_to(tile.width, grain) / grain, rows.first, [&](int64_t n) { return tile.first + n * grain; });
        return run;
    }

    // Products to scores, the softcap's slope beside them.
    void to_scores(const float* products, float* scores, float* steep, int64_t width) const {
        for (int64_t j = 0; j < width; j += lanes) {
            vf x = load(products + j) * splat(rest), slope = splat(1.0f);
            if (p.softcap != 0) {
                const vf t = tanh_of(x * splat(inverse));
                x = t * splat(p.softcap);
                slope = splat(1.0f) - t * t;
            }
            store(scores + j, x), store(steep + j, slope);
        }
    }

    // Lanes of -infinity, as bits: who has them does not see.
    static SACCADE_INLINE uint32_t below_all(vf x) {
        const vf hidden = x == splat(-infinity) ? splat(1.0f) : vf{};
        return above(hidden, 0.5f);
    }
    template <class Math> static SACCADE_INLINE void hide(BackwardTile<Math>& tile, int64_t i, int64_t j, uint32_t lanes_) {
        for (; lanes_; lanes_ &= lanes_ - 1) {
            const int64_t at = j + __builtin_ctz(lanes_);
            tile.bits[i][at / grain] &= ~(uint64_t(1) << at % grain);
        }
    }

    template <class Math> static void put_all(BackwardTile<Math>& tile, const BackwardRows& rows) {
        if constexpr (Math::pack == 2)
            for (int64_t i = 0; i < rows.count; i += 2)
                for (int64_t j = 0; j < tile.width; j += lanes) {
                    const bool two = i + 1 < rows.count;
                    const int64_t at = i * tile_keys + j;
                    const vf weight[2] = {load(tile.s + at), two ? load(tile.s + at + tile_keys) : vf{}};
                    const vf slope[2] = {load(tile.dp + at), two ? load(tile.dp + at + tile_keys) : vf{}};
                    put(tile, i, j, weight, slope);
                }
    }

    static SACCADE_INLINE void put(BackwardTile<Single>& tile, int64_t i, int64_t j, const vf* weight, const vf* slope) {
        store(tile.s + i * tile_keys + j, weight[0]);
        store(tile.dp + i * tile_keys + j, slope[0]);
    }
#if defined(SACCADE_PAIRS)
    // Rows i and i + 1 at once: narrowed together, then interleaved with one permutation.
    static SACCADE_INLINE void put(BackwardTile<Pairs>& tile, int64_t i, int64_t j, const vf* weight, const vf* slope) {
        const vu ds = narrow(slope[0], slope[1]);
        store(tile.weights + i / 2 * tile_keys + j, halves_in_turn(narrow(weight[0], weight[1])));
        store(tile.slopes + i / 2 * tile_keys + j, halves_in_turn(ds));
        uint32_t* row = tile.natural + (i * tile_keys + j) / 2;
        store_halves(row, row + tile_keys / 2, ds);
    }
#endif
};

}  // namespace SACCADE_SET
}  // namespace saccade

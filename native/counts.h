// How many keys each row sees: n of sigmoid attention.
#pragma once

#include "mask.h"
#include "pack.h"
#include "parallel.h"
#include "weights.h"

namespace saccade {
namespace SACCADE_SET {

class KeyCountPass {
  public:
    explicit KeyCountPass(const KeyCounts& f)
        : f(f), p(f.problem), blocks(up_to(p.length_q, grain) / grain), list(work_list(p.mask, p.length_q, p.length_k, grain, grain)) {}

    void run() const {
        parallel(p.threads, f.batch * f.heads * blocks, [&](int64_t n, int) {
            thread_local std::vector<Piece> pieces;
            const int64_t b = n / blocks / f.heads, h = n / blocks % f.heads, first = n % blocks * grain;
            const Span rows{first, std::min(first + grain, p.length_q)};
            float* out = f.out + (b * f.heads + h) * p.length_q;
            std::fill(out + rows.start, out + rows.stop, 0.0f);
            list->keys_of(b, h, rows, pieces);
            for (const Piece& piece : pieces) add(b, h, rows, piece, out);
        });
    }

  private:
    const KeyCounts& f;
    const Problem& p;
    const int64_t blocks;
    const std::shared_ptr<const WorkList> list;

    void add(int64_t b, int64_t h, Span rows, const Piece& piece, float* out) const {
        const int64_t stop = std::min<int64_t>(piece.last * grain, p.length_k);
        if (piece.full && p.bias.form != Bias::tensor) {
            for (int64_t i = rows.start; i < rows.stop; i++) out[i] += (float)(stop - piece.first * grain);
            return;
        }
        for (int64_t start = piece.first * grain; start < stop; start += grain) {
            const int count = (int)std::min<int64_t>(grain, stop - start);
            uint64_t words[grain];
            std::fill_n(words, grain, ~uint64_t{0} >> (64 - count));
            if (!piece.full) p.mask->block_bits(b, h, rows, start, count, words, 1);
            for (int64_t i = rows.start; i < rows.stop; i++) out[i] += shown(b, h, i, start, count, words[i - rows.start]);
        }
    }

    // Of the keys in `word` those that the bias shows.
    float shown(int64_t b, int64_t h, int64_t i, int64_t start, int count, uint64_t word) const {
        if (p.bias.form != Bias::tensor) return (float)__builtin_popcountll(word);
        const BiasRow row(p.bias, b, h, i);
        vf sum = {};
        for (int64_t j = 0; j < count; j += lanes) {
            const vf one = row.at(start + j, count - j) == splat(-infinity) ? vf{} : splat(1.0f);
            sum += select((uint32_t)(word >> j), one, vf{});
        }
        return total(sum);
    }
};

inline void key_counts(const KeyCounts& f) {
    if (f.problem.length_q > 0) KeyCountPass(f).run();
}

}  // namespace SACCADE_SET
}  // namespace saccade

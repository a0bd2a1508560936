// Least and greatest entries and mean norms of queries, keys and values, and the ends of logits and weights, per head, in one
// pass over each. Where something is not finite the head is only marked: where and how much is for the caller to find out.
//
// Shape legend: B batch, H heads, L rows, D width.
#pragma once

#include <algorithm>
#include <cmath>

#include "call.h"
#include "parallel.h"
#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

class HeadRangesPass {
  public:
    explicit HeadRangesPass(const HeadRanges& call) : call(call) {}

    void run() const {
        const int64_t queries = call.query.heads, keys = call.key.heads;
        const bool little = entries(call.query) + entries(call.key) + entries(call.value) < 1 << 16;  // done before a second thread begins
        parallel(little ? 1 : call.threads, queries + 2 * keys, [&](int64_t task, int) {
            if (task < queries) return query(task);
            const int64_t h = (task - queries) % keys, part = (task - queries) / keys;
            const HeadRanges::Vectors& vectors = part ? call.value : call.key;
            call.sound[task] = !vectors.data.data || of_type(vectors, h, call.of_keys + 3 * part * keys + h, keys);
        });
    }

  private:
    const HeadRanges& call;

    static int64_t entries(const HeadRanges::Vectors& vectors) { return vectors.batch * vectors.heads * vectors.rows * vectors.width; }

    void query(int64_t h) const {
        const int64_t heads = call.query.heads;
        call.sound[h] = of_type(call.query, h, call.of_queries + h, heads);
        float ends[4] = {infinity, -infinity, infinity, -infinity};
        for (int64_t b = 0; b < call.query.batch; b++)
            for (int64_t i = 0, at = (b * heads + h) * call.query.rows; i < call.query.rows; i++, at++) {
                if (call.nonfinite[at]) call.sound[h] = false;
                if (call.lse[at] == -infinity) continue;
                ends[0] = std::min(ends[0], call.lowest[at]), ends[1] = std::max(ends[1], call.highest[at]);
                ends[2] = std::min(ends[2], call.smallest[at]), ends[3] = std::max(ends[3], call.largest[at]);
            }
        for (int n = 0; n < 4; n++) call.of_queries[(3 + n) * heads + h] = ends[n];
    }

    bool of_type(const HeadRanges::Vectors& vectors, int64_t h, float* out, int64_t stride) const {
        switch (call.type) {
            case Type::f32: return of<float>(vectors, h, out, stride);
            case Type::bf16: return of<bf16>(vectors, h, out, stride);
            case Type::f16: return of<f16>(vectors, h, out, stride);
        }
        return false;
    }

    // min, max and norm to out[0], out[stride], out[2 * stride]; whether they are right.
    template <class T> bool of(const HeadRanges::Vectors& vectors, int64_t h, float* out, int64_t stride) const {
        vf low = splat(infinity), high = splat(-infinity), poison{};
        double norms = 0;
        int64_t count = 0;
        for (int64_t b = 0; b < vectors.batch; b++) {
            const uint8_t* const real = vectors.real ? vectors.real + b * vectors.real_batch + h * vectors.real_head : nullptr;
            const T* row = static_cast<const T*>(vectors.data.data) + b * vectors.data.batch + h * vectors.data.head;
            const float* const lse = &vectors == &call.query ? call.lse + (b * vectors.heads + h) * vectors.rows : nullptr;
            for (int64_t i = 0; i < vectors.rows; i++, row += vectors.data.row) {
                if ((real && !real[i]) || (lse && lse[i] == -infinity)) continue;
                vf squares{};
                for (int64_t d = 0; d < vectors.width; d += lanes) {
                    const int64_t left = vectors.width - d;
                    const vf x = load_as_float(row + d, left);
                    // Lanes past the end hold 0, which is no entry.
                    const uint32_t lanes_used = left >= lanes ? ~0u : (1u << left) - 1;
                    const vf below = x < low ? x : low, above = x > high ? x : high;
                    low = left >= lanes ? below : select(lanes_used, below, low);
                    high = left >= lanes ? above : select(lanes_used, above, high);
                    poison += x * vf{};
                    squares += x * x;
                }
                const float square = total(squares);
                const bool exact = square > 1e-30f && square < infinity;  // below and beyond, squares leave float's range
                norms += exact ? std::sqrt((double)square) : norm(row, vectors.width);
                count++;
            }
        }
        out[0] = -greatest(-low), out[stride] = greatest(high), out[2 * stride] = float(norms / double(count));
        return count && vectors.width && total(poison) == 0;
    }

    template <class T> static double norm(const T* row, int64_t width) {
        double sum = 0;
        for (int64_t d = 0; d < width; d++) {
            const double x = load_as_float(row + d, 1)[0];
            sum += x * x;
        }
        return std::sqrt(sum);
    }
};

inline void head_ranges(const HeadRanges& call) { HeadRangesPass(call).run(); }

}  // namespace SACCADE_SET
}  // namespace saccade

// The gradient of the bias: every ds_ij = p_ij (dp_ij - delta_i), summed along the axes on which the bias is broadcast.
//
// Sums that one task completes stay in its own memory until its end; sums that several tasks share are added to in turn.
#pragma once

#include <algorithm>

#include "backward_order.h"
#include "call.h"
#include "score_program.h"

namespace saccade {
namespace SACCADE_SET {

class BiasGradient {
  public:
    enum Form { none, entries, columns, rows, whole, lines };

    explicit BiasGradient(const Backward& f) : f(f), p(f.problem) {
        if (!f.d_bias) return;
        if (p.bias.form == Bias::program) {
            if (p.bias.code->adds_in_place()) form = entries;
            return;
        }
        const bool by_row = f.d_bias_row || p.length_q == 1, by_key = f.d_bias_key || p.length_k == 1;
        if (p.bias.form == Bias::line) form = lines;
        else form = by_row && by_key ? entries : by_row ? rows : by_key ? columns : whole;
    }

    // Whether tasks of different items or heads add to one entry, and then in which row of turns and as which one.
    bool shared() const { return form == entries && (chain_batch() || chain_head()); }
    int64_t chains() const { return (chain_batch() ? 1 : p.batch) * (chain_head() ? 1 : p.kv_heads); }
    int64_t chain(int64_t b, int64_t kv_head) const {
        return (chain_batch() ? 0 : b) * (chain_head() ? 1 : p.kv_heads) + (chain_head() ? 0 : kv_head);
    }
    int64_t place(int64_t b, int64_t kv_head) const {
        return (chain_batch() ? b : 0) * (chain_head() ? p.kv_heads : 1) + (chain_head() ? kv_head : 0);
    }

    bool at_end() const { return form == columns || form == whole || form == lines; }  // has sums of a whole task
    // Floats of a task's sums for one query head, where a block has `keys` keys.
    int64_t local_size(int64_t keys) const { return !at_end() ? 0 : (form == lines ? p.length_q : 0) + keys + 2 * lanes; }

    // Only what rows [low, high) touch.
    void clear(float* local, int64_t keys, int64_t low, int64_t high) const {
        const Range span = touched(keys, low, high);
        std::fill(local + span.start, local + span.stop, 0.0f);
    }

    // Row i's ds of `width` keys (a multiple of lanes; 0 where not seen), `count` of which exist, that begin at `offset`
    // of the block and at `first` of all.
    void take(const float* ds, int64_t b, int64_t h, int64_t i, int64_t first, int64_t offset, int64_t width, int64_t count,
              float* local, float& row_sum) const {
        if (form == entries) {
            float* to = f.d_bias + b * f.d_bias_batch + h * f.d_bias_head + i * f.d_bias_row + first * f.d_bias_key;
            if (f.d_bias_key == 1) {
                for (int64_t j = 0; j < width; j += lanes)
                    store_from_float(to + j, load_as_float(to + j, count - j) + load(ds + j), count - j);
            } else {
                for (int64_t j = 0; j < count; j++) to[j * f.d_bias_key] += ds[j];
            }
        } else if (form == rows) {
            vf sum = {};
            for (int64_t j = 0; j < width; j += lanes) sum += load(ds + j);
            row_sum += total(sum);
        } else {
            float* to = local + offset + (form == lines ? p.length_q - 1 - i : 0);
            for (int64_t j = 0; j < width; j += lanes) store(to + j, load(to + j) + load(ds + j));
        }
    }

    void add_rows(const float* sums, int64_t b, int64_t h, int64_t first, int64_t count) const {
        for (int64_t i = 0; i < count; i++) f.d_bias[b * f.d_bias_batch + h * f.d_bias_head + (first + i) * f.d_bias_row] += sums[i];
    }

    // What a task has summed for one query head, once its turn has come. Its keys begin at `first`, `count` of them exist.
    void add(const float* local, int64_t b, int64_t h, int64_t first, int64_t count, int64_t keys, int64_t low, int64_t high) const {
        if (form == lines) {
            const Range span = touched(keys, low, high);
            const int64_t shift = first - (p.length_q - 1) - p.bias.placed(b) - p.bias.least;
            float* line = f.d_bias + (b * p.heads + h) * p.bias.line_length;
            const int64_t start = std::max(span.start, -shift), stop = std::min(span.stop, p.bias.line_length - shift);
            for (int64_t n = start; n < stop; n++) line[n + shift] += local[n];
            return;
        }
        float* to = f.d_bias + b * f.d_bias_batch + h * f.d_bias_head;
        float sum = 0;
        for (int64_t j = 0; j < count; j++)
            if (form == columns) to[(first + j) * f.d_bias_key] += local[j];
            else sum += local[j];
        if (form == whole) *to += sum;
    }

    // Where the gradient of a program's tables is; null: not wanted.
    float* of_tables() const { return p.bias.form == Bias::program ? f.d_bias : nullptr; }

    Form form = none;

  private:
    struct Range {
        int64_t start, stop;
    };
    Range touched(int64_t keys, int64_t low, int64_t high) const {
        if (form != lines) return {0, keys + lanes};
        return {p.length_q - high, p.length_q - low + keys + lanes};
    }
    bool chain_batch() const { return f.d_bias_batch == 0 && p.batch > 1; }
    bool chain_head() const { return f.d_bias_head == 0 && p.heads > 1; }

    const Backward& f;
    const Problem& p;
};

}  // namespace SACCADE_SET
}  // namespace saccade

// The backward pass through a score program: the slopes of the scores, and the gradients of the tables that it reads.
#pragma once

#include <algorithm>
#include <vector>

#include "program_run.h"

namespace saccade {
namespace SACCADE_SET {

// Sums of the tables' gradients over the tiles of a task, one array for all tables. An index that is the same along the rows,
// along the diagonals or in the whole tile is added to once a tile or row.
class TableSums {
    typedef ScoreProgram::Pull Pull;
    static constexpr int places = 2 * ProgramRun::spread;

    const Problem& p;
    float *const sums, *const whole_gradient;  // a task's copy; where all gradients are. Null: not wanted
    float lines[ScoreProgram::most_pulls][places];

  public:
    TableSums(const Problem& p, float* sums, float* gradient) : p(p), sums(sums), whole_gradient(gradient) {
        if (gradient) std::fill_n(&lines[0][0], p.bias.code->pulls.size() * places, 0.0f);
    }

    // A row's slopes of the scores, 0 where not seen; `seen(j)` are the bits of `lanes` pairs, as a factor may be NaN where nobody looks.
    template <class Seen> void take(const ProgramRun& run, const float* slopes, int64_t offset, int64_t width, const float* scores, Seen&& seen) {
        if (!whole_gradient) return;
        for (size_t n = 0; n < p.bias.code->pulls.size(); n++) {
            const Pull& pull = p.bias.code->pulls[n];
            if (pull.own < 0) {
                add_line(run, pull, slopes, width, scores, seen);
                continue;
            }
            const int32_t last = (int32_t)pull.size - 1;
            vf sum = {};
            for (int64_t j = 0; j < width; j += lanes) {
                const uint32_t bits = seen(j);
                const vf part = select(bits, load(slopes + j) * run.value(pull.factor, j, scores), vf{});
                if (pull.at.level == ScoreProgram::pair) {
                    const vi at = within((vi)run.value(pull.at, j, scores), last);
                    for (uint32_t left = bits & whole; left; left &= left - 1) {
                        const int lane = __builtin_ctz(left);
                        sums[pull.own + at[lane]] += part[lane];
                    }
                } else if (pull.at.level < ScoreProgram::key) {
                    sum += part;
                } else {
                    float* const to = lines[n] + (pull.at.level == ScoreProgram::key ? j : j / grain * ProgramRun::spread + grain - 1 - offset + j % grain);
                    store(to, load(to) + part);
                }
            }
            if (pull.at.level < ScoreProgram::key) sums[pull.own + within((vi)run.value(pull.at, 0, scores), last)[0]] += total(sum);
        }
    }

    // At the end of a tile of `grains` grains.
    void finish(const ProgramRun& run, int64_t grains) {
        if (!whole_gradient) return;
        for (size_t n = 0; n < p.bias.code->pulls.size(); n++) {
            const Pull& pull = p.bias.code->pulls[n];
            if (pull.own < 0) continue;
            if (pull.at.level != ScoreProgram::key && pull.at.level != ScoreProgram::distance) continue;
            const int32_t* const at = run.line(pull.at);
            const int64_t count = grains * (pull.at.level == ScoreProgram::key ? grain : ProgramRun::spread);
            for (int64_t m = 0; m < count; m++) sums[pull.own + std::clamp<int64_t>(at[m], 0, pull.size - 1)] += lines[n][m];
        }
    }

  private:
    template <class Seen> void add_line(const ProgramRun& run, const Pull& pull, const float* slopes, int64_t width, const float* scores, Seen&& seen) {
        const int64_t start = ((vi)run.value(pull.at, 0, scores))[0];
        for (int64_t j = 0; j < width; j += lanes) {
            const vf part = select(seen(j), load(slopes + j) * run.value(pull.factor, j, scores), vf{});
            const int32_t* const keys = run.keys_from(j);
            const int64_t first = start + keys[0];
            if (keys[lanes - 1] == keys[0] + lanes - 1 && first >= 0 && first + lanes <= pull.size) {
                float* const to = whole_gradient + pull.start + first;
                store(to, load(to) + part);
                continue;
            }
            for (uint32_t left = seen(j) & whole; left; left &= left - 1) {
                const int lane = __builtin_ctz(left);
                whole_gradient[pull.start + std::clamp<int64_t>(start + keys[lane], 0, pull.size - 1)] += part[lane];
            }
        }
    }

    static constexpr uint32_t whole = lanes == 32 ? ~0u : (1u << lanes) - 1;
};

}  // namespace SACCADE_SET
}  // namespace saccade

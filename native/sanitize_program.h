// A bias as the score program that means the same: a line by distances, a tensor by pairs, keys, rows or neither.
#pragma once

#include "sanitize_oracle.h"
#include "score_program.h"

namespace saccade::sanitize {

// Writes the numbers of a program (score_program.h).
class ProgramWriter {
  public:
    typedef ScoreProgram::Operand Operand;

    Operand op(int level, int number, std::initializer_list<Operand> arguments = {}, int64_t value = 0, int kind = ScoreProgram::an_int) {
        const Operand to{level, counts[level]++};
        code.insert(code.end(), {level, number, kind, to.index});
        for (int n = 0; n < 3; n++) {
            const Operand x = n < (int)arguments.size() ? arguments.begin()[n] : ScoreProgram::none;
            code.insert(code.end(), {x.level, x.index});
        }
        code.push_back(value), instructions++;
        return to;
    }
    Operand number(int64_t value) { return op(ScoreProgram::uniform, 70, {}, value); }
    Operand number(float value) {
        int32_t bits;
        memcpy(&bits, &value, 4);
        return number(int64_t(bits));
    }

    // score + entry, and the gradient of the one table at `at`. With `hides` an entry of -inf makes -inf of every score, as a
    // bias does: where(entry == -inf, -inf, score + entry). The sum alone makes NaN of NaN and of inf.
    ScoreProgram sum_with(Operand entry, Operand at, int64_t size, bool in_place, bool hides) {
        const Operand one = number(1.0f), score{ScoreProgram::pair, 0};
        Operand result = op(ScoreProgram::pair, 0, {score, entry}, 0, ScoreProgram::a_float), share = one;
        if (hides) {
            const Operand none = number(-std::numeric_limits<float>::infinity());
            const Operand hidden = op(entry.level, 27, {entry, none}, 0, ScoreProgram::a_float);
            result = op(ScoreProgram::pair, 37, {hidden, none, result}, 0, ScoreProgram::a_float);
            share = op(entry.level, 37, {hidden, number(0.0f), one}, 0, ScoreProgram::a_float);
        }
        std::vector<int64_t> all(counts, counts + ScoreProgram::levels);
        all.insert(all.end(), {1, Bias::Table::f32, result.level, result.index, -1, 0, share.level, share.index});
        all.insert(all.end(), {1, at.level, at.index, share.level, share.index, 0, size, in_place ? -1 : 0, instructions});
        all.insert(all.end(), code.begin(), code.end());
        return ScoreProgram(all);
    }

  private:
    int counts[ScoreProgram::levels] = {0, 0, 0, 0, 1};  // register 0 is the score
    std::vector<int64_t> code;
    int64_t instructions = 0;
};

// Whether a bias of -inf stands at a pair that the mask shows, of a key that is not finite. There a sum is not what a bias is.
inline bool hides_poison(const Case& c) {
    const Problem& p = c.problem;
    for (int64_t b = 0; b < p.batch; b++)
        for (int64_t h = 0; h < p.heads; h++)
            for (int64_t j = 0; j < p.length_k; j++) {
                bool finite = true;
                for (int64_t x = 0; x < p.width; x++) finite = finite && std::isfinite(c.key.at(b, h / p.group(), j, x));
                for (int64_t i = 0; i < p.length_q && !finite; i++)
                    if (c.masking.sees(b, h, i, j) && bias_at(c, b, h, i, j) == -kInfinity) return true;
            }
    return false;
}

// What stands for the case's bias, which the oracle keeps. Python makes no program of a table without entries.
struct ProgramForm {
    std::unique_ptr<ScoreProgram> code;
    std::vector<float> entries;
    std::vector<Bias::Table> tables;
    std::atomic<bool> outside{false};
    int64_t batch = 0, head = 0;  // not 0: entries of their own

    ProgramForm(const Case& c, bool hides) : hides(hides) {
        if (c.problem.bias.form == Bias::line) by_distance(c);
        else by_axes(c);
        tables.push_back({Bias::Table::f32, entries.data(), int64_t(entries.size())});
    }

    Bias bias(const Bias& meant) const {
        Bias made;
        made.form = Bias::program, made.code = code.get(), made.tables = tables.data();
        made.outside = const_cast<std::atomic<bool>*>(&outside);
        made.placement = meant.form == Bias::line ? meant.placement : 0;
        made.placements = meant.form == Bias::line ? meant.placements : nullptr;
        return made;
    }

  private:
    const bool hides;

    void by_distance(const Case& c) {
        const Bias& line = c.problem.bias;
        entries = c.lines;
        if (entries.empty()) return;
        ProgramWriter w;
        const auto h = w.op(ScoreProgram::uniform, 66);
        const auto start = w.op(ScoreProgram::uniform, 2, {h, w.number(line.line_length)});
        const auto q = w.op(ScoreProgram::distance, 67), k = w.op(ScoreProgram::distance, 68);
        const auto away = w.op(ScoreProgram::distance, 1, {w.op(ScoreProgram::distance, 1, {k, q}), w.number(line.least)});
        const auto at = w.op(ScoreProgram::distance, 0, {start, away});
        const auto entry = w.op(ScoreProgram::pair, 72, {w.op(ScoreProgram::distance, 71, {at})});
        code = std::make_unique<ScoreProgram>(w.sum_with(entry, at, int64_t(entries.size()), false, hides));
    }

    void by_axes(const Case& c) {
        const int64_t* const shape = c.bias.shape;
        for (int64_t b = 0; b < shape[0]; b++)
            for (int64_t h = 0; h < shape[1]; h++)
                for (int64_t i = 0; i < shape[2]; i++)
                    for (int64_t j = 0; j < shape[3]; j++) entries.push_back(float(c.bias.at(b, h, i, j)));
        if (entries.empty()) return;
        batch = shape[0] > 1 || c.problem.batch == 1, head = shape[1] > 1 || c.problem.heads == 1;
        ProgramWriter w;
        const bool rows = shape[2] > 1, keys = shape[3] > 1;
        auto at = w.number(int64_t(0));
        const auto add = [&](int level, ProgramWriter::Operand leaf, int64_t step) { at = w.op(level, 0, {at, w.op(level, 2, {leaf, w.number(step)})}); };
        if (shape[0] > 1) add(ScoreProgram::uniform, w.op(ScoreProgram::uniform, 65), shape[1] * shape[2] * shape[3]);
        if (shape[1] > 1) add(ScoreProgram::uniform, w.op(ScoreProgram::uniform, 66), shape[2] * shape[3]);
        if (rows) add(ScoreProgram::row, w.op(ScoreProgram::row, 67), shape[3]);
        auto entry = at;
        if (rows && keys) {
            entry = w.op(ScoreProgram::pair, 74, {at});
        } else {
            if (keys) at = w.op(ScoreProgram::key, 0, {at, w.op(ScoreProgram::key, 68)});
            entry = w.op(at.level, 71, {at});
        }
        code = std::make_unique<ScoreProgram>(w.sum_with(entry, at, int64_t(entries.size()), rows && keys, hides));
    }
};

}  // namespace saccade::sanitize

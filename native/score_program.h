// A score as a program: what `bias=Score(function)` is to the kernels. The operations and their numbers are those of
// src/saccade/operator/_programs/_language.py; operator/_backends/native/_program.py writes the instructions.
//
// Every value has a level, the least of what it is made of, so that it is computed as seldom as possible:
//
//     uniform    item and head                     once for a block of rows
//     row        the query's position, too         once for a row
//     key        the key, but no query             once for a block of rows and a chunk of keys
//     distance   key minus query, and item, head   once for each distance of such a chunk
//     pair       anything, the score included      for each pair
//
// Floats, 32-bit ints and bools (all bits of a word, or none) share registers of 32-bit lanes.
#pragma once

#include <cstdint>
#include <vector>

#include "call.h"

namespace saccade {

class ScoreProgram {
  public:
    enum Level : int { uniform, row, key, distance, pair, levels };
    enum Kind : int { a_float, an_int, a_bool };  // of an operation's last argument

    struct Operand {
        int level, index;
    };

    // The result goes to `to`, of the level of its list. `number` is a constant's bits, or a table's number.
    struct Instruction {
        int op, kind;
        Operand to, arguments[3];
        int32_t number;
    };

    // A table that gets a gradient: entry `at` gets the slope of the score times `factor`. Where no two pairs of a head share
    // an entry and keys stand in a line, at + key, a task adds where the gradient is; else to a copy of its own.
    struct Pull {
        Operand at, factor;
        int64_t start, size;  // of the table in the gradient of all of them
        int64_t own;          // where it begins in a task's copy; -1: at + key, without a copy
    };

    // Throws std::invalid_argument where the numbers are no program. They are, in order: how many values each level has; how
    // many tables, and their types; result, outside and slope (level and index each, level -1: none); how many pulls, of
    // each: at, factor, start, size, own; how many instructions, of each: level, operation, kind, index of the result, three
    // arguments (level and index), number.
    explicit ScoreProgram(const std::vector<int64_t>& numbers);

    static constexpr Operand none{-1, 0};
    static constexpr int most_pulls = 8;

    std::vector<Instruction> code[levels];
    int counts[levels] = {};  // values of each level; of pairs: registers, of which the first is the score
    std::vector<Bias::Table::Type> tables;  // what the calls have to bring
    Operand result = none, outside = none;  // the score; whether an index lay outside of its table (a bool), or none
    Operand slope = none;                   // the result's derivative by the score, for the backward pass
    std::vector<Pull> pulls;

    // Floats of a task's copy of the tables' gradients.
    int64_t copied() const {
        int64_t floats = 0;
        for (const Pull& pull : pulls)
            if (pull.own >= 0 && pull.own + pull.size > floats) floats = pull.own + pull.size;
        return floats;
    }
    bool adds_in_place() const {
        for (const Pull& pull : pulls)
            if (pull.own < 0) return true;
        return false;
    }

    bool has(Level level) const { return !code[level].empty(); }
};

}  // namespace saccade

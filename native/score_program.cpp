#include "score_program.h"

#include <stdexcept>

namespace saccade {
namespace {

// Reads numbers one by one; running out of them is an error.
class Reader {
  public:
    explicit Reader(const std::vector<int64_t>& numbers) : numbers(numbers) {}
    int64_t next() {
        if (at == numbers.size()) throw std::invalid_argument("a score program ends early");
        return numbers[at++];
    }
    int64_t below(int64_t limit) {
        const int64_t number = next();
        if (number < 0 || number >= limit) throw std::invalid_argument("a number of a score program is out of range");
        return number;
    }
    bool at_end() const { return at == numbers.size(); }

  private:
    const std::vector<int64_t>& numbers;
    size_t at = 0;
};

// Whether a value of level `of` is at hand where values of level `level` are computed.
bool reaches(int of, int level, bool along) {
    if (of == ScoreProgram::uniform || of == level) return true;
    if (level != ScoreProgram::pair) return false;
    return of == ScoreProgram::distance ? along : true;
}

ScoreProgram::Operand operand(Reader& reader, const ScoreProgram& program, bool optional) {
    const int64_t level = reader.next(), index = reader.next();
    if (optional && level == -1) return ScoreProgram::none;
    if (level < 0 || level >= ScoreProgram::levels || index < 0 || index >= program.counts[level])
        throw std::invalid_argument("a score program names no such value");
    return {(int)level, (int)index};
}

}  // namespace

ScoreProgram::ScoreProgram(const std::vector<int64_t>& numbers) {
    constexpr int64_t many = 1 << 12;
    constexpr int along_diagonal = 72, load = 71, load_line = 74;
    Reader reader(numbers);
    for (int& count : counts) count = (int)reader.below(many);
    if (!counts[uniform] || !counts[pair]) throw std::invalid_argument("a score program has a score and some value");
    tables.resize(reader.below(many));
    for (Bias::Table::Type& type : tables) type = static_cast<Bias::Table::Type>(reader.below(3));
    result = operand(reader, *this, false), outside = operand(reader, *this, true), slope = operand(reader, *this, true);
    pulls.resize(reader.below(most_pulls + 1));
    for (Pull& pull : pulls) {
        pull.at = operand(reader, *this, false), pull.factor = operand(reader, *this, false);
        pull.start = reader.next(), pull.size = reader.next(), pull.own = reader.next();
        if (pull.start < 0 || pull.size < 1 || pull.own < -1 || (pull.own < 0 && pull.at.level > row)) throw std::invalid_argument("a gradient of a table has a place and a size");
    }
    for (int64_t left = reader.below(many); left; left--) {
        Instruction x;
        const int level = (int)reader.below(levels);
        x.op = (int)reader.below(many), x.kind = (int)reader.below(3);
        x.to = {level, (int)reader.below(counts[level])};
        for (Operand& argument : x.arguments) {
            argument = operand(reader, *this, true);
            if (argument.level >= 0 && !reaches(argument.level, level, x.op == along_diagonal))
                throw std::invalid_argument("a value of a score program is made of values that are not there yet");
        }
        x.number = (int32_t)reader.next();
        if ((x.op == load || x.op == load_line) && (x.number < 0 || x.number >= (int64_t)tables.size())) throw std::invalid_argument("a score program reads no such table");
        if (x.op == load_line && (level != pair || x.arguments[0].level > row)) throw std::invalid_argument("lines of a table are read by pairs");
        if (x.op == along_diagonal && x.arguments[0].level != distance) throw std::invalid_argument("only distances lie along diagonals");
        code[level].push_back(x);
    }
    if (!reader.at_end()) throw std::invalid_argument("a score program goes on after its end");
}

}  // namespace saccade

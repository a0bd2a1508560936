// From a program to an expression; every number and table is checked on the way.
#pragma once

#include <functional>
#include <string>

#include "mask_algebra.h"
#include "mask_documents.h"
#include "mask_positions.h"
#include "mask_program.h"
#include "mask_residues.h"
#include "mask_tables.h"

namespace saccade::masks {

// How far the rows and keys of a part reach, and where its rows stand: spans in order that do not touch.
struct Reach {
    int64_t rows, keys;
    std::vector<Span> positions;
};

// Spans in order, those that meet or overlap as one.
inline std::vector<Span> merged(std::vector<Span> spans) {
    std::sort(spans.begin(), spans.end(), [](Span a, Span b) { return a.start < b.start; });
    std::vector<Span> found;
    for (const Span& span : spans) {
        if (found.empty() || span.start > found.back().stop)
            found.push_back(span);
        else
            found.back().stop = std::max(found.back().stop, span.stop);
    }
    return found;
}

// Takes a program apart from left to right.
class Reader {
  public:
    // Long work calls `pause` now and then, which may throw.
    Reader(const std::vector<int64_t>& program, const std::vector<Table>& tables, const std::function<void()>& pause)
        : program_(program), tables_(tables), pause_(pause) {}

    int64_t batch = 1, heads = 1;

    Part part(const Reach& reach) {
        switch (static_cast<Operation>(next())) {
            case Operation::window: return window();
            case Operation::padding: return padding(reach);
            case Operation::documents: return documents(reach);
            case Operation::prefix: return std::make_unique<Prefix>(number());
            case Operation::global: return std::make_unique<Global>(tokens(reach));
            case Operation::strided: return std::make_unique<Strided>(least(1), reach.keys);
            case Operation::fixed: return fixed(reach);
            case Operation::blocks: return blocks();
            case Operation::random: return random(reach);
            case Operation::edges: return edges();
            case Operation::tensor: return tensor(reach);
            case Operation::tiles: return tiles();
            case Operation::at: return at(reach);
            case Operation::slice: return slice(reach);
            case Operation::all: return several(reach, true);
            case Operation::any: return several(reach, false);
            case Operation::invert: return std::make_unique<Not>(part(reach));
            case Operation::heads: return per_head(reach);
            case Operation::dilated: return std::make_unique<Dilated>(least(1), reach.keys);
            case Operation::chunks: return chunks();
            case Operation::columns: return columns(reach);
        }
        throw std::invalid_argument("mask program: no such operation");
    }

    void finish() const { require(at_ == program_.size(), "numbers are left over"); }

  private:
    static void require(bool holds, const char* what) {
        if (!holds) throw std::invalid_argument(std::string("mask program: ") + what);
    }

    int64_t next() {
        require(at_ < program_.size(), "it ends too early");
        return program_[at_++];
    }

    int64_t least(int64_t lowest) {
        const int64_t value = next();
        require(value >= lowest, "a number is too small");
        return value;
    }

    Table table(int least_axes, int most_axes, bool boolean) {
        const int64_t index = least(0);
        require(index < static_cast<int64_t>(tables_.size()), "no such table");
        const Table& table = tables_[index];
        require(table.axes >= least_axes && table.axes <= most_axes, "a table has another number of axes");
        require((table.code == Table::boolean) == boolean, "a table has another dtype");
        return table;
    }

    bool none() {
        require(at_ < program_.size(), "it ends too early");
        if (program_[at_] != -1) return false;
        ++at_;
        return true;
    }

    Number number() {
        Number number;
        number.many = next() != 0;
        if (!number.many) {
            number.value = next();
            return number;
        }
        number.table = table(1, 1, false);
        shared(batch, number.table.shape[0]);
        return number;
    }

    static void shared(int64_t& size, int64_t other) {
        require(size == 1 || other == 1 || size == other, "parts for different numbers of items or heads");
        if (size == 1) size = other;
    }

    // (L,) as (1, L).
    Table by_item(Table table) {
        if (table.axes == 1) {
            table.shape[1] = table.shape[0], table.stride[1] = table.stride[0];
            table.shape[0] = 1, table.stride[0] = 0, table.axes = 2;
        }
        shared(batch, table.shape[0]);
        return table;
    }

    Table by_head(const Table& table) {
        shared(batch, table.shape[0]);
        shared(heads, table.shape[1]);
        return table;
    }

    Part window() {
        const int64_t left = next();
        return std::make_unique<Window>(left, next());
    }

    // Lengths (B,) or booleans (B, L).
    Subset subset(int64_t reach) {
        require(at_ < program_.size(), "it ends too early");
        const int64_t index = program_[at_];
        const bool boolean =
            index >= 0 && index < static_cast<int64_t>(tables_.size()) && tables_[index].code == Table::boolean;
        const Table kept = table(boolean ? 2 : 1, boolean ? 2 : 1, boolean);
        shared(batch, kept.shape[0]);
        return Subset(kept, reach);
    }

    Part padding(const Reach& reach) {
        Subset keys = subset(reach.keys);
        if (none()) return std::make_unique<Padding>(std::move(keys), Subset(), false);
        return std::make_unique<Padding>(std::move(keys), subset(reach.rows), true);
    }

    Subset tokens(const Reach& reach) {
        return Subset(by_item(table(1, 2, true)), std::max(reach.keys, reach.positions.back().stop));
    }

    Part documents(const Reach& reach) {
        const Table rows = ids();
        const bool same = none();
        const Table keys = same ? rows : ids();
        require(keys.shape[keys.axes - 1] >= reach.keys, "fewer ids than keys");
        return std::make_unique<Documents>(rows, keys, same, reach.keys);
    }

    Table ids() {
        const Table ids = table(1, 2, false);
        if (ids.axes == 2) shared(batch, ids.shape[0]);
        return ids;
    }

    Part fixed(const Reach& reach) {
        const int64_t stride = least(1), columns = least(1);
        require(columns <= stride, "more columns than the stride");
        return std::make_unique<Fixed>(stride, columns, reach.keys);
    }

    Part chunks() {
        const int64_t size = least(1), left = least(0);
        return std::make_unique<Chunks>(size, left, least(0));
    }

    Part columns(const Reach& reach) {
        const int64_t stride = least(1), columns = least(1);
        require(columns <= stride, "more columns than the stride");
        return std::make_unique<Columns>(stride, columns, reach.keys);
    }

    Part blocks() {
        const Table layout = table(2, 3, true);
        if (layout.axes == 3) shared(heads, layout.shape[0]);
        return std::make_unique<Blocks>(layout, least(1));
    }

    Part random(const Reach& reach) {
        const int64_t start = next(), size = least(1), count = least(0);
        const bool symmetric = next() != 0;
        return std::make_unique<RandomBlocks>(start, size, count, symmetric, reach.positions, reach.keys, pause_);
    }

    Part edges() {
        const Table starts = table(1, 1, false), keys = table(1, 1, false);
        require(starts.shape[0] >= 1 && starts.one(starts.shape[0] - 1) == keys.shape[0], "edges do not add up");
        return std::make_unique<Edges>(starts, keys);
    }

    Part tensor(const Reach& reach) {
        const Table pairs = by_head(table(4, 4, true));
        require(pairs.shape[2] == 1 || pairs.shape[2] >= reach.rows, "a tensor of fewer rows than there are");
        require(pairs.shape[3] == 1 || pairs.shape[3] >= reach.keys, "a tensor of fewer keys than there are");
        return std::make_unique<FromTensor>(pairs);
    }

    Part tiles() {
        const Table which = table(4, 4, false), held = table(2, 2, false);
        const int64_t top = next(), bottom = next(), left = next(), right = next();
        require(which.shape[2] == ceil_div(bottom - top, Tiles::kSide), "tiles do not cover the rows");
        require(which.shape[3] == ceil_div(right - left, Tiles::kSide), "tiles do not cover the keys");
        require(held.shape[1] == Tiles::kSide, "a tile has another size");
        return std::make_unique<Tiles>(by_head(which), held, Span{top, bottom}, Span{left, right});
    }

    Part at(Reach reach) {
        const Number offset = number();
        reach.positions = {{offset.of(0), offset.of(0) + reach.rows}};
        for (int64_t b = 1; offset.many && b < offset.table.shape[0]; ++b)
            reach.positions.push_back({offset.of(b), offset.of(b) + reach.rows});
        reach.positions = merged(std::move(reach.positions));
        return std::make_unique<At>(part(reach), offset);
    }

    Part slice(const Reach& reach) {
        const int64_t row = least(0), key = least(0), rows = least(0), keys = least(0);
        const bool fixed = next() != 0;
        const int64_t offset = fixed ? keys - rows : 0;
        const Reach whole{row + reach.rows, key + reach.keys, {{row + offset, row + reach.rows + offset}}};
        return std::make_unique<Slice>(part(whole), row, key, offset);
    }

    std::vector<Part> parts(int64_t count, const Reach& reach) {
        std::vector<Part> parts;
        for (int64_t n = 0; n < count; ++n) parts.push_back(part(reach));
        return parts;
    }

    Part several(const Reach& reach, bool all) {
        const int64_t count = least(1);
        return std::make_unique<Several>(parts(count, reach), all);
    }

    Part per_head(const Reach& reach) {
        const int64_t count = least(1), number_of_heads = least(1);
        std::vector<int64_t> which;
        for (int64_t head = 0; head < number_of_heads; ++head) {
            which.push_back(least(0));
            require(which.back() < count, "no such part for a head");
        }
        shared(heads, number_of_heads);
        return std::make_unique<PerHead>(parts(count, reach), std::move(which));
    }

    const std::vector<int64_t>& program_;
    const std::vector<Table>& tables_;
    const std::function<void()>& pause_;
    size_t at_ = 0;
};

}  // namespace saccade::masks

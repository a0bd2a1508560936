// Reading a mask's program, asking the expression, and building work lists.
#include "mask.h"

#include <string>

#include "mask_algebra.h"
#include "mask_list.h"
#include "mask_positions.h"
#include "mask_program.h"
#include "mask_tables.h"

namespace saccade::masks {
namespace {

// How far the rows, positions and keys of a part reach.
struct Reach {
    int64_t rows, keys;
    Span positions;
};

class Reader {
  public:
    Reader(const std::vector<int64_t>& program, const std::vector<Table>& tables) : program_(program), tables_(tables) {}

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
            case Operation::tensor: return std::make_unique<FromTensor>(by_head(table(4, 4, true)));
            case Operation::tiles: return tiles();
            case Operation::at: return at(reach);
            case Operation::slice: return slice(reach);
            case Operation::all: return several(reach, true);
            case Operation::any: return several(reach, false);
            case Operation::invert: return std::make_unique<Not>(part(reach));
            case Operation::heads: return per_head(reach);
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
        return Subset(by_item(table(1, 2, true)), std::max(reach.keys, reach.positions.stop));
    }

    Part documents(const Reach& reach) {
        const Table rows = ids();
        if (none()) return std::make_unique<Documents>(rows, rows, true, reach.keys);
        const Table keys = ids();
        return std::make_unique<Documents>(rows, keys, false, reach.keys);
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

    Part blocks() {
        const Table layout = table(2, 3, true);
        if (layout.axes == 3) shared(heads, layout.shape[0]);
        return std::make_unique<Blocks>(layout, least(1));
    }

    Part random(const Reach& reach) {
        const int64_t start = next(), size = least(1), count = least(0);
        const bool symmetric = next() != 0;
        return std::make_unique<RandomBlocks>(start, size, count, symmetric, reach.positions, reach.keys);
    }

    Part edges() {
        const Table starts = table(1, 1, false), keys = table(1, 1, false);
        require(starts.shape[0] >= 1 && starts.one(starts.shape[0] - 1) == keys.shape[0], "edges do not add up");
        return std::make_unique<Edges>(starts, keys);
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
        reach.positions = {offset.of(0), offset.of(0) + reach.rows};
        for (int64_t b = 1; offset.many && b < offset.table.shape[0]; ++b)
            reach.positions = hull(reach.positions, {offset.of(b), offset.of(b) + reach.rows});
        return std::make_unique<At>(part(reach), offset);
    }

    Part slice(const Reach& reach) {
        const int64_t row = least(0), key = least(0), rows = least(0), keys = least(0);
        const bool fixed = next() != 0;
        const int64_t offset = fixed ? keys - rows : 0;
        const Reach whole{row + reach.rows, key + reach.keys, {row + offset, row + reach.rows + offset}};
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
    size_t at_ = 0;
};

class Expression;

// Heads and items that see the same, but for the clip, share their lines.
class List final : public WorkList {
  public:
    List(const Expression& mask, int row_grain, int key_grain);

    void keys_of(int64_t b, int64_t h, Span rows, std::vector<Piece>& pieces) const override;
    void rows_of(int64_t b, int64_t h, Span keys, std::vector<Piece>& pieces) const override;

    int64_t distinct() const { return static_cast<int64_t>(shared_.size()); }

    const int row_grain, key_grain;

  private:
    struct Shared {
        int64_t item, head;
        Once<Lines> by_rows, by_keys;
    };

    Shared& shared(int64_t b, int64_t h) const;
    const Lines& by_rows(Shared& shared) const;
    const Lines& by_keys(Shared& shared) const;

    const Expression& mask_;
    std::vector<std::unique_ptr<Shared>> shared_;
    std::vector<int32_t> which_;  // of shared_, for each item and head
};

class Expression final : public Mask {
  public:
    Expression(Part root, int64_t items, int64_t query_heads, int64_t rows, int64_t keys)
        : root_(std::move(root)) {
        batch = items, heads = query_heads, length_q = rows, length_k = keys;
        gives_cut_ = root_->give_cut();
    }

    ~Expression() override {
        for (Kept* at = lists_.load(std::memory_order_relaxed); at;) {
            Kept* const next = at->next;
            delete at;
            at = next;
        }
    }

    Kind kind(int64_t b, int64_t h, Span rows, Span keys) const override {
        rows = meet(rows, {0, length_q}), keys = meet(keys, {0, length_k});
        if (rows.empty() || keys.empty()) return Kind::empty;
        return profile(b, h, rows, keys, false).kind();
    }

    Span keys_of(int64_t b, int64_t h, Span rows) const override {
        rows = meet(rows, {0, length_q});
        if (rows.empty() || !length_k) return {0, 0};
        return profile(b, h, rows, {0, length_k}, false).beyond(Kind::empty);
    }

    Span rows_of(int64_t b, int64_t h, Span keys) const override {
        keys = meet(keys, {0, length_k});
        if (keys.empty()) return {0, 0};
        const Span rows = meet(root_->rows_of(place(b, h, false), keys), {0, length_q});
        return rows.empty() ? Span{0, 0} : rows;
    }

    void row_bits(int64_t b, int64_t h, int64_t row, int64_t start, int count, uint64_t* words) const override {
        if (!root_->interval) return block_bits(b, h, {row, row + 1}, start, count, words, 0);
        Span keys;
        root_->seen(place(b, h, false), {row, row + 1}, &keys);
        assign(keys, start, count, words);
    }

    void block_bits(int64_t b, int64_t h, Span rows, int64_t start, int count, uint64_t* words,
                    int64_t stride) const override {
        const Place at = place(b, h, false);
        for (int64_t row = rows.start; row < rows.stop; row += kRows) {
            const Span some{row, std::min(row + kRows, rows.stop)};
            uint64_t* const first = words + (row - rows.start) * stride;
            for (int n = 0; n < count; n += kChunk)
                root_->bits(at, {some, start + n, std::min(count - n, kChunk), first + n / 64, stride});
        }
    }

    Profile profile(int64_t b, int64_t h, Span rows, Span keys, bool core) const {
        Profile found(keys);
        root_->profile(place(b, h, core), rows, found);
        return found;
    }

    Cut cut(int64_t b) const {
        Cut cut;
        if (gives_cut_) root_->cut(batch > 1 ? b : 0, cut);
        return cut;
    }

    std::vector<int64_t> signature(int64_t b, int64_t h) const {
        std::vector<int64_t> numbers;
        root_->signature(b, h, numbers);
        return numbers;
    }

    std::shared_ptr<const List> list(int row_grain, int key_grain) const {
        Kept* first = lists_.load(std::memory_order_acquire);
        for (;;) {
            for (Kept* at = first; at; at = at->next)
                if (at->list->row_grain == row_grain && at->list->key_grain == key_grain) return at->list;
            auto made = std::make_unique<Kept>(Kept{std::make_shared<const List>(*this, row_grain, key_grain), first});
            if (lists_.compare_exchange_strong(first, made.get(), std::memory_order_acq_rel)) return made.release()->list;
        }
    }

  private:
    struct Kept {
        std::shared_ptr<const List> list;
        Kept* next;
    };

    Place place(int64_t b, int64_t h, bool core) const {
        return {batch > 1 ? b : 0, heads > 1 ? h : 0, length_k - length_q, core};
    }

    Part root_;
    bool gives_cut_;
    mutable std::atomic<Kept*> lists_{nullptr};
};

List::List(const Expression& mask, int rows, int keys) : row_grain(rows), key_grain(keys), mask_(mask) {
    std::map<std::vector<int64_t>, int32_t> known;
    for (int64_t b = 0; b < mask.batch; ++b)
        for (int64_t h = 0; h < mask.heads; ++h) {
            const auto [found, added] =
                known.emplace(mask.signature(b, h), static_cast<int32_t>(shared_.size()));
            if (added) {
                shared_.push_back(std::make_unique<Shared>());
                shared_.back()->item = b, shared_.back()->head = h;
            }
            which_.push_back(found->second);
        }
}

List::Shared& List::shared(int64_t b, int64_t h) const {
    return *shared_[which_[(mask_.batch > 1 ? b * mask_.heads : 0) + (mask_.heads > 1 ? h : 0)]];
}

const Lines& List::by_rows(Shared& shared) const {
    return shared.by_rows.get([&] {
        Lines lines;
        for (int64_t row = 0; row < mask_.length_q; row += row_grain) {
            const Span rows{row, std::min(row + row_grain, mask_.length_q)};
            put_blocks(mask_.profile(shared.item, shared.head, rows, {0, mask_.length_k}, true), key_grain, lines);
        }
        return lines;
    });
}

const Lines& List::by_keys(Shared& shared) const {
    return shared.by_keys.get([&] { return Transposed(by_rows(shared), ceil_div(mask_.length_k, key_grain)).lines(); });
}

void List::keys_of(int64_t b, int64_t h, Span rows, std::vector<Piece>& pieces) const {
    pieces.clear();
    rows = meet(rows, {0, mask_.length_q});
    const Cut cut = mask_.cut(b);
    const Span seeing = meet(cut.rows, rows);
    if (seeing.empty() || !mask_.length_k) return;
    const bool all_cut = seeing.start > rows.start || seeing.stop < rows.stop;
    cut_pieces(by_rows(shared(b, h)), rows.start / row_grain, cut.keys, mask_.length_k, key_grain, all_cut, pieces);
}

void List::rows_of(int64_t b, int64_t h, Span keys, std::vector<Piece>& pieces) const {
    pieces.clear();
    keys = meet(keys, {0, mask_.length_k});
    const Cut cut = mask_.cut(b);
    const Span seen = meet(cut.keys, keys);
    if (seen.empty() || !mask_.length_q) return;
    const bool all_cut = seen.start > keys.start || seen.stop < keys.stop;
    cut_pieces(by_keys(shared(b, h)), keys.start / key_grain, cut.rows, mask_.length_q, row_grain, all_cut, pieces);
}

// Everything is seen by everyone.
class Everything final : public WorkList {
  public:
    Everything(int64_t row_blocks, int64_t key_blocks) : row_blocks_(row_blocks), key_blocks_(key_blocks) {}

    void keys_of(int64_t, int64_t, Span, std::vector<Piece>& pieces) const override { whole(key_blocks_, pieces); }
    void rows_of(int64_t, int64_t, Span, std::vector<Piece>& pieces) const override { whole(row_blocks_, pieces); }

  private:
    static void whole(int64_t blocks, std::vector<Piece>& pieces) {
        pieces.clear();
        if (blocks) pieces.push_back({0, static_cast<int32_t>(blocks), true});
    }

    int64_t row_blocks_, key_blocks_;
};

}  // namespace

std::unique_ptr<Mask> read_mask(const std::vector<int64_t>& program, const std::vector<Table>& tables, int64_t length_q,
                                int64_t length_k) {
    Reader reader(program, tables);
    Part root = reader.part({length_q, length_k, {length_k - length_q, length_k}});
    reader.finish();
    return std::make_unique<Expression>(std::move(root), reader.batch, reader.heads, length_q, length_k);
}

int64_t distinct_lists(const Mask& mask, int row_grain, int key_grain) {
    return static_cast<const Expression&>(mask).list(row_grain, key_grain)->distinct();
}

}  // namespace saccade::masks

namespace saccade {

std::shared_ptr<const WorkList> work_list(const Mask* mask, int64_t length_q, int64_t length_k, int row_grain, int key_grain) {
    if (!mask) return std::make_shared<const masks::Everything>(masks::ceil_div(length_q, row_grain), masks::ceil_div(length_k, key_grain));
    // Every mask comes from read_mask.
    return static_cast<const masks::Expression*>(mask)->list(row_grain, key_grain);
}

}  // namespace saccade

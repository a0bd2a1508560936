// Asking a mask's expression, and building work lists from it.
#include "mask.h"

#include "mask_list.h"
#include "mask_reader.h"

namespace saccade::masks {
namespace {

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
        whole_ = std::make_unique<Once<Span>[]>(items * query_heads);
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
        const auto found = [&] { return profile(b, h, rows, {0, length_k}, false).beyond(Kind::empty); };
        if (rows.start > 0 || rows.stop < length_q) return found();
        // The kernels ask it for every block of rows, and a tensor has to be read as a whole to answer.
        return whole_[(batch > 1 ? b * heads : 0) + (heads > 1 ? h : 0)].get(found);
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
            const auto order = std::memory_order_acq_rel;
            if (lists_.compare_exchange_strong(first, made.get(), order)) return made.release()->list;
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
    std::unique_ptr<Once<Span>[]> whole_;  // the keys that some row sees, for each item and head
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
                                int64_t length_k, const std::function<void()>& pause) {
    Reader reader(program, tables, pause);
    Part root = reader.part({length_q, length_k, {{length_k - length_q, length_k}}});
    reader.finish();
    return std::make_unique<Expression>(std::move(root), reader.batch, reader.heads, length_q, length_k);
}

int64_t distinct_lists(const Mask& mask, int row_grain, int key_grain) {
    return static_cast<const Expression&>(mask).list(row_grain, key_grain)->distinct();
}

}  // namespace saccade::masks

namespace saccade {

std::shared_ptr<const WorkList> work_list(const Mask* mask, int64_t length_q, int64_t length_k, int row_grain,
                                          int key_grain) {
    using namespace masks;
    if (!mask) return std::make_shared<const Everything>(ceil_div(length_q, row_grain), ceil_div(length_k, key_grain));
    // Every mask comes from read_mask.
    return static_cast<const Expression*>(mask)->list(row_grain, key_grain);
}

}  // namespace saccade

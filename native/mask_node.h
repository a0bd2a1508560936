// One part of a mask's expression, and the tensors that parts look things up in.
//
// Rows stand at positions `row + offset`; keys count from 0. Both are those of the problem the part was written for:
// `.at` and `.slice` translate.
#pragma once

#include <memory>
#include <stdexcept>
#include <vector>

#include "mask_bits.h"

namespace saccade::masks {

struct Place {
    int64_t item, head;
    int64_t offset;     // position of row 0
    bool core = false;  // leave out what the work list applies as a clip
};

// Lengths that cut the rows and keys of one item.
struct Cut {
    Span rows = kEverywhere, keys = kEverywhere;
};

class Node {
  public:
    virtual ~Node() = default;

    // Whether the keys of a row are always one interval. `seen` then writes that of each of the rows, at most kRows.
    bool interval = false;
    virtual void seen(const Place&, Span, Span*) const {}

    // Covers the whole of profile.keys(), which is not empty; rows are not empty.
    virtual void profile(const Place& place, Span rows, Profile& profile) const = 0;

    // Every word is written.
    virtual void bits(const Place& place, const Bits& out) const {
        Span keys[kRows];
        seen(place, out.rows, keys);
        for (int64_t row = out.rows.start; row < out.rows.stop; ++row)
            assign(keys[row - out.rows.start], out.start, out.count, out.row(row));
    }

    virtual Span rows_of(const Place&, Span) const { return kEverywhere; }

    // Numbers that are equal for items and heads that see the same.
    virtual void signature(int64_t, int64_t, std::vector<int64_t>&) const {}

    // Whether it is made of lengths that a list can leave out and cut by, `cut` being asked for each item.
    virtual bool give_cut() { return false; }
    virtual void cut(int64_t, Cut&) const {}
};

using Part = std::unique_ptr<Node>;

// A tensor of booleans (bytes), int32 or int64, of at most four axes, read where it lies. Strides are in elements.
struct Table {
    enum Code : int { boolean = 0, int32 = 1, int64 = 2 };
    const void* data = nullptr;
    int axes = 0;
    int64_t shape[4] = {}, stride[4] = {};
    Code code = int64;

    int64_t at(int64_t place) const {
        switch (code) {
            case boolean: return static_cast<const uint8_t*>(data)[place] != 0;
            case int32: return static_cast<const int32_t*>(data)[place];
            default: return static_cast<const int64_t*>(data)[place];
        }
    }
    int64_t one(int64_t i) const { return at(i * stride[0]); }
    const uint8_t* bytes(int64_t place) const { return static_cast<const uint8_t*>(data) + place; }

    // Axis `axis`, which broadcasts.
    int64_t step(int axis, int64_t index) const { return shape[axis] > 1 ? index * stride[axis] : 0; }
};

// A number, or one for each batch item.
struct Number {
    int64_t value = 0;
    bool many = false;
    Table table;

    // Halfway to an open end at most: further away nothing changes, and sums stay in order.
    int64_t of(int64_t item) const {
        return std::clamp(many ? table.at(table.step(0, item)) : value, -kFar / 2, kFar / 2);
    }
    void sign(int64_t item, std::vector<int64_t>& out) const {
        if (many) out.push_back(of(item));
    }
};

// `count` bytes from `from` on, `step` apart, as bits.
inline void pack_strided(const uint8_t* from, int64_t step, int64_t count, uint64_t* words) {
    if (step == 1) return pack(from, count, words);
    for (int64_t at = 0; at < count; at += 64) {
        uint8_t some[64] = {};
        for (int64_t n = 0; n < std::min<int64_t>(64, count - at); ++n) some[n] = from[(at + n) * step];
        words[at / 64] = pack64(some);
    }
}

// A set of indices for each batch item: those below a length, or those a row of booleans (B, L) marks.
class Subset {
  public:
    Subset() = default;

    // Nobody asks beyond `reach`.
    Subset(const Table& table, int64_t reach) : table_(table), by_length_(table.code != Table::boolean) {
        if (by_length_) return;
        size_ = std::min(reach, table.shape[1]);
        stride_ = words_for(size_);
        const int64_t batch = table.shape[0];
        packed_.resize(batch * stride_);
        for (int64_t b = 0; b < batch; ++b) {
            uint64_t* const row = packed_.data() + b * stride_;
            pack_strided(table.bytes(b * table.stride[0]), table.stride[1], size_, row);
            find_runs(row);
        }
    }

    // Whether the members of every item are one run of indices.
    bool one_run() const { return one_run_; }
    bool many() const { return table_.shape[0] > 1; }

    Span span(int64_t item) const {
        if (by_length_) return {-kFar, std::min(table_.at(table_.step(0, item)), kFar)};
        const auto [first, last] = runs(item);
        return first == last ? Span{0, 0} : *first;
    }

    bool contains(int64_t item, int64_t index) const {
        if (by_length_) return index < span(item).stop;
        return index >= 0 && index < size_ && (row(item)[index / 64] >> (index % 64) & 1);
    }

    void bits(int64_t item, int64_t start, int count, uint64_t* words) const {
        if (one_run_) return assign(span(item), start, count, words);
        copy_bits(row(item), size_, start, count, words);
    }

    // Members full, the others as `outside`.
    void profile(int64_t item, Kind outside, Profile& out) const {
        const Span only = by_length_ ? span(item) : Span{};
        auto [first, last] = by_length_ ? std::pair(&only, &only + 1) : runs(item);
        const auto ends_after = [](int64_t key, const Span& run) { return key < run.stop; };
        first = std::upper_bound(first, last, out.keys().start, ends_after);
        for (; first != last && first->start < out.keys().stop; ++first) {
            out.add(first->start, outside);
            out.add(first->stop, Kind::full);
        }
        out.rest(outside);
    }

    Kind kind(int64_t item, Span span) const {
        if (span.empty()) return Kind::empty;
        Profile found(span);
        profile(item, Kind::empty, found);
        return found.kind();
    }

    void sign(int64_t item, std::vector<int64_t>& out) const {
        if (!many()) return;
        if (!one_run_) return out.push_back(item);
        out.push_back(span(item).start);
        out.push_back(span(item).stop);
    }

  private:
    const uint64_t* row(int64_t item) const { return packed_.data() + (many() ? item * stride_ : 0); }

    std::pair<const Span*, const Span*> runs(int64_t item) const {
        const int64_t n = many() ? item : 0;
        return {runs_.data() + first_[n], runs_.data() + first_[n + 1]};
    }

    void find_runs(const uint64_t* row) {
        Profile found({0, std::max<int64_t>(size_, 1)});
        if (size_) found.add_words(0, row, row, static_cast<int>(size_));
        int64_t start = 0;
        for (const Segment& segment : found.segments()) {
            if (segment.kind == Kind::full) runs_.push_back({start, segment.stop});
            start = segment.stop;
        }
        one_run_ &= static_cast<int64_t>(runs_.size()) - first_.back() <= 1;
        first_.push_back(static_cast<int64_t>(runs_.size()));
    }

    Table table_;
    bool by_length_ = true, one_run_ = true;
    int64_t size_ = 0, stride_ = 0;
    std::vector<uint64_t> packed_;
    std::vector<Span> runs_;           // ascending, those of one item after those of another
    std::vector<int64_t> first_ = {0};  // item b has runs_[first_[b]], ..., runs_[first_[b + 1] - 1]
};

}  // namespace saccade::masks

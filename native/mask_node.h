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

    // Whether the keys of a row are always one interval, `seen`.
    bool interval = false;
    virtual Span seen(const Place&, int64_t) const { return kEverywhere; }

    // Covers the whole of profile.keys(), which is not empty; rows are not empty.
    virtual void profile(const Place& place, Span rows, Profile& profile) const = 0;

    // All words are written; count <= kChunk.
    virtual void bits(const Place& place, int64_t row, int64_t start, int count, uint64_t* words) const {
        clear(words, count);
        fill(seen(place, row), start, count, words);
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

    int64_t of(int64_t item) const {
        return many ? std::clamp(table.at(table.step(0, item)), -kFar, kFar) : value;
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
    explicit Subset(const Table& table) : table_(table), by_length_(table.code != Table::boolean) {
        if (by_length_) return;
        const int64_t batch = table.shape[0];
        for (int64_t b = 0; b < batch; ++b) runs_.push_back(run(b));
        for (const Span& span : runs_) one_run_ &= span.stop >= 0;
        if (one_run_) return;
        stride_ = words_for(size());
        packed_.resize(batch * stride_);
        for (int64_t b = 0; b < batch; ++b)
            pack_strided(table.bytes(b * table.stride[0]), table.stride[1], size(), packed_.data() + b * stride_);
    }

    // Whether the members of every item are one run of indices.
    bool one_run() const { return one_run_; }
    bool many() const { return table_.shape[0] > 1; }

    Span span(int64_t item) const {
        if (by_length_) return {-kFar, std::min(table_.at(table_.step(0, item)), kFar)};
        return runs_[many() ? item : 0];
    }

    bool contains(int64_t item, int64_t index) const {
        if (one_run_) {
            const Span members = span(item);
            return members.start <= index && index < members.stop;
        }
        return index >= 0 && index < size() && (row(item)[index / 64] >> (index % 64) & 1);
    }

    void bits(int64_t item, int64_t start, int count, uint64_t* words) const {
        if (!one_run_) return copy_bits(row(item), size(), start, count, words);
        clear(words, count);
        fill(span(item), start, count, words);
    }

    // Members full, the others as `outside`.
    void profile(int64_t item, Kind outside, Profile& out) const {
        if (one_run_) {
            out.add(span(item).start, outside);
            out.add(span(item).stop, Kind::full);
            return out.rest(outside);
        }
        const Span keys = out.keys();
        uint64_t every[kWords] = {}, some[kWords];
        std::fill(some, some + kWords, outside == Kind::empty ? 0 : ~uint64_t{0});
        for (int64_t at = keys.start; at < keys.stop; at += kChunk) {
            const int count = static_cast<int>(std::min<int64_t>(kChunk, keys.stop - at));
            bits(item, at, count, every);
            out.add_words(at, outside == Kind::empty ? every : some, every, count);
        }
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
    int64_t size() const { return table_.shape[1]; }
    const uint64_t* row(int64_t item) const { return packed_.data() + (many() ? item * stride_ : 0); }

    // The one run of members of item b; stop < 0 where there are several runs.
    Span run(int64_t b) const {
        const uint8_t* row = table_.bytes(b * table_.stride[0]);
        const int64_t step = table_.stride[1], length = size();
        auto find = [&](int64_t from, bool wanted) {
            while (from < length && (row[from * step] != 0) != wanted) ++from;
            return from;
        };
        const int64_t start = find(0, true), stop = find(start, false);
        if (start == length) return {0, 0};
        return find(stop, true) == length ? Span{start, stop} : Span{0, -1};
    }

    Table table_;
    bool by_length_ = true, one_run_ = true;
    std::vector<Span> runs_;
    std::vector<uint64_t> packed_;
    int64_t stride_ = 0;
};

}  // namespace saccade::masks

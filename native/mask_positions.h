// Masks that look only at where query and key stand, and padding.  p = row + offset; see saccade/operator/_masks/_relative.py.
#pragma once

#include "mask_node.h"

namespace saccade::masks {

// -left <= j - p <= right. Causal is the one with nothing to the right.
class Window final : public Node {
  public:
    Window(int64_t left, int64_t right) : left_(left), right_(right) { interval = true; }

    void seen(const Place& place, Span rows, Span* keys) const override {
        for (int64_t row = rows.start; row < rows.stop; ++row) *keys++ = near(place, row);
    }

    // The keys of one row.
    Span near(const Place& place, int64_t row) const {
        const int64_t p = row + place.offset;
        return {p - left_, p + right_ + 1};
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        const Span first = near(place, rows.start), last = near(place, rows.stop - 1), all = meet(first, last);
        out.add(first.start, Kind::empty);
        if (!all.empty()) {
            out.add(all.start, Kind::partial);
            out.add(all.stop, Kind::full);
        }
        out.add(last.stop, Kind::partial);
        out.rest(Kind::empty);
    }

    Span rows_of(const Place& place, Span keys) const override {
        return {keys.start - right_ - place.offset, keys.stop + left_ - place.offset};
    }

  private:
    int64_t left_, right_;
};

// j < length or j <= p.
class Prefix final : public Node {
  public:
    explicit Prefix(const Number& length) : length_(length) { interval = true; }

    void seen(const Place& place, Span rows, Span* keys) const override {
        const int64_t length = length_.of(place.item);
        for (int64_t row = rows.start; row < rows.stop; ++row)
            *keys++ = {-kFar, std::max(length, row + place.offset + 1)};
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        const int64_t length = length_.of(place.item);
        out.add(std::max(length, rows.start + place.offset + 1), Kind::full);
        out.add(std::max(length, rows.stop + place.offset), Kind::partial);
        out.rest(Kind::empty);
    }

    Span rows_of(const Place& place, Span keys) const override {
        if (keys.start < length_.of(place.item)) return kEverywhere;
        return {keys.start - place.offset, kFar};
    }

    void signature(int64_t item, int64_t, std::vector<int64_t>& out) const override { length_.sign(item, out); }

  private:
    Number length_;
};

// j <= p and (p - j <= stride or (p - j) % stride == 0).
class Strided final : public Node {
  public:
    Strided(int64_t stride, int64_t keys) : stride_(stride), near_(stride, 0), columns_(words_for(keys)), size_(keys) {
        for (int64_t key = 0; key < keys; key += stride) columns_[key / 64] |= uint64_t{1} << (key % 64);
    }

    void bits(const Place& place, const Bits& out) const override {
        for (int64_t row = out.rows.start; row < out.rows.stop; ++row) {
            const int64_t p = row + place.offset, phase = std::max<int64_t>(p, 0) % stride_;
            uint64_t* const words = out.row(row);
            copy_bits(columns_.data(), p < 0 ? 0 : size_, out.start - phase, out.count, words);
            keep({-kFar, p + 1}, out.start, out.count, words);
            fill(near_.near(place, row), out.start, out.count, words);
        }
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        const Span stand = moved(rows, place.offset);
        near_.profile(place, rows, out);
        Profile far(out.keys());
        if (stride_ == 1) {
            Window(kFar, 0).profile(place, rows, far);
        } else if (stand.stop - stand.start >= stride_) {
            far.add(stand.stop, Kind::partial);
        } else {
            const Kind kind = stand.stop - stand.start == 1 ? Kind::full : Kind::partial;
            // Columns lie at p - n * stride; start with the leftmost that reaches into the range.
            int64_t at = stand.start - floor_div(stand.stop - 1 - out.keys().start, stride_) * stride_;
            for (; at < std::min(stand.stop, out.keys().stop); at += stride_)
                far.only({at, at + stand.stop - stand.start}, kind);
        }
        far.rest(Kind::empty);
        combine(out, far, false);
    }

    Span rows_of(const Place& place, Span keys) const override { return {keys.start - place.offset, kFar}; }

  private:
    int64_t stride_;
    Window near_;
    std::vector<uint64_t> columns_;
    int64_t size_;
};

// j <= p and (j / stride == p / stride or j % stride >= stride - columns).
class Fixed final : public Node {
  public:
    Fixed(int64_t stride, int64_t columns, int64_t keys)
        : stride_(stride), columns_(columns), causal_(kFar, 0), summaries_(words_for(keys)), size_(keys) {
        for (int64_t end = stride; end - columns < keys; end += stride)
            fill({end - columns, end}, 0, keys, summaries_.data());
    }

    void bits(const Place& place, const Bits& out) const override {
        for (int64_t row = out.rows.start; row < out.rows.stop; ++row) {
            const int64_t p = row + place.offset;
            uint64_t* const words = out.row(row);
            copy_bits(summaries_.data(), size_, out.start, out.count, words);
            fill({floor_div(p, stride_) * stride_, p + 1}, out.start, out.count, words);
            keep({-kFar, p + 1}, out.start, out.count, words);
        }
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        const Span stand = moved(rows, place.offset), keys = out.keys();
        const int64_t first = floor_div(stand.start, stride_), last = floor_div(stand.stop - 1, stride_);
        out.only({first * stride_, (last + 1) * stride_}, first == last ? Kind::full : Kind::partial);
        out.rest(Kind::empty);
        Profile far(keys);
        for (int64_t block = keys.start / stride_; block * stride_ < std::min(keys.stop, stand.stop); ++block)
            far.only({(block + 1) * stride_ - columns_, (block + 1) * stride_}, Kind::full);
        far.rest(Kind::empty);
        combine(out, far, false);
        Profile before(keys);
        causal_.profile(place, rows, before);
        combine(out, before, true);
    }

    Span rows_of(const Place& place, Span keys) const override { return {keys.start - place.offset, kFar}; }

  private:
    int64_t stride_, columns_;
    Window causal_;
    std::vector<uint64_t> summaries_;
    int64_t size_;
};

// The keys, and if given the rows, that an item keeps. Rows and keys, not positions.
class Padding final : public Node {
  public:
    Padding(Subset keys, Subset rows, bool has_rows)
        : keys_(std::move(keys)), rows_(std::move(rows)), has_rows_(has_rows) {
        interval = keys_.one_run();
    }

    void seen(const Place& place, Span rows, Span* keys) const override {
        const Span kept = keys_.span(place.item);
        for (int64_t row = rows.start; row < rows.stop; ++row) *keys++ = keeps(place, row) ? kept : Span{0, 0};
    }

    void bits(const Place& place, const Bits& out) const override {
        uint64_t kept[kWords];
        keys_.bits(place.item, out.start, out.count, kept);
        for (int64_t row = out.rows.start; row < out.rows.stop; ++row) {
            if (keeps(place, row))
                std::copy(kept, kept + out.words_of_row(), out.row(row));
            else
                clear(out.row(row), out.count);
        }
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        if (given_ && place.core) return out.rest(Kind::full);
        const Kind kind = has_rows_ ? rows_.kind(place.item, rows) : Kind::full;
        if (kind == Kind::empty) return out.rest(Kind::empty);
        keys_.profile(place.item, Kind::empty, out);
        for (Segment& segment : out.segments()) segment.kind = std::min(segment.kind, kind);
    }

    Span rows_of(const Place& place, Span) const override {
        return has_rows_ && rows_.one_run() ? rows_.span(place.item) : kEverywhere;
    }

    void signature(int64_t item, int64_t, std::vector<int64_t>& out) const override {
        if (given_) return;
        keys_.sign(item, out);
        if (has_rows_) rows_.sign(item, out);
    }

    bool give_cut() override {
        return given_ = keys_.one_run() && (!has_rows_ || rows_.one_run());
    }

    void cut(int64_t item, Cut& cut) const override {
        cut.keys = meet(cut.keys, keys_.span(item));
        if (has_rows_) cut.rows = meet(cut.rows, rows_.span(item));
    }

  private:
    bool keeps(const Place& place, int64_t row) const { return !has_rows_ || rows_.contains(place.item, row); }

    Subset keys_, rows_;
    bool has_rows_, given_ = false;
};

}  // namespace saccade::masks

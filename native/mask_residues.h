// Masks of remainders.  p = row + offset; see saccade/operator/_masks/_residues.py.
#pragma once

#include "mask_node.h"

namespace saccade::masks {

// (j - p) % step == 0.
class Dilated final : public Node {
  public:
    Dilated(int64_t step, int64_t keys) : step_(step), size_(keys + 1), multiples_(words_for(size_)) {
        for (int64_t key = 0; key < size_; key += step) multiples_[key / 64] |= uint64_t{1} << (key % 64);
    }

    void bits(const Place& place, const Bits& out) const override {
        const int64_t first = out.rows.start + place.offset;
        int64_t phase = first - floor_div(first, step_) * step_;
        for (int64_t row = out.rows.start; row < out.rows.stop; ++row) {
            copy_bits(multiples_.data(), size_, out.start - phase, out.count, out.row(row));
            if (++phase == step_) phase = 0;
        }
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        const Span stand = moved(rows, place.offset);
        const int64_t count = stand.stop - stand.start;
        if (count >= step_) return out.rest(step_ == 1 ? Kind::full : Kind::partial);
        const Kind kind = count == 1 ? Kind::full : Kind::partial;
        // Columns lie at p + n * step; start with the leftmost that reaches into the range.
        int64_t at = stand.start - floor_div(stand.stop - 1 - out.keys().start, step_) * step_;
        for (; at < out.keys().stop; at += step_) out.only({at, at + count}, kind);
        out.rest(Kind::empty);
    }

  private:
    int64_t step_, size_;
    std::vector<uint64_t> multiples_;
};

// -left <= j / size - p / size <= right.
class Chunks final : public Node {
  public:
    // So many chunks reach everything; products of more would not fit.
    Chunks(int64_t size, int64_t left, int64_t right)
        : size_(size), left_(std::min(left, kFar / size)), right_(std::min(right, kFar / size)) {
        interval = true;
    }

    void seen(const Place& place, Span rows, Span* keys) const override {
        for (int64_t row = rows.start; row < rows.stop; ++row) {
            const int64_t own = floor_div(row + place.offset, size_);
            *keys++ = {(own - left_) * size_, (own + right_ + 1) * size_};
        }
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        const int64_t first = floor_div(rows.start + place.offset, size_);
        const int64_t last = floor_div(rows.stop - 1 + place.offset, size_);
        out.add((first - left_) * size_, Kind::empty);
        if (last - left_ <= first + right_) {
            out.add((last - left_) * size_, Kind::partial);
            out.add((first + right_ + 1) * size_, Kind::full);
        }
        out.add((last + right_ + 1) * size_, Kind::partial);
        out.rest(Kind::empty);
    }

    Span rows_of(const Place& place, Span keys) const override {
        const int64_t first = floor_div(keys.start, size_) - right_, last = floor_div(keys.stop - 1, size_) + left_;
        return moved({first * size_, (last + 1) * size_}, -place.offset);
    }

  private:
    int64_t size_, left_, right_;
};

// j % stride >= stride - columns.
class Columns final : public Node {
  public:
    Columns(int64_t stride, int64_t columns, int64_t keys)
        : stride_(stride), columns_(columns), size_(keys), kept_(words_for(keys)) {
        for (int64_t end = stride; end - columns < keys; end += stride) fill({end - columns, end}, 0, keys, kept_.data());
    }

    void bits(const Place&, const Bits& out) const override {
        for (int64_t row = out.rows.start; row < out.rows.stop; ++row)
            copy_bits(kept_.data(), size_, out.start, out.count, out.row(row));
    }

    void profile(const Place&, Span, Profile& out) const override {
        const Span keys = out.keys();
        for (int64_t end = (keys.start / stride_ + 1) * stride_; end - columns_ < keys.stop; end += stride_)
            out.only({end - columns_, end}, Kind::full);
        out.rest(Kind::empty);
    }

  private:
    int64_t stride_, columns_, size_;
    std::vector<uint64_t> kept_;
};

}  // namespace saccade::masks

// Masks made of masks: and, or, not, one per head, and `.at` and `.slice`.
#pragma once

#include "mask_node.h"

namespace saccade::masks {

// And: the lesser of the parts' kinds. Or: the greater.
class Several final : public Node {
  public:
    Several(std::vector<Part> parts, bool all) : parts_(std::move(parts)), all_(all) {
        // Cheap parts come first: the others are only asked where these leave the question open.
        std::stable_partition(parts_.begin(), parts_.end(), [](const Part& part) { return part->interval; });
        while (intervals_ < parts_.size() && parts_[intervals_]->interval) ++intervals_;
        interval = all && intervals_ == parts_.size();
    }

    void seen(const Place& place, Span rows, Span* keys) const override {
        parts_[0]->seen(place, rows, keys);
        Span other[kRows];
        for (size_t part = 1; part < intervals_; ++part) {
            parts_[part]->seen(place, rows, other);
            for (int64_t n = 0; n < rows.stop - rows.start; ++n) keys[n] = meet(keys[n], other[n]);
        }
    }

    void bits(const Place& place, const Bits& out) const override {
        size_t part = 1;
        if (all_ && intervals_) {
            Node::bits(place, out);
            part = intervals_;
        } else {
            parts_[0]->bits(place, out);
        }
        uint64_t words[kRows * kWords];
        const Bits other{out.rows, out.start, out.count, words, out.words_of_row()};
        for (; part < parts_.size(); ++part) {
            parts_[part]->bits(place, other);
            for (int64_t row = out.rows.start; row < out.rows.stop; ++row) {
                uint64_t* const mine = out.row(row);
                const uint64_t* const theirs = other.row(row);
                for (int n = 0; n < out.words_of_row(); ++n) mine[n] = all_ ? mine[n] & theirs[n] : mine[n] | theirs[n];
            }
        }
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        const Kind decided = all_ ? Kind::empty : Kind::full;
        parts_[0]->profile(place, rows, out);
        for (size_t n = 1; n < parts_.size(); ++n) {
            const Span open = out.beyond(decided);
            if (open.empty()) return;
            Profile other(open);
            parts_[n]->profile(place, rows, other);
            combine(out, other, all_);
        }
    }

    Span rows_of(const Place& place, Span keys) const override {
        Span rows = parts_[0]->rows_of(place, keys);
        for (size_t n = 1; n < parts_.size(); ++n) {
            const Span other = parts_[n]->rows_of(place, keys);
            rows = all_ ? meet(rows, other) : hull(rows, other);
        }
        return rows;
    }

    void signature(int64_t item, int64_t head, std::vector<int64_t>& out) const override {
        for (const Part& part : parts_) part->signature(item, head, out);
    }

    bool give_cut() override {
        if (!all_) return false;
        for (const Part& part : parts_)
            if (part->give_cut()) givers_.push_back(part.get());
        return !givers_.empty();
    }

    void cut(int64_t item, Cut& cut) const override {
        for (const Node* part : givers_) part->cut(item, cut);
    }

  private:
    std::vector<Part> parts_;
    std::vector<const Node*> givers_;
    size_t intervals_ = 0;
    bool all_;
};

class Not final : public Node {
  public:
    explicit Not(Part part) : part_(std::move(part)) {}

    void bits(const Place& place, const Bits& out) const override {
        part_->bits(place, out);
        for (int64_t row = out.rows.start; row < out.rows.stop; ++row) invert(out.count, out.row(row));
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        part_->profile(place, rows, out);
        for (Segment& segment : out.segments())
            if (segment.kind != Kind::partial) segment.kind = segment.kind == Kind::full ? Kind::empty : Kind::full;
    }

    void signature(int64_t item, int64_t head, std::vector<int64_t>& out) const override {
        part_->signature(item, head, out);
    }

  private:
    Part part_;
};

class PerHead final : public Node {
  public:
    PerHead(std::vector<Part> parts, std::vector<int64_t> which) : parts_(std::move(parts)), which_(std::move(which)) {
        interval = std::all_of(parts_.begin(), parts_.end(), [](const Part& part) { return part->interval; });
    }

    void seen(const Place& place, Span rows, Span* keys) const override { of(place.head).seen(place, rows, keys); }
    void bits(const Place& place, const Bits& out) const override { of(place.head).bits(place, out); }

    void profile(const Place& place, Span rows, Profile& out) const override {
        of(place.head).profile(place, rows, out);
    }

    Span rows_of(const Place& place, Span keys) const override { return of(place.head).rows_of(place, keys); }

    void signature(int64_t item, int64_t head, std::vector<int64_t>& out) const override {
        out.push_back(place_of(head));
        of(head).signature(item, head, out);
    }

  private:
    // One mask stands for all heads.
    int64_t place_of(int64_t head) const { return which_[which_.size() > 1 ? head : 0]; }
    const Node& of(int64_t head) const { return *parts_[place_of(head)]; }

    std::vector<Part> parts_;
    std::vector<int64_t> which_;
};

// Row 0 stands at `offset`.
class At final : public Node {
  public:
    At(Part part, const Number& offset) : part_(std::move(part)), offset_(offset) { interval = part_->interval; }

    void seen(const Place& place, Span rows, Span* keys) const override { part_->seen(standing(place), rows, keys); }
    void bits(const Place& place, const Bits& out) const override { part_->bits(standing(place), out); }

    void profile(const Place& place, Span rows, Profile& out) const override {
        part_->profile(standing(place), rows, out);
    }

    Span rows_of(const Place& place, Span keys) const override { return part_->rows_of(standing(place), keys); }

    void signature(int64_t item, int64_t head, std::vector<int64_t>& out) const override {
        offset_.sign(item, out);
        part_->signature(item, head, out);
    }

    bool give_cut() override { return part_->give_cut(); }
    void cut(int64_t item, Cut& cut) const override { part_->cut(item, cut); }

  private:
    Place standing(Place place) const {
        place.offset = offset_.of(place.item);
        return place;
    }

    Part part_;
    Number offset_;
};

// Row 0 and key 0 are `row` and `key` of a larger problem, in which row 0 stands at `offset`.
class Slice final : public Node {
  public:
    Slice(Part part, int64_t row, int64_t key, int64_t offset)
        : part_(std::move(part)), row_(row), key_(key), offset_(offset) {
        interval = part_->interval;
    }

    void seen(const Place& place, Span rows, Span* keys) const override {
        part_->seen(standing(place), moved(rows, row_), keys);
        for (int64_t row = rows.start; row < rows.stop; ++row, ++keys) *keys = moved(*keys, -key_);
    }

    void bits(const Place& place, const Bits& out) const override {
        part_->bits(standing(place), {moved(out.rows, row_), out.start + key_, out.count, out.words, out.stride});
    }

    void profile(const Place& place, Span rows, Profile& out) const override {
        Profile whole(moved(out.keys(), key_));
        part_->profile(standing(place), moved(rows, row_), whole);
        for (const Segment& segment : whole.segments()) out.add(segment.stop - key_, segment.kind);
    }

    Span rows_of(const Place& place, Span keys) const override {
        return moved(part_->rows_of(standing(place), moved(keys, key_)), -row_);
    }

    void signature(int64_t item, int64_t head, std::vector<int64_t>& out) const override {
        part_->signature(item, head, out);
    }

    bool give_cut() override { return part_->give_cut(); }

    void cut(int64_t item, Cut& cut) const override {
        Cut whole;
        part_->cut(item, whole);
        cut.rows = meet(cut.rows, moved(whole.rows, -row_));
        cut.keys = meet(cut.keys, moved(whole.keys, -key_));
    }

  private:
    Place standing(Place place) const {
        place.offset = offset_;
        return place;
    }

    Part part_;
    int64_t row_, key_, offset_;
};

}  // namespace saccade::masks

// The work list: for each block of rows the runs of key blocks to visit, and the transpose.
#pragma once

#include <atomic>
#include <map>

#include "mask_node.h"

namespace saccade::masks {

// Lines of pieces one after another; line n is pieces[starts[n]], ..., pieces[starts[n + 1] - 1].
struct Lines {
    std::vector<int64_t> starts{0};
    std::vector<Piece> pieces;

    int64_t count() const { return static_cast<int64_t>(starts.size()) - 1; }
    void end_line() { starts.push_back(static_cast<int64_t>(pieces.size())); }
};

// Adds to the current line, joining what follows on without a gap.
inline void put(std::vector<Piece>& pieces, size_t line, int64_t first, int64_t last, bool full) {
    if (pieces.size() > line && pieces.back().last == first && pieces.back().full == full)
        pieces.back().last = static_cast<int32_t>(last);
    else
        pieces.push_back({static_cast<int32_t>(first), static_cast<int32_t>(last), full});
}

// The segments as blocks of `grain` keys: a block that two segments share is partial.
inline void put_blocks(const Profile& profile, int64_t grain, Lines& lines) {
    const size_t line = lines.pieces.size();
    int64_t next = 0;
    for (const Segment& segment : profile.segments()) {
        const bool last = segment.stop == profile.keys().stop;
        const int64_t stop = last ? ceil_div(segment.stop, grain) : segment.stop / grain;
        if (stop > next) {
            if (segment.kind != Kind::empty) put(lines.pieces, line, next, stop, segment.kind == Kind::full);
            next = stop;
        }
        if (!last && segment.stop % grain && next == segment.stop / grain) {
            put(lines.pieces, line, next, next + 1, false);
            ++next;
        }
    }
    lines.end_line();
}

// Line n of the transpose says which lines have block n. Only what changes from one line to the next is looked at.
class Transposed {
  public:
    explicit Transposed(const Lines& lines, int64_t blocks) : since_(blocks, 0), kind_(blocks, Kind::empty) {
        const Piece* before = nullptr;
        const Piece* before_end = nullptr;
        for (int64_t line = 0; line < lines.count(); ++line) {
            const Piece* now = lines.pieces.data() + lines.starts[line];
            const Piece* now_end = lines.pieces.data() + lines.starts[line + 1];
            differ(before, before_end, now, now_end, line);
            before = now, before_end = now_end;
        }
        differ(before, before_end, nullptr, nullptr, lines.count());
    }

    Lines lines() const {
        Lines lines;
        lines.starts.assign(since_.size() + 1, 0);
        for (const Closed& run : closed_) ++lines.starts[run.block + 1];
        for (size_t n = 1; n < lines.starts.size(); ++n) lines.starts[n] += lines.starts[n - 1];
        lines.pieces.resize(closed_.size());
        std::vector<int64_t> next(lines.starts.begin(), lines.starts.end() - 1);
        for (const Closed& run : closed_) lines.pieces[next[run.block]++] = run.piece;
        return lines;
    }

  private:
    struct Closed {
        int32_t block;
        Piece piece;
    };

    // Walks two lines side by side; at == first of the next piece or inside of it.
    void differ(const Piece* a, const Piece* a_end, const Piece* b, const Piece* b_end, int64_t line) {
        int64_t at = 0;
        const int64_t blocks = static_cast<int64_t>(since_.size());
        while (at < blocks && (a != a_end || b != b_end)) {
            const auto [a_kind, a_stop] = here(a, a_end, at, blocks);
            const auto [b_kind, b_stop] = here(b, b_end, at, blocks);
            const int64_t stop = std::min(a_stop, b_stop);
            if (a_kind != b_kind)
                for (int64_t block = at; block < stop; ++block) change(block, line, b_kind);
            at = stop;
            if (a != a_end && a->last <= at) ++a;
            if (b != b_end && b->last <= at) ++b;
        }
    }

    static std::pair<Kind, int64_t> here(const Piece* piece, const Piece* end, int64_t at, int64_t blocks) {
        if (piece == end) return {Kind::empty, blocks};
        if (at < piece->first) return {Kind::empty, piece->first};
        return {piece->full ? Kind::full : Kind::partial, piece->last};
    }

    void change(int64_t block, int64_t line, Kind kind) {
        if (kind_[block] != Kind::empty) {
            const Piece run{since_[block], static_cast<int32_t>(line), kind_[block] == Kind::full};
            closed_.push_back({static_cast<int32_t>(block), run});
        }
        since_[block] = static_cast<int32_t>(line);
        kind_[block] = kind;
    }

    std::vector<int32_t> since_;
    std::vector<Kind> kind_;
    std::vector<Closed> closed_;
};

// Those of `line` within `kept`; a block that `kept` cuts, or every block if the others' side is cut, is partial.
inline void cut_pieces(const Lines& lines, int64_t line, Span kept, int64_t length, int64_t grain, bool all_cut,
                       std::vector<Piece>& pieces) {
    pieces.clear();
    kept = meet(kept, {0, length});
    if (kept.empty()) return;
    const int64_t first = kept.start / grain, last = ceil_div(kept.stop, grain);
    // Blocks [whole_first, whole_last) are not cut.
    const int64_t whole_first = ceil_div(kept.start, grain);
    const int64_t whole_last = kept.stop == length ? last : kept.stop / grain;
    const Piece* piece = lines.pieces.data() + lines.starts[line];
    const Piece* const end = lines.pieces.data() + lines.starts[line + 1];
    piece = std::upper_bound(piece, end, first, [](int64_t block, const Piece& p) { return block < p.last; });
    for (; piece != end && piece->first < last; ++piece) {
        const int64_t from = std::max<int64_t>(piece->first, first), to = std::min<int64_t>(piece->last, last);
        const int64_t middle = std::max(from, std::min(to, whole_first));
        const int64_t final = std::max(middle, std::min(to, whole_last));
        const bool full = piece->full && !all_cut;
        if (from < middle) put(pieces, 0, from, middle, false);
        if (middle < final) put(pieces, 0, middle, final, full);
        if (final < to) put(pieces, 0, final, to, false);
    }
}

// A value made on first use by whoever comes first. No lock: a fork in the middle leaves nothing held. Two threads that
// come at once both make it, and one of the two results is dropped.
template <class T> class Once {
  public:
    Once() = default;
    Once(const Once&) = delete;
    ~Once() { delete value_.load(std::memory_order_relaxed); }

    template <class Make> const T& get(Make&& make) {
        if (const T* there = value_.load(std::memory_order_acquire)) return *there;
        auto made = std::make_unique<const T>(make());
        const T* none = nullptr;
        if (value_.compare_exchange_strong(none, made.get(), std::memory_order_acq_rel)) return *made.release();
        return *none;
    }

  private:
    std::atomic<const T*> value_{nullptr};
};

}  // namespace saccade::masks

// Masks as the kernels see them: a small program over positions, evaluated tile by tile and row by row.
//
// Built in Python from a saccade mask (ints and tables), so that a compiled graph can carry it. No Lq x Lk memory.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace saccade {

struct Span {
    int64_t start, stop;  // half open
    bool empty() const { return start >= stop; }
};

enum class Kind : int { empty = 0, partial = 1, full = 2 };

class Mask {
  public:
    virtual ~Mask() = default;
    int64_t batch = 1, heads = 1;          // 1: the same for every item, for every query head
    int64_t length_q = -1, length_k = -1;  // of the problem it was made for, the only one it may be asked about

    // What is certain of a rectangle for item b and query head h; partial where not known.
    virtual Kind kind(int64_t b, int64_t h, Span rows, Span keys) const = 0;
    // A range of keys outside of which none of these rows sees anything, and of rows outside of which nobody sees these keys.
    virtual Span keys_of(int64_t b, int64_t h, Span rows) const = 0;
    virtual Span rows_of(int64_t b, int64_t h, Span keys) const = 0;
    // Bit n of words[n / 64] says whether `row` sees key `start + n`; all bits of the last word beyond `count` are 0.
    virtual void row_bits(int64_t b, int64_t h, int64_t row, int64_t start, int count, uint64_t* words) const = 0;
    // The same for several rows at once, which is several times cheaper: the words of row r start at
    // words + (r - rows.start) * stride.
    virtual void block_bits(int64_t b, int64_t h, Span rows, int64_t start, int count, uint64_t* words,
                            int64_t stride) const {
        for (int64_t row = rows.start; row < rows.stop; ++row, words += stride) row_bits(b, h, row, start, count, words);
    }
};

// A run of blocks [first, last) of `grain` keys (or rows) each, all of one kind: full or partial.
struct Piece {
    int32_t first, last;
    bool full;
};

// Which blocks of keys a block of rows has to visit, and the transpose. Built once per mask, lengths and grains and
// kept by the mask; heads and items that share a mask share it. Per-item lengths are a clip on top and are not built in.
class WorkList {
  public:
    // Pieces for rows [rows.start, rows.stop) of item b and head h, in ascending order, empty blocks left out.
    // `rows` must be one block of the grain the list was built for. Replaces the contents of `pieces`.
    virtual ~WorkList() = default;
    virtual void keys_of(int64_t b, int64_t h, Span rows, std::vector<Piece>& pieces) const = 0;
    virtual void rows_of(int64_t b, int64_t h, Span keys, std::vector<Piece>& pieces) const = 0;
};

// The list of `mask` for these lengths with blocks of `row_grain` rows by `key_grain` keys; null mask: everything is full.
// Safe to call from several threads; the same arguments give the same object again while the mask lives.
std::shared_ptr<const WorkList> work_list(const Mask* mask, int64_t length_q, int64_t length_k, int row_grain, int key_grain);

}  // namespace saccade

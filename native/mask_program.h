// A mask as numbers and tables: what the classes of `saccade/operator/_masks` write and `read_mask` makes an expression of.
#pragma once

#include <functional>
#include <vector>

#include "mask_node.h"

namespace saccade::masks {

// A part is its operation and that operation's numbers, then its parts. T stands for the index of a table, -1 for none;
// N for a number: 0 and the number, or 1 and the index of a table with one for each item.
enum class Operation : int64_t {
    window = 0,     // left, right
    padding = 1,    // T keys, T rows or -1
    documents = 2,  // T query ids, T key ids or -1
    prefix = 3,     // N length
    global = 4,     // T tokens, booleans (L,) or (B, L)
    strided = 5,    // stride
    fixed = 6,      // stride, columns
    blocks = 7,     // T layout, size
    random = 8,     // start of the generator, size, count, symmetric
    edges = 9,      // T starts, T keys
    tensor = 10,    // T booleans (B or 1, H or 1, Lq or 1, Lk or 1)
    tiles = 11,     // T which, T tiles, first row, last row + 1, first key, last key + 1
    at = 12,        // N offset; a part
    slice = 13,     // first row, first key, rows and keys of the whole problem, whether it is fixed; a part
    all = 14,       // how many; parts
    any = 15,       // how many; parts
    invert = 16,    // a part
    heads = 17,     // how many parts, how many heads, which part for each; parts
    dilated = 18,   // step
    chunks = 19,    // size, left, right
    columns = 20,   // stride, columns
};

// The tables must stay where they are while the mask lives.
// Throws std::invalid_argument where the program is not one, or a table has another dtype or number of axes, and
// whatever `pause` throws, which is called now and then where there is much to do.
std::unique_ptr<Mask> read_mask(const std::vector<int64_t>& program, const std::vector<Table>& tables, int64_t length_q,
                                int64_t length_k, const std::function<void()>& pause = [] {});

// How many different lists the mask's items and heads have between them, what is applied as a clip left out.
int64_t distinct_lists(const Mask& mask, int row_grain, int key_grain);

}  // namespace saccade::masks

// Masks for Python: made from a program and tables, and open to tests.
#include <nanobind/nanobind.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include "mask.h"
#include "mask_bindings.h"
#include "mask_program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace saccade {
namespace {

using masks::Table;

// (address, shape, strides, code) of a tensor.
Table table_of(nb::handle given) {
    Table table;
    table.data = reinterpret_cast<const void*>(nb::cast<uintptr_t>(given[0]));
    const nb::tuple shape = nb::cast<nb::tuple>(given[1]), stride = nb::cast<nb::tuple>(given[2]);
    if (shape.size() > 4 || shape.size() != stride.size()) throw std::invalid_argument("a table has at most four axes");
    table.axes = static_cast<int>(shape.size());
    for (int axis = 0; axis < table.axes; ++axis) {
        table.shape[axis] = nb::cast<int64_t>(shape[axis]);
        table.stride[axis] = nb::cast<int64_t>(stride[axis]);
    }
    const int code = nb::cast<int>(given[3]);
    if (code < Table::boolean || code > Table::int64) throw std::invalid_argument("a table is of no known dtype");
    table.code = static_cast<Table::Code>(code);
    return table;
}

std::unique_ptr<Mask> made(const std::vector<int64_t>& program, nb::list tables, nb::handle, int64_t length_q,
                           int64_t length_k) {
    std::vector<Table> read;
    for (nb::handle table : tables) read.push_back(table_of(table));
    const auto pause = [] {
        if (PyErr_CheckSignals()) throw nb::python_error();
    };
    return masks::read_mask(program, read, length_q, length_k, pause);
}

using Range = std::tuple<int64_t, int64_t>;
using Run = std::tuple<int, int, bool>;

Span span(Range range) { return {std::get<0>(range), std::get<1>(range)}; }
Range range(Span span) { return {span.start, span.stop}; }

std::vector<Run> runs(const std::vector<Piece>& pieces) {
    std::vector<Run> runs;
    for (const Piece& piece : pieces) runs.emplace_back(piece.first, piece.last, piece.full);
    return runs;
}

// Has the list built, of every item and head and in both directions, as calls from several threads at once would.
void prepare(const Mask& mask, int row_grain, int key_grain) {
    const auto list = work_list(&mask, mask.length_q, mask.length_k, row_grain, key_grain);
    std::vector<Piece> pieces;
    for (int64_t b = 0; b < mask.batch; ++b)
        for (int64_t h = 0; h < mask.heads; ++h) {
            list->keys_of(b, h, {0, row_grain}, pieces);
            list->rows_of(b, h, {0, key_grain}, pieces);
        }
}

std::vector<uint64_t> row_bits(const Mask& mask, int64_t b, int64_t h, int64_t row, int64_t start, int count) {
    std::vector<uint64_t> words((count + 63) / 64, ~uint64_t{0});
    mask.row_bits(b, h, row, start, count, words.data());
    return words;
}

// Each row's words, and one more that stays as it was.
std::vector<uint64_t> block_bits(const Mask& mask, int64_t b, int64_t h, Range rows, int64_t start, int count) {
    const int64_t stride = (count + 63) / 64 + 1, number = std::max<int64_t>(span(rows).stop - span(rows).start, 0);
    std::vector<uint64_t> words(number * stride, ~uint64_t{0});
    mask.block_bits(b, h, span(rows), start, count, words.data(), stride);
    return words;
}

std::vector<Run> pieces(const Mask* mask, Range lengths, Range grains, Range place, Range block, bool transposed) {
    const auto [row_grain, key_grain] = grains;
    const auto list = work_list(mask, std::get<0>(lengths), std::get<1>(lengths), static_cast<int>(row_grain),
                                static_cast<int>(key_grain));
    std::vector<Piece> found;
    const auto [b, h] = place;
    if (transposed)
        list->rows_of(b, h, span(block), found);
    else
        list->keys_of(b, h, span(block), found);
    return runs(found);
}

}  // namespace

void bind_mask(nb::module_& module) {
    nb::set_leak_warnings(false);  // masks that live until the interpreter ends keep theirs, and that is no fault
    nb::class_<Mask>(module, "Mask", "A mask for the kernels and for two lengths; see saccade/operator/_backends/native/_lowering.py.")
        .def(nb::new_(&made), "program"_a, "tables"_a, "kept"_a, "length_q"_a, "length_k"_a, nb::keep_alive<0, 4>())
        .def_ro("batch", &Mask::batch)
        .def_ro("heads", &Mask::heads)
        .def_ro("length_q", &Mask::length_q)
        .def_ro("length_k", &Mask::length_k)
        .def("kind", [](const Mask& mask, int64_t b, int64_t h, Range rows, Range keys) {
            return static_cast<int>(mask.kind(b, h, span(rows), span(keys)));
        })
        .def("keys_of", [](const Mask& mask, int64_t b, int64_t h, Range rows) {
            return range(mask.keys_of(b, h, span(rows)));
        })
        .def("rows_of", [](const Mask& mask, int64_t b, int64_t h, Range keys) {
            return range(mask.rows_of(b, h, span(keys)));
        })
        .def("row_bits", &row_bits)
        .def("block_bits", &block_bits)
        .def("distinct_lists", &masks::distinct_lists, "row_grain"_a, "key_grain"_a)
        .def("prepare", &prepare, "row_grain"_a, "key_grain"_a, nb::call_guard<nb::gil_scoped_release>());
    module.def("pieces", &pieces, "mask"_a.none(), "lengths"_a, "grains"_a, "place"_a, "block"_a, "transposed"_a);
}

}  // namespace saccade

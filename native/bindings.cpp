// The Python module `saccade._native`: plain integers in, native/call.h's structures out, the GIL released while computing.
//
// Shape legend: B batch, Hq / Hkv query and key-value heads, Lq / Lk lengths, D and Dv widths. The module knows nothing
// of PyTorch. Memory comes as the addresses of tensors that the caller keeps alive; a tensor is (address, strides of its 4
// axes in elements), its last axis contiguous. Checks are cheap and repeat what Python has checked: a mistake there shall
// raise ValueError and not read foreign memory. (Tuples of integers cost a third of what DLPack does.)
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "call.h"
#include "digest.h"
#include "dispatch.h"
#include "mask.h"
#include "mask_bindings.h"
#include "score_program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace saccade {
namespace {

[[noreturn]] void refuse(const std::string& what) { throw nb::value_error(("saccade._native: " + what).c_str()); }

int64_t whole(PyObject* number, const char* name) {
    const int64_t value = PyLong_AsLongLong(number);
    if (value == -1 && PyErr_Occurred()) {
        PyErr_Clear();
        refuse(std::string(name) + " must hold integers of 64 bits");
    }
    return value;
}

// The integers of a tuple (a torch.Size is one): nanobind's own conversion of each as an argument costs more.
template <int count> struct Whole {
    int64_t at[count];
    Whole(nb::handle tuple, const char* name) {
        if (!PyTuple_Check(tuple.ptr()) || PyTuple_Size(tuple.ptr()) != count)
            refuse(std::string(name) + " must be a tuple of " + std::to_string(count) + " integers");
        for (int n = 0; n < count; ++n) at[n] = whole(PyTuple_GetItem(tuple.ptr(), n), name);
    }
};

// A tensor of this shape from (address, strides).
template <class Memory> Memory memory(nb::handle given, const int64_t (&shape)[4], const char* name) {
    if (!PyTuple_Check(given.ptr()) || PyTuple_Size(given.ptr()) != 2)
        refuse(std::string(name) + " must be (address, strides)");
    const auto address = static_cast<uintptr_t>(whole(PyTuple_GetItem(given.ptr(), 0), name));
    const Whole<4> stride(PyTuple_GetItem(given.ptr(), 1), name);
    const bool nothing = !(shape[0] && shape[1] && shape[2] && shape[3]);
    if (!address && !nothing) refuse(std::string(name) + " has no memory");
    if (!nothing && shape[3] > 1 && stride.at[3] != 1) refuse(std::string(name) + " must have a last stride of 1");
    Memory filled;
    filled.data = reinterpret_cast<decltype(filled.data)>(address);
    filled.batch = stride.at[0], filled.head = stride.at[1], filled.row = stride.at[2];
    return filled;
}

Type type_of(int64_t code) {
    if (code < 0 || code > 2) refuse("no such type");
    return static_cast<Type>(code);
}

void set_program(Problem& problem, const nb::tuple& fields, std::vector<Bias::Table>& tables) {
    Bias& bias = problem.bias;
    bias.form = Bias::program;
    bias.code = nb::cast<const ScoreProgram*>(fields[1]);
    for (nb::handle given : nb::cast<nb::tuple>(fields[2])) {
        const Whole<3> table(given, "a table of a score program");
        const auto type = static_cast<Bias::Table::Type>(table.at[1]);
        if (tables.size() == bias.code->tables.size() || type != bias.code->tables[tables.size()]) refuse("the score program has other tables");
        if (table.at[2] < 1 || table.at[2] > INT32_MAX || !table.at[0]) refuse("a table of a score program has no memory, or too much");
        tables.push_back({type, reinterpret_cast<const void*>(static_cast<uintptr_t>(table.at[0])), table.at[2]});
    }
    if (tables.size() != bias.code->tables.size()) refuse("the score program has other tables");
    bias.tables = tables.data();
    bias.key_origin = whole(fields[3].ptr(), "bias"), bias.placement = whole(fields[4].ptr(), "bias");
    bias.placements = reinterpret_cast<const int64_t*>(static_cast<uintptr_t>(whole(fields[5].ptr(), "bias")));
    if (bias.placements && whole(fields[6].ptr(), "bias") != problem.batch) refuse("one placement for each item");
}

// None; (1, address, type, strides (4,)) of a tensor; (2, address of lines (Hq, n), n, least, placement, placements, how
// many), where placements is the address of int64 (B,), or 0 and `placement` holds for every item; (3, program, tables
// (address, type, size), key origin, placement, placements, how many).
void set_bias(Problem& problem, nb::handle given, std::vector<Bias::Table>& tables) {
    if (given.is_none()) return;
    Bias& bias = problem.bias;
    const nb::tuple fields = nb::cast<nb::tuple>(given);
    const int64_t form = whole(fields[0].ptr(), "bias");
    if (form == Bias::program && fields.size() == 7) return set_program(problem, fields, tables);
    const auto address = static_cast<uintptr_t>(whole(fields[1].ptr(), "bias"));
    const bool nothing = !(problem.batch && problem.length_q && problem.length_k);
    if (!address && !nothing) refuse("bias has no memory");
    if (form == Bias::tensor && fields.size() == 4) {
        const Whole<4> stride(fields[3], "bias strides");
        bias.form = Bias::tensor;
        bias.data = reinterpret_cast<const void*>(address);
        bias.type = type_of(whole(fields[2].ptr(), "bias"));
        bias.batch = stride.at[0], bias.head = stride.at[1], bias.row = stride.at[2], bias.key = stride.at[3];
    } else if (form == Bias::line && fields.size() == 7) {
        bias.form = Bias::line;
        bias.lines = reinterpret_cast<const float*>(address);
        bias.line_length = whole(fields[2].ptr(), "bias"), bias.least = whole(fields[3].ptr(), "bias");
        bias.placement = whole(fields[4].ptr(), "bias");
        bias.placements = reinterpret_cast<const int64_t*>(static_cast<uintptr_t>(whole(fields[5].ptr(), "bias")));
        if (bias.placements && whole(fields[6].ptr(), "bias") != problem.batch) refuse("one placement for each item");
        if (nothing) return;
        for (int64_t b = 0; b < (bias.placements ? problem.batch : 1); ++b) {
            const int64_t nearest = -(problem.length_q - 1) - bias.placed(b), furthest = problem.length_k - 1 - bias.placed(b);
            if (nearest < bias.least || furthest >= bias.least + bias.line_length)
                refuse("the line of the bias does not hold every distance of item " + std::to_string(b));
        }
    } else {
        refuse("no such form of a bias");
    }
}

// None, or (threshold, low and high half of the seed, factor, row of row 0, key of key 0, head of head 0).
void set_dropout(Problem& problem, nb::handle given) {
    if (given.is_none()) return;
    const nb::tuple fields = nb::cast<nb::tuple>(given);
    if (fields.size() != 7) refuse("dropout must be a tuple of 7 numbers");
    Dropout& dropout = problem.dropout;
    dropout.on = true;
    dropout.threshold = static_cast<uint32_t>(whole(fields[0].ptr(), "dropout"));
    dropout.low = static_cast<uint32_t>(whole(fields[1].ptr(), "dropout"));
    dropout.high = static_cast<uint32_t>(whole(fields[2].ptr(), "dropout"));
    dropout.factor = nb::cast<float>(fields[3]);
    dropout.row_origin = whole(fields[4].ptr(), "dropout"), dropout.key_origin = whole(fields[5].ptr(), "dropout");
    dropout.head_origin = whole(fields[6].ptr(), "dropout");
}

// What forward and backward share, in Python one tuple: query's, key's and value's shape, type, scale, softcap (0: none),
// mask (None: all is seen), bias, dropout, address of the sink (0: none), threads; of sigmoid attention also the address of
// n and its strides of item and head.
struct Shared {
    Problem problem;
    int64_t query[4], key[4], value[4];
    std::vector<Bias::Table> tables;
    mutable std::atomic<bool> outside{false};

    Shared(const Shared&) = delete;

    // After a kernel has run.
    void check() const {
        if (outside.load()) throw nb::index_error("a score function reads outside of a captured tensor");
    }

    explicit Shared(const nb::tuple& given) {
        if (given.size() != 11 && given.size() != 12) refuse("a problem is a tuple of 11 or 12");
        take(query, given[0], "query"), take(key, given[1], "key"), take(value, given[2], "value");
        if (key[0] != query[0] || value[0] != query[0] || key[3] != query[3] || value[1] != key[1] || value[2] != key[2])
            refuse("shapes of query, key and value do not belong together");
        if (query[1] < 1 || key[1] < 1 || query[1] % key[1]) refuse("query heads must be a multiple of key heads");
        problem.batch = query[0], problem.heads = query[1], problem.kv_heads = key[1];
        problem.length_q = query[2], problem.length_k = key[2], problem.width = query[3], problem.value_width = value[3];
        problem.type = type_of(whole(given[3].ptr(), "type"));
        problem.scale = nb::cast<float>(given[4]), problem.softcap = nb::cast<float>(given[5]);
        set_mask(given[6]);
        set_bias(problem, given[7], tables);
        problem.bias.outside = &outside;
        set_dropout(problem, given[8]);
        problem.sink = reinterpret_cast<const float*>(static_cast<uintptr_t>(whole(given[9].ptr(), "sink")));
        problem.threads = static_cast<int>(whole(given[10].ptr(), "threads"));
        if (problem.threads < 1) refuse("at least one thread");
        if (given.size() == 12) set_sigmoid(given[11]);
    }

  private:
    static void take(int64_t (&shape)[4], nb::handle given, const char* name) {
        const Whole<4> sizes(given, name);
        for (int n = 0; n < 4; ++n) {
            if (sizes.at[n] < 0) refuse(std::string(name) + " has a negative size");
            shape[n] = sizes.at[n];
        }
    }

    void set_sigmoid(nb::handle given) {
        const Whole<3> rows(given, "n");
        static const float nothing = 0;  // an empty tensor has no address
        if (!rows.at[0] && problem.batch && problem.length_q) refuse("n of sigmoid attention has no memory");
        problem.sigmoid = {rows.at[0] ? reinterpret_cast<const float*>(rows.at[0]) : &nothing, rows.at[1], rows.at[2]};
        if (problem.sink) refuse("sigmoid attention has no sink");
    }

    void set_mask(nb::handle given) {
        if (given.is_none()) return;
        problem.mask = nb::cast<const Mask*>(given);
        const bool fits = (problem.mask->batch == 1 || problem.mask->batch == problem.batch) &&
                          (problem.mask->heads == 1 || problem.mask->heads == problem.heads);
        if (!fits) refuse("the mask is made for another batch or other heads");
        if (problem.mask->length_q != problem.length_q || problem.mask->length_k != problem.length_k)
            refuse("the mask is made for other lengths");
    }
};

bool wanted(nb::handle given) { return PyTuple_Check(given.ptr()); }

// (address, strides); of a line only the address counts.
void set_bias_gradient(Backward& call, nb::handle given) {
    if (call.problem.bias.form == Bias::none) refuse("a gradient of a bias that is not there");
    const nb::tuple fields = nb::cast<nb::tuple>(given);
    if (call.problem.bias.form == Bias::program) {  // (address, size, whether items and whether heads have entries of their own)
        call.d_bias = reinterpret_cast<float*>(static_cast<uintptr_t>(whole(fields[0].ptr(), "d_bias")));
        call.d_bias_size = whole(fields[1].ptr(), "d_bias");
        call.d_bias_batch = whole(fields[2].ptr(), "d_bias"), call.d_bias_head = whole(fields[3].ptr(), "d_bias");
        for (const ScoreProgram::Pull& pull : call.problem.bias.code->pulls)
            if (pull.start + pull.size > call.d_bias_size) refuse("a gradient of a table lies outside of that of all tables");
        return;
    }
    const Whole<4> stride(fields[1], "d_bias strides");
    call.d_bias = reinterpret_cast<float*>(static_cast<uintptr_t>(whole(fields[0].ptr(), "d_bias")));
    call.d_bias_batch = stride.at[0], call.d_bias_head = stride.at[1];
    call.d_bias_row = stride.at[2], call.d_bias_key = stride.at[3];
}

// Below so many rows for one key head a call streams its keys (decode) instead of packing them first; but few keys are
// packed at once. One place for both.
constexpr int64_t kDecodeRows = 8, kDecodeKeys = 64;

bool decodes(int64_t rows, int64_t group, int64_t keys) { return rows * group <= kDecodeRows && keys >= kDecodeKeys; }

// Rows of 8 bits are streamed whatever their number, up to where packed floats would be faster than converting the keys again
// for every four rows.
constexpr int64_t kInt8Rows = 32;

using Pointer = uintptr_t;

// `lse` is an address, 0 where nobody asks for it.
void forward(nb::tuple shared, nb::handle query, nb::handle key, nb::handle value, nb::handle out, Pointer lse) {
    const Shared given(shared);
    Forward call;
    call.problem = given.problem;
    const Problem& p = call.problem;
    call.query = memory<Input>(query, given.query, "query");
    call.key = memory<Input>(key, given.key, "key");
    call.value = memory<Input>(value, given.value, "value");
    call.out = memory<Output>(out, {p.batch, p.heads, p.length_q, p.value_width}, "out");
    if (p.sigmoid && lse) refuse("sigmoid attention has no lse");
    if (!(p.batch && p.length_q)) return;
    const auto kernel = decodes(p.length_q, p.group(), p.length_k) ? kernels().decode : kernels().forward;
    call.lse = reinterpret_cast<float*>(lse);
    if (lse) call.lse_low = call.lse + p.batch * p.heads * p.length_q;
    {
        nb::gil_scoped_release released;
        kernel(call);
    }
    given.check();
}

// Keys and values of the shapes in `shared` as rows of 8 bits, whose scales make them 4 bytes longer.
void decode_int8(nb::tuple shared, nb::handle query, nb::handle key, nb::handle value, nb::handle out) {
    const Shared given(shared);
    Forward call;
    call.problem = given.problem, call.int8_rows = true, call.quads = sums_quads();
    const Problem& p = call.problem;
    call.query = memory<Input>(query, given.query, "query");
    call.key = memory<Input>(key, given.key, "key");
    call.value = memory<Input>(value, given.value, "value");
    call.out = memory<Output>(out, {p.batch, p.heads, p.length_q, p.value_width}, "out");
    if (p.length_q * p.group() > kInt8Rows) refuse("too many rows for keys of 8 bits");
    if (!(p.batch && p.length_q)) return;
    {
        nb::gil_scoped_release released;
        kernels().decode(call);
    }
    given.check();
}

// x (B, H, L, W) of a type to out (B, H, L, W + 4), an address.
void round_rows(nb::handle shape, int64_t type, nb::handle x, Pointer out) {
    const Whole<4> size(shape, "shape");
    for (const int64_t one : size.at)
        if (one < 0) refuse("sizes must not be negative");
    RoundRows call;
    call.batch = size.at[0], call.heads = size.at[1], call.rows = size.at[2], call.width = size.at[3];
    call.type = type_of(type), call.x = memory<Input>(x, size.at, "x"), call.out = reinterpret_cast<int8_t*>(out);
    if (call.batch && call.heads && call.rows && !out) refuse("out has no memory");
    nb::gil_scoped_release released;
    kernels().round_rows(call);
}

// 0 stands for a gradient that is not wanted and for the cotangent of an lse that has none. (None would cost nanobind's
// slower way of calling.)
void backward(nb::tuple shared, nb::handle query, nb::handle key, nb::handle value, nb::handle out, nb::handle d_out,
              Pointer lse, Pointer d_lse, nb::handle d_query, nb::handle d_key, nb::handle d_value, Pointer delta,
              nb::handle d_bias) {
    const Shared given(shared);
    Backward call;
    call.problem = given.problem;
    const Problem& p = call.problem;
    const int64_t shape[4] = {p.batch, p.heads, p.length_q, p.value_width};
    call.query = memory<Input>(query, given.query, "query");
    call.key = memory<Input>(key, given.key, "key");
    call.value = memory<Input>(value, given.value, "value");
    if (!p.sigmoid) call.out = memory<Input>(out, shape, "out");
    call.d_out = memory<Input>(d_out, shape, "d_out");
    if (wanted(d_query)) call.d_query = memory<Output>(d_query, given.query, "d_query");
    if (wanted(d_key) != wanted(d_value)) refuse("d_key and d_value are wanted together");
    if (wanted(d_key)) {
        call.d_key = memory<Output>(d_key, given.key, "d_key");
        call.d_value = memory<Output>(d_value, given.value, "d_value");
    }
    if (p.batch && p.length_q && !p.sigmoid && !(lse && delta)) refuse("lse or delta has no memory");
    call.lse = reinterpret_cast<const float*>(lse), call.d_lse = reinterpret_cast<const float*>(d_lse);
    if (lse) call.lse_low = call.lse + p.batch * p.heads * p.length_q;
    call.delta = reinterpret_cast<float*>(delta);
    if (wanted(d_bias)) set_bias_gradient(call, d_bias);
    if (!kernels().backward) refuse("this build has no backward kernel");
    if (p.bias.form == Bias::program && p.bias.code->slope.level < 0) refuse("the score program has no derivative");
    nb::gil_scoped_release released;
    kernels().backward(call);
}

// out: address of (batch, heads, Lq) float32, where batch and heads are 1 or the problem's.
void key_counts(nb::tuple shared, int64_t batch, int64_t heads, Pointer out) {
    const Shared given(shared);
    KeyCounts call;
    call.problem = given.problem, call.batch = batch, call.heads = heads, call.out = reinterpret_cast<float*>(out);
    const Problem& p = call.problem;
    if ((batch != 1 && batch != p.batch) || (heads != 1 && heads != p.heads)) refuse("counts of another batch or other heads");
    if (!out && batch && p.length_q) refuse("counts have no memory");
    nb::gil_scoped_release released;
    if (p.batch) kernels().key_counts(call);
}

// rows: numbers (12, B, Hq, Lq), largest_at, nonfinite, nonfinite_at. groups: (address, count, strides of group and item, mass).
// best: (top, weights, keys). Addresses may be 0 where there is nothing.
void statistics(nb::tuple shared, nb::handle query, nb::handle key, int64_t placement, Pointer placements, Pointer first,
                nb::handle groups, nb::handle rows, nb::handle best, Pointer received) {
    const Shared given(shared);
    Statistics call;
    call.problem = given.problem;
    const Problem& p = call.problem;
    const int64_t rows_count = p.batch * p.heads * p.length_q;
    call.query = memory<Input>(query, given.query, "query");
    call.key = memory<Input>(key, given.key, "key");
    call.placement = placement, call.placements = reinterpret_cast<const int64_t*>(placements);
    call.first = reinterpret_cast<const int64_t*>(first);
    const Whole<5> group(groups, "groups");
    call.groups.data = reinterpret_cast<const uint8_t*>(group.at[0]), call.groups.count = group.at[1];
    call.groups.group = group.at[2], call.groups.batch = group.at[3], call.groups.mass = reinterpret_cast<float*>(group.at[4]);
    const Whole<4> row(rows, "rows");
    call.numbers = reinterpret_cast<float*>(row.at[0]), call.largest_at = reinterpret_cast<int64_t*>(row.at[1]);
    call.nonfinite = reinterpret_cast<int64_t*>(row.at[2]), call.nonfinite_at = reinterpret_cast<int64_t*>(row.at[3]);
    const Whole<3> top(best, "best");
    call.top = top.at[0], call.top_weights = reinterpret_cast<float*>(top.at[1]), call.top_keys = reinterpret_cast<int64_t*>(top.at[2]);
    call.received = reinterpret_cast<float*>(received);
    if (call.groups.count < 0 || call.top < 0) refuse("a negative number of groups or of top keys");
    const bool lacks_rows = !(call.numbers && call.largest_at && call.nonfinite && call.nonfinite_at);
    const bool lacks_groups = call.groups.count && !((call.groups.data || !p.length_k) && call.groups.mass);
    if (rows_count && (lacks_rows || lacks_groups || (call.top && !(call.top_weights && call.top_keys)))) refuse("statistics have no memory");
    if (!kernels().statistics) refuse("this build has no statistics");
    nb::gil_scoped_release released;
    kernels().statistics(call);
}

// asked: item, head, row_start, row_count, key_start, key_stop, row_bin, key_bin, logits. rows, lse,
// out (3, n, m), row_lse: addresses, or 0.
void pooled(nb::tuple shared, nb::handle query, nb::handle key, nb::handle asked, Pointer rows, Pointer lse, Pointer out,
            Pointer row_lse) {
    const Shared given(shared);
    Pooled call;
    call.problem = given.problem;
    const Problem& p = call.problem;
    call.query = memory<Input>(query, given.query, "query");
    call.key = memory<Input>(key, given.key, "key");
    const Whole<9> a(asked, "asked");
    call.item = a.at[0], call.head = a.at[1], call.row_start = a.at[2], call.row_count = a.at[3];
    call.key_start = a.at[4], call.key_stop = a.at[5], call.row_bin = a.at[6], call.key_bin = a.at[7], call.logits = a.at[8] != 0;
    call.rows = reinterpret_cast<const int64_t*>(rows), call.lse = reinterpret_cast<const double*>(lse);
    call.out = reinterpret_cast<float*>(out), call.row_lse = reinterpret_cast<double*>(row_lse);
    if (call.item < 0 || call.item >= p.batch || call.head < 0 || call.head >= p.heads) refuse("no such item or head");
    const int64_t last = rows ? 0 : call.row_start + call.row_count;
    if (call.row_start < 0 || call.row_count < 0 || last > p.length_q) refuse("rows outside of the call");
    for (int64_t n = 0; rows && n < call.row_count; ++n)
        if (call.rows[n] < 0 || call.rows[n] >= p.length_q) refuse("rows outside of the call");
    if (call.key_start < 0 || call.key_start > call.key_stop || call.key_stop > p.length_k) refuse("keys outside of the call");
    const bool fits = call.row_bin >= 1 && call.key_bin >= 1 && !(call.key_bin & (call.key_bin - 1)) && call.key_start % 16 == 0 &&
                      call.key_start % call.key_bin == 0 && (call.key_stop % 16 == 0 || call.key_stop == p.length_k);
    if (!fits) refuse("bins that do not fit the range of keys");
    if (call.row_count && call.key_start < call.key_stop && !out && !row_lse) refuse("out has no memory");
    if (row_lse && (lse || call.logits)) refuse("the lse of rows is computed where none is given");
    if (!kernels().pooled) refuse("this build has no pooling");
    nb::gil_scoped_release released;
    kernels().pooled(call);
}

// chosen: address of int64 heads. asked: how many, row_start, row_count, packed. keys, out: addresses.
void weight_tile(nb::tuple shared, nb::handle query, nb::handle key, Pointer chosen, nb::handle asked, Pointer keys, Pointer out) {
    const Shared given(shared);
    WeightTile call;
    call.problem = given.problem;
    const Problem& p = call.problem;
    call.query = memory<Input>(query, given.query, "query");
    call.key = memory<Input>(key, given.key, "key");
    const Whole<4> a(asked, "asked");
    call.chosen = reinterpret_cast<const int64_t*>(chosen), call.chosen_count = a.at[0];
    call.row_start = a.at[1], call.row_count = a.at[2], call.packed = a.at[3] != 0;
    call.keys = reinterpret_cast<float*>(keys), call.out = reinterpret_cast<float*>(out);
    if (call.chosen_count < 0 || (call.chosen_count && !chosen)) refuse("no heads");
    for (int64_t n = 0; n < call.chosen_count; ++n)
        if (call.chosen[n] < 0 || call.chosen[n] >= p.heads) refuse("no such head");
    const int64_t last = call.row_start + call.row_count;
    if (call.row_start < 0 || call.row_count < 0 || last > p.length_q) refuse("rows outside of the call");
    const bool nothing = !(p.batch && call.chosen_count && call.row_count && p.length_k);
    if (!nothing && (!out || !keys || keys % 64)) refuse("a tile has no memory, or keys are not aligned");
    if (!kernels().weight_tile) refuse("this build has no tiles of weights");
    nb::gil_scoped_release released;
    if (!nothing) kernels().weight_tile(call);
}

// sizes: batch, heads, rows, keys, width, threads.
void weighted_values(nb::handle sizes, Pointer weights, nb::handle value, nb::handle out) {
    const Whole<6> size(sizes, "sizes");
    for (const int64_t one : size.at)
        if (one < 0) refuse("sizes must not be negative");
    WeightedValues call;
    call.batch = size.at[0], call.heads = size.at[1], call.rows = size.at[2], call.length_k = size.at[3], call.value_width = size.at[4];
    call.threads = static_cast<int>(size.at[5]);
    call.weights = reinterpret_cast<const float*>(weights);
    call.value = memory<Input>(value, {call.batch, call.heads, call.length_k, call.value_width}, "value");
    call.out = memory<Output>(out, {call.batch, call.heads, call.rows, call.value_width}, "out");
    if (call.value_width % 16) refuse("values must be a multiple of 16 wide");
    if (call.threads < 1) refuse("at least one thread");
    if (call.batch && call.heads && call.rows && call.length_k && !weights) refuse("weights have no memory");
    if (!kernels().weighted_values) refuse("this build has no tiles of weights");
    nb::gil_scoped_release released;
    kernels().weighted_values(call);
}

// Queries, keys and values of one length, their memory, and what forward and backward of causal linear attention share.
// problem: shapes of query, key and value, type, map, normalise, threads, least. kept: address and batch stride of rows and of
// keys. units: addresses of log_scale and running. Addresses may be 0 where there is nothing.
Linear linear_of(nb::tuple problem, nb::handle query, nb::handle key, nb::handle value, nb::handle kept, nb::handle units,
                 Pointer denominator, Pointer states) {
    if (problem.size() != 8) refuse("a problem of linear attention is a tuple of 8");
    const Whole<4> q(problem[0], "query"), k(problem[1], "key"), v(problem[2], "value"), rows(kept, "kept");
    const Whole<2> unit(units, "units");
    for (int n = 0; n < 4; ++n)
        if (q.at[n] < 1 || k.at[n] < 1 || v.at[n] < 1) refuse("linear attention of nothing");
    if (k.at[0] != q.at[0] || v.at[0] != q.at[0] || k.at[1] != v.at[1] || q.at[1] % k.at[1] || k.at[2] != q.at[2] ||
        v.at[2] != q.at[2] || k.at[3] != q.at[3])
        refuse("shapes of query, key and value do not belong together");
    Linear call;
    call.batch = q.at[0], call.heads = q.at[1], call.kv_heads = k.at[1], call.length = q.at[2];
    call.width = q.at[3], call.value_width = v.at[3];
    call.type = type_of(whole(problem[3].ptr(), "type"));
    call.map = whole(problem[4].ptr(), "map") ? Linear::elu_plus_one : Linear::identity;
    call.normalise = whole(problem[5].ptr(), "normalise") != 0;
    call.threads = static_cast<int>(whole(problem[6].ptr(), "threads"));
    call.least = nb::cast<float>(problem[7]);
    if (call.threads < 1) refuse("at least one thread");
    call.query = memory<Input>(query, q.at, "query"), call.key = memory<Input>(key, k.at, "key");
    call.value = memory<Input>(value, v.at, "value");
    call.rows = reinterpret_cast<const uint8_t*>(rows.at[0]), call.rows_batch = rows.at[1];
    call.keys = reinterpret_cast<const uint8_t*>(rows.at[2]), call.keys_batch = rows.at[3];
    call.log_scale = reinterpret_cast<const float*>(unit.at[0]), call.running = reinterpret_cast<const float*>(unit.at[1]);
    call.denominator = reinterpret_cast<float*>(denominator), call.states = reinterpret_cast<float*>(states);
    if (!denominator || !states || !call.log_scale != !call.running) refuse("linear attention lacks memory");
    return call;
}

void linear(nb::tuple problem, nb::handle query, nb::handle key, nb::handle value, nb::handle kept, nb::handle units,
            nb::handle out, Pointer denominator, Pointer states) {
    Linear call = linear_of(problem, query, key, value, kept, units, denominator, states);
    call.out = memory<Output>(out, {call.batch, call.heads, call.length, call.value_width}, "out");
    if (!kernels().linear) refuse("this build has no linear attention");
    nb::gil_scoped_release released;
    kernels().linear(call);
}

void linear_backward(nb::tuple problem, nb::handle query, nb::handle key, nb::handle value, nb::handle kept, nb::handle units,
                     nb::handle out, Pointer denominator, Pointer states, nb::handle d_out, nb::handle d_query, nb::handle d_key,
                     nb::handle d_value, Pointer d_states) {
    Linear call = linear_of(problem, query, key, value, kept, units, denominator, states);
    const int64_t shape[4] = {call.batch, call.heads, call.length, call.value_width};
    call.out_read = memory<Input>(out, shape, "out"), call.d_out = memory<Input>(d_out, shape, "d_out");
    call.d_query = memory<Output>(d_query, {call.batch, call.heads, call.length, call.width}, "d_query");
    call.d_key = memory<Output>(d_key, {call.batch, call.kv_heads, call.length, call.width}, "d_key");
    call.d_value = memory<Output>(d_value, {call.batch, call.kv_heads, call.length, call.value_width}, "d_value");
    call.d_states = reinterpret_cast<float*>(d_states);
    if (!d_states) refuse("d_states has no memory");
    if (!kernels().linear) refuse("this build has no linear attention");
    nb::gil_scoped_release released;
    kernels().linear(call);
}

// heads: batch, Hq, Hkv, M, W. settings: type, map, normalise, threads. The tensors as elsewhere, of one row. state: addresses of
// sums and weights before (0: nothing came before), of those after; strides: of the first three axes of both before.
void linear_step(nb::handle heads, nb::handle settings, float least, nb::handle query, nb::handle key, nb::handle value, nb::handle out,
                 nb::handle state, nb::handle strides) {
    const Whole<5> size(heads, "heads");
    const Whole<4> setting(settings, "settings"), address(state, "state");
    const Whole<6> stride(strides, "strides");
    for (const int64_t one : size.at)
        if (one < 1) refuse("a linear step of nothing");
    LinearStep call;
    call.batch = size.at[0], call.heads = size.at[1], call.kv_heads = size.at[2], call.width = size.at[3], call.value_width = size.at[4];
    if (call.heads % call.kv_heads) refuse("query heads must be a multiple of key heads");
    call.type = type_of(setting.at[0]), call.map = setting.at[1] ? Linear::elu_plus_one : Linear::identity;
    call.normalise = setting.at[2] != 0, call.threads = static_cast<int>(setting.at[3]), call.least = least;
    if (call.threads < 1) refuse("at least one thread");
    call.query = memory<Input>(query, {call.batch, call.heads, 1, call.width}, "query");
    call.key = memory<Input>(key, {call.batch, call.kv_heads, 1, call.width}, "key");
    call.value = memory<Input>(value, {call.batch, call.kv_heads, 1, call.value_width}, "value");
    call.out = memory<Output>(out, {call.batch, call.heads, 1, call.value_width}, "out");
    call.sums = reinterpret_cast<const float*>(address.at[0]), call.weights = reinterpret_cast<const float*>(address.at[1]);
    call.new_sums = reinterpret_cast<float*>(address.at[2]), call.new_weights = reinterpret_cast<float*>(address.at[3]);
    if (!call.new_sums || !call.new_weights || !call.sums != !call.weights) refuse("a state has no memory");
    for (int n = 0; n < 3; n++) call.sums_at[n] = stride.at[n], call.weights_at[n] = stride.at[3 + n];
    if (!kernels().linear_step) refuse("this build has no linear step");
    nb::gil_scoped_release released;
    kernels().linear_step(call);
}

// vectors: shape and (address, strides) of a tensor, or 0.
HeadRanges::Vectors vectors_of(nb::handle given, const char* name) {
    HeadRanges::Vectors vectors;
    if (!wanted(given)) return vectors;
    const nb::tuple fields = nb::cast<nb::tuple>(given);
    if (fields.size() != 2) refuse(std::string(name) + " must be (shape, (address, strides))");
    const Whole<4> shape(fields[0], name);
    for (const int64_t one : shape.at)
        if (one < 1) refuse("ranges of nothing");
    vectors.data = memory<Input>(fields[1], shape.at, name);
    vectors.batch = shape.at[0], vectors.heads = shape.at[1], vectors.rows = shape.at[2], vectors.width = shape.at[3];
    return vectors;
}

// settings: type, threads. real: address (0: all) and strides of items and heads of the keys that are real. rows: addresses of
// lse, smallest, largest, lowest, highest, nonfinite. Whether everything is finite and every head has something real: only
// then do `of_queries` and `of_keys` hold what native/call.h says.
bool head_ranges(nb::handle settings, nb::handle query, nb::handle key, nb::handle value, nb::handle real, nb::handle rows,
                 Pointer of_queries, Pointer of_keys) {
    const Whole<2> setting(settings, "settings");
    const Whole<3> seen(real, "real");
    const Whole<6> row(rows, "rows");
    HeadRanges call;
    call.type = type_of(setting.at[0]), call.threads = static_cast<int>(setting.at[1]);
    call.query = vectors_of(query, "query"), call.key = vectors_of(key, "key"), call.value = vectors_of(value, "value");
    for (HeadRanges::Vectors* vectors : {&call.key, &call.value}) {
        vectors->real = reinterpret_cast<const uint8_t*>(seen.at[0]), vectors->real_batch = seen.at[1], vectors->real_head = seen.at[2];
        const bool fits = vectors->batch == call.query.batch && vectors->heads == call.key.heads && vectors->rows == call.key.rows;
        if (!fits && vectors->data.data) refuse("shapes of query, key and value do not belong together");
    }
    call.lse = reinterpret_cast<const float*>(row.at[0]), call.smallest = reinterpret_cast<const float*>(row.at[1]);
    call.largest = reinterpret_cast<const float*>(row.at[2]), call.lowest = reinterpret_cast<const float*>(row.at[3]);
    call.highest = reinterpret_cast<const float*>(row.at[4]), call.nonfinite = reinterpret_cast<const int64_t*>(row.at[5]);
    call.of_queries = reinterpret_cast<float*>(of_queries), call.of_keys = reinterpret_cast<float*>(of_keys);
    for (const int64_t one : row.at)
        if (!one) refuse("ranges have no memory");
    if (!call.query.data.data || !call.key.data.data || !of_queries || !of_keys || call.threads < 1) refuse("ranges have no memory");
    if (!kernels().head_ranges) refuse("this build has no ranges");
    const int64_t count = call.query.heads + 2 * call.key.heads;
    const std::unique_ptr<bool[]> sound(new bool[count]);
    call.sound = sound.get();
    nb::gil_scoped_release released;
    kernels().head_ranges(call);
    for (int64_t n = 0; n < count; n++)
        if (!sound[n]) return false;
    return true;
}

void exp2(Pointer from, Pointer to, int64_t count) {
    if (count < 0 || (count && !(from && to))) refuse("exp2 has no memory");
    if (!kernels().exp2) refuse("this build has no exp2");
    kernels().exp2(reinterpret_cast<const float*>(from), reinterpret_cast<float*>(to), count);
}

nb::object peak(double (*measure)(int, double), int threads, double milliseconds) {
    if (!measure) return nb::none();
    if (threads < 1) refuse("at least one thread");
    double found;
    {
        nb::gil_scoped_release released;
        found = measure(threads, milliseconds);
    }
    return nb::float_(found);
}

// Addresses of dense float32 memory, the weight's of bf16 where it is `half`; `bias` may be 0.
void few_rows(Pointer x, Pointer weight, bool half, bool turned, Pointer bias, Pointer out, int64_t rows, int64_t width, int64_t features,
              int64_t block, int threads) {
    if (rows < 1 || rows > kFewRows || width < 1 || features < 1 || threads < 1) refuse("few_rows of such sizes");
    if (block < 0 || (block && (half || rows > kOrderedRows)) || (turned && !block)) refuse("few_rows of such an order");
    if (!x || !weight || !out) refuse("few_rows has no memory");
    FewRows call;
    call.rows = rows, call.width = width, call.features = features, call.threads = threads, call.half = half;
    call.block = block, call.turned = turned;
    call.x = reinterpret_cast<const float*>(x), call.weight = reinterpret_cast<const void*>(weight);
    call.bias = reinterpret_cast<const float*>(bias), call.out = reinterpret_cast<float*>(out);
    nb::gil_scoped_release released;
    kernels().few_rows(call);
}

// Addresses: x, `added` (or 0) and out of float32 or, where it is `half`, bf16; the weight in panels (call.h). `next`: weight, scales, bias
// and features of the product that reads this one and is added to; or nothing. `norm`: weight and bias (or 0) of a layer norm
// after all; or nothing. How many rows are not finite.
int64_t int8_product(Pointer x, Pointer weight, Pointer scales, Pointer bias, Pointer out, int64_t rows, int64_t width, int64_t features,
                     bool half, int at_once, int threads, int activation, Pointer added, const std::vector<int64_t>& next,
                     const std::vector<int64_t>& norm, float eps) {
    if (rows < 0 || width < 1 || features < 1 || threads < 1) refuse("int8_product of such sizes");
    if ((!x && rows) || !weight || !scales || (!out && rows)) refuse("int8_product has no memory");
    if (activation < 0 || activation > (int)Activation::silu) refuse("int8_product with such an activation");
    if (!next.empty() && (next.size() != 4 || !next[0] || !next[1] || next[3] < 1)) refuse("int8_product before such a product");
    if (!norm.empty() && norm.size() != 2) refuse("int8_product before such a norm");
    Int8Product call, second;
    call.rows = rows, call.width = width, call.features = features, call.threads = threads, call.half = half;
    call.x = reinterpret_cast<const void*>(x), call.weight = reinterpret_cast<const int8_t*>(weight);
    call.scales = reinterpret_cast<const float*>(scales), call.bias = reinterpret_cast<const float*>(bias);
    call.activation = static_cast<Activation>(activation);
    if (!next.empty()) {
        second.rows = rows, second.width = features, second.features = next[3], call.next = &second;
        second.weight = reinterpret_cast<const int8_t*>(next[0]), second.scales = reinterpret_cast<const float*>(next[1]);
        second.bias = reinterpret_cast<const float*>(next[2]);
    }
    Int8Product& last = next.empty() ? call : second;
    last.added = reinterpret_cast<const void*>(added), last.out = reinterpret_cast<void*>(out);
    if (!norm.empty())
        last.norm = {StepNorm::layer, reinterpret_cast<const void*>(norm[0]), reinterpret_cast<const void*>(norm[1]), eps, 0};
    const Kernels& set = kernels();
    const auto product = at_once >= 64 && set.int8_product_tiles && sums_tiles() ? set.int8_product_tiles
                         : at_once >= 4 && set.int8_product_quads && sums_quads() ? set.int8_product_quads
                                                                                 : set.int8_product;
    nb::gil_scoped_release released;
    return product(call);
}

// The fields of one layer of a step, in the order in which `step` reads them.
class StepFields {
  public:
    StepFields(const std::vector<int64_t>& numbers, const std::vector<double>& reals) : numbers(numbers), reals(reals) {}
    void end() const { if (number != numbers.size() || real != reals.size()) refuse("a step with other fields"); }

    int64_t next() { return number < numbers.size() ? numbers[number++] : (refuse("a step with other fields"), 0); }
    float next_real() { return real < reals.size() ? (float)reals[real++] : (refuse("a step with other fields"), 0.0f); }
    template <class P> const P* address() { return reinterpret_cast<const P*>(next()); }

    StepMatrix matrix() {
        StepMatrix matrix;
        const int64_t kind = next();  // of groups with the form above the lowest byte
        matrix.kind = (StepMatrix::Kind)(kind & 255), matrix.form = kind >> 8, matrix.features = next();
        matrix.weight = address<void>(), matrix.bias = address<void>(), matrix.scales = address<void>();
        return matrix;
    }

    StepNorm norm() {
        StepNorm norm;
        norm.kind = (StepNorm::Kind)next(), norm.weight = address<void>(), norm.bias = address<void>();
        norm.eps = next_real(), norm.plus = next_real();
        return norm;
    }

    Output output() {
        Output output;
        output.data = const_cast<void*>(address<void>());
        output.batch = next(), output.head = next(), output.row = next();
        return output;
    }

  private:
    const std::vector<int64_t>& numbers;
    const std::vector<double>& reals;
    size_t number = 0, real = 0;
};

// `layers`: the numbers of each layer, and those of the last norm; `reals`: their floats. Rows that were not finite.
int64_t step(Pointer x, Pointer out, int64_t items, int64_t width, int type, const std::vector<int64_t>& held,
             const std::vector<std::vector<int64_t>>& layers, const std::vector<std::vector<double>>& reals, int threads) {
    if (items < 1 || width < 1 || (int64_t)held.size() != items || layers.empty() || layers.size() != reals.size() || threads < 1 ||
        (type != (int)Type::f32 && type != (int)Type::bf16) || *std::min_element(held.begin(), held.end()) < 1)
        refuse("a step of such sizes");
    if (!x || !out) refuse("a step has no memory");
    Step call;
    std::vector<StepLayer> read(layers.size() - 1);
    for (size_t n = 0; n < read.size(); n++) {
        StepFields f(layers[n], reals[n]);
        StepLayer& layer = read[n];
        for (StepNorm* norm : {&layer.attention_norm, &layer.query_norm, &layer.key_norm, &layer.after_attention,
                               &layer.feed_forward_norm, &layer.after_feed_forward})
            *norm = f.norm();
        for (StepMatrix* matrix : {&layer.query, &layer.key, &layer.value, &layer.output, &layer.up, &layer.gate, &layer.down})
            *matrix = f.matrix();
        for (int64_t* size : {&layer.heads, &layer.kv_heads, &layer.width, &layer.value_width, &layer.hidden, &layer.window})
            *size = f.next();
        layer.activation = (StepLayer::Activation)f.next(), layer.parallel = f.next(), layer.interleaved = f.next();
        layer.cos = f.address<float>(), layer.sin = f.address<float>(), layer.cos_stride = f.next(), layer.pairs = f.next();
        layer.sink = f.address<float>(), layer.first = f.address<int64_t>();
        layer.key_cache = f.output(), layer.value_cache = f.output(), layer.int8_cache = f.next();
        layer.query_seen = const_cast<void*>(f.address<void>()), layer.out_seen = const_cast<void*>(f.address<void>());
        layer.out = const_cast<void*>(f.address<void>());
        layer.scale = f.next_real(), layer.softcap = f.next_real();
        f.end();
        const int64_t joined = layer.key.features ? layer.heads * layer.width : layer.projected();
        if (layer.kv_heads < 1 || layer.heads % layer.kv_heads || layer.query.features != joined || !layer.key_cache.data ||
            !layer.value_cache.data || layer.output.features != width || (layer.down.features && layer.down.features != width) ||
            (layer.down.features && layer.up.features != layer.hidden && layer.up.features != 2 * layer.hidden) ||
            (layer.gate.features && layer.gate.features != layer.hidden) || 2 * layer.pairs > layer.width)
            refuse("a step with a layer of such sizes");
    }
    StepFields last(layers.back(), reals.back());
    call.norm = last.norm();
    last.end();
    call.items = items, call.width = width, call.type = (Type)type, call.threads = threads, call.held = held.data();
    call.layers = read.data(), call.layer_count = read.size(), call.quads = sums_quads();
    call.x = reinterpret_cast<const void*>(x), call.out = reinterpret_cast<void*>(out);
    const Kernels& set = kernels();
    nb::gil_scoped_release released;
    return set.step(call);
}

// Whether objects still have their types and attributes, and dictionaries hold the same objects in the same order. Both are
// read from tuples, whose owner keeps them alive: `objects` has an object, its type, the dictionary of its attributes, and so
// on; `entries` a dictionary, its keys, their values, and so on. A step of decoding has driven all of it out of the caches: so
// what is compared lies in one piece, and the dictionaries that come next are fetched ahead.
class Unchanged {
  public:
    Unchanged(nb::tuple objects, nb::tuple entries) {
        if (objects.size() % 3 || entries.size() % 3) refuse("objects and dictionaries come in triples");
        for (size_t n = 0; n < objects.size(); n += 3)
            parts.push_back({objects[n].ptr(), (PyObject*)objects[n + 1].ptr(), objects[n + 2].ptr()});
        for (size_t n = 0; n < entries.size(); n += 3) {
            const nb::handle dict = entries[n], names = entries[n + 1], values = entries[n + 2];
            if (!PyDict_Check(dict.ptr()) || !PyTuple_Check(names.ptr()) || !PyTuple_Check(values.ptr()) || nb::len(names) != nb::len(values))
                refuse("a dictionary comes with its keys and their values");
            dicts.push_back({dict.ptr(), (Py_ssize_t)nb::len(names)});
            for (size_t m = 0; m < nb::len(names); m++)
                held.push_back({PyTuple_GetItem(names.ptr(), m), PyTuple_GetItem(values.ptr(), m)});
        }
    }

    bool holds() const {
        for (size_t n = 0; n < parts.size(); n++) {
            if (n + ahead < parts.size()) __builtin_prefetch(parts[n + ahead].object);
            if ((PyObject*)Py_TYPE(parts[n].object) != parts[n].kind) return false;
            const nb::object attributes = nb::steal(PyObject_GetAttrString(parts[n].object, "__dict__"));
            if (!attributes.is_valid()) PyErr_Clear();
            if (attributes.ptr() != parts[n].attributes) return false;
        }
        const std::pair<PyObject*, PyObject*>* entry = held.data();
        for (size_t n = 0; n < dicts.size(); n++) {
            if (n + ahead < dicts.size()) __builtin_prefetch(dicts[n + ahead].dict);
            if (PyDict_Size(dicts[n].dict) != dicts[n].size) return false;
            PyObject *key, *value;
            for (Py_ssize_t at = 0; PyDict_Next(dicts[n].dict, &at, &key, &value); entry++)
                if (entry->first != key || entry->second != value) return false;
        }
        return true;
    }

  private:
    static constexpr size_t ahead = 8;
    struct Part { PyObject *object, *kind, *attributes; };
    struct Dict { PyObject* dict; Py_ssize_t size; };
    std::vector<Part> parts;
    std::vector<std::pair<PyObject*, PyObject*>> held;
    std::vector<Dict> dicts;
};

int64_t group_product(Pointer x, Pointer weight, Pointer scales, Pointer bias, Pointer out, int64_t rows, int64_t width, int64_t features,
                      bool half, int at_once, int threads, int64_t form) {
    if (rows < 0 || width < 1 || features < 1 || threads < 1) refuse("group_product of such sizes");
    if ((!x && rows) || !weight || !scales || (!out && rows)) refuse("group_product has no memory");
    GroupProduct call;
    call.form = GroupForm(form);
    call.rows = rows, call.width = width, call.features = features, call.threads = threads, call.half = half;
    call.x = reinterpret_cast<const void*>(x), call.weight = reinterpret_cast<const uint8_t*>(weight);
    call.scales = reinterpret_cast<const uint16_t*>(scales);
    call.bias = reinterpret_cast<const float*>(bias), call.out = reinterpret_cast<void*>(out);
    const Kernels& set = kernels();
    const bool taken = at_once >= 4 && set.group_product_quads && sums_quads();
    nb::gil_scoped_release released;
    return taken ? set.group_product_quads(call) : set.group_product(call);
}

std::vector<uint64_t> digests_of(Pointer memory, int64_t rows, int64_t row_bytes, int64_t stride_bytes, int64_t period, int64_t first,
                                 int64_t count, int threads) {
    if (rows < 0 || row_bytes < 0 || stride_bytes < 0 || period < 1 || first < 0 || count < 1 || threads < 1)
        refuse("digests of such sizes");
    if (!memory && rows && row_bytes) refuse("digests has no memory");
    const DigestCall call{reinterpret_cast<const uint8_t*>(memory), rows, row_bytes, stride_bytes, period};
    nb::gil_scoped_release released;
    return digests(call, first, count, threads);
}

double read_bandwidth(Pointer data, int64_t bytes, int threads) {
    if (bytes < 0 || (bytes && !data) || threads < 1) refuse("read_bandwidth has no memory or no threads");
    if (!kernels().read_bandwidth) refuse("this build has no read_bandwidth");
    nb::gil_scoped_release released;
    return kernels().read_bandwidth(reinterpret_cast<const void*>(data), bytes, threads);
}

}  // namespace
}  // namespace saccade

NB_MODULE(_native, module) {
    using namespace saccade;
    module.def("compiled_sets", &compiled_sets, "Names of the instruction sets in this build, lowest first.");
    module.def("sets", &supported_sets, "Those of them that this processor reports, lowest first.");
    module.def("active", [] { return kernels().name; }, "The instruction set in use.");
    module.def("use", &use, "name"_a,
               "Switch to 'auto', to a set of `sets()`, or, at one's own risk, to a compiled one as 'name!'.");
    module.def("forward", &forward, "One attention call. Addresses and strides; see bindings.cpp.");
    module.def("decode_int8", &decode_int8, "One attention call of few rows, keys and values in 8 bits; see bindings.cpp.");
    module.def("round_rows", &saccade::round_rows, "Keys or values to rows of 8 bits; see native/round_rows.h.");
    module.attr("most_int8_rows") = kInt8Rows;
    module.def("backward", &backward, "Its gradients.");
    module.def("key_counts", &key_counts, "How many keys each row sees.");
    module.def("statistics", &statistics, "Statistics of its weights.");
    module.def("pooled", &pooled, "Weights of one head, pooled over bins of rows and keys.");
    module.def("weight_tile", &weight_tile, "Rows of the weights of some heads; see native/call.h.");
    module.def("weighted_values", &weighted_values, "Such rows times values.");
    module.def("linear", &saccade::linear, "Causal linear attention; see native/call.h.");
    module.def("linear_backward", &linear_backward, "Its gradients.");
    module.attr("linear_span") = kLinearSpan;
    module.def("linear_step", &saccade::linear_step, "One token after a state; see native/call.h.");
    module.def("head_ranges", &saccade::head_ranges, "Ends and norms of queries, keys and values, ends of logits and weights, per head.");
    module.def("few_rows", &saccade::few_rows, "x W^T + b of at most `most_rows` rows; see native/call.h.");
    module.def("int8_product", &saccade::int8_product, "x W^T + b of int8 weights; see native/call.h.");
    module.def("group_product", &saccade::group_product, "x W^T + b of weights in groups; see native/call.h.");
    module.attr("int8_panel") = kInt8Panel;
    module.attr("int8_block") = kInt8Block;
    module.def("sums_tiles", [] { return kernels().int8_product_tiles && sums_tiles(); },
               "Whether int8 products of many rows use AMX.");
    module.def("sums_quads", [] { return kernels().int8_product_quads && sums_quads(); },
               "Whether the set in use sums four products of bytes in one instruction.");
    module.def("step", &saccade::step, "A step of decoding; see native/call.h.");
    nb::class_<Unchanged>(module, "Unchanged", "Whether dictionaries hold the same objects as before; see bindings.cpp.")
        .def(nb::init<nb::tuple, nb::tuple>())
        .def("holds", &Unchanged::holds);
    module.attr("most_rows") = kFewRows;
    module.attr("most_ordered_rows") = kOrderedRows;
    module.def("mkl_at_half", &saccade::mkl_at_half, "Whether MKL leaves half of this processor idle; see native/dispatch.h.");
    module.def("digests", &digests_of, "Digests of parts of a matrix; see native/digest.h.");
    module.def("decodes", [](int64_t rows, int64_t group, int64_t keys) { return decodes(rows, group, keys); },
               "rows"_a, "group"_a, "keys"_a, "Whether `forward` takes the kernel that streams its keys for Lq rows.");
    module.def("exp2", &saccade::exp2, "from"_a, "to"_a, "count"_a, "The kernels' own 2**x of float32 numbers, for tests.");
    module.def("peak_f32", [](int threads, double ms) { return peak(kernels().peak_f32, threads, ms); }, "threads"_a,
               "milliseconds"_a, "FLOP/s of nothing but float32 FMAs.");
    module.def("peak_bf16", [](int threads, double ms) { return peak(kernels().peak_bf16, threads, ms); }, "threads"_a,
               "milliseconds"_a, "FLOP/s of nothing but bf16 dot products; None where the set has none.");
    module.def("read_bandwidth", &read_bandwidth, "data"_a, "bytes"_a, "threads"_a, "Bytes/s of reading.");
    nb::class_<ScoreProgram>(module, "ScoreProgram", "A score as a program; its numbers are those of native/score_program.h.")
        .def(nb::init<const std::vector<int64_t>&>());
    bind_mask(module);
}

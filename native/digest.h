// Digests of a matrix in memory, by which Python notices writes that PyTorch does not count.
//
// The matrix is dealt to `steps * period` parts, each with a digest of its own. Part u has the rows q, q + steps, ... with q =
// u mod steps, and of the i-th of them the lines (64 bytes, the last one may be shorter) that are i + u / steps modulo
// `period`. So `steps` parts in succession meet every row, and every column of a matrix with enough rows; all parts
// together are the whole matrix.
#pragma once

#include <cstdint>
#include <cstring>
#include <vector>

namespace saccade {

struct DigestCall {
    const uint8_t* memory;
    int64_t rows, row_bytes, stride_bytes;
    int64_t steps, period;
};

// Each step is invertible: one changed line always changes the digest, several do but for one chance in 2^64. The rotation
// carries a changed sign bit on, which a product alone would leave in its place.
inline uint64_t mixed(uint64_t sum, uint64_t word) {
    const uint64_t both = sum ^ word;
    return (both << 27 | both >> 37) * 0x9E3779B97F4A7C15;
}

inline uint64_t digest(const DigestCall& call, int64_t part) {
    constexpr int64_t words = 8, line_bytes = 8 * words;
    constexpr int64_t ahead = 32;  // rows lie in other pages, where the processor does not look ahead: 8 ns a line, not 25
    uint64_t sums[words] = {1, 2, 3, 4, 5, 6, 7, 8};
    const int64_t lines = (call.row_bytes + line_bytes - 1) / line_bytes;
    const int64_t first = part / call.steps, stride = call.steps * call.stride_bytes;
    const int64_t rows = (call.rows - part % call.steps + call.steps - 1) / call.steps;
    const uint8_t* const start = call.memory + part % call.steps * call.stride_bytes;
    const auto ask = [&](int64_t i) {
        for (int64_t l = (first + i) % call.period; l < lines; l += call.period) __builtin_prefetch(start + i * stride + l * line_bytes);
    };
    for (int64_t i = 0; i < rows && i < ahead; i++) ask(i);
    for (int64_t i = 0; i < rows; i++) {
        if (i + ahead < rows) ask(i + ahead);
        const uint8_t* const row = start + i * stride;
        for (int64_t l = (first + i) % call.period; l < lines; l += call.period) {
            const int64_t bytes = call.row_bytes - l * line_bytes;
            uint64_t line[words] = {};
            if (bytes >= line_bytes)
                std::memcpy(line, row + l * line_bytes, line_bytes);
            else
                std::memcpy(line, row + l * line_bytes, bytes);
            for (int64_t w = 0; w < words; w++) sums[w] = mixed(sums[w], line[w]);
        }
    }
    uint64_t all = 0;
    for (const uint64_t sum : sums) all = mixed(all, sum);
    return all;
}

// Of `count` parts from `first` on, modulo their number.
inline std::vector<uint64_t> digests(const DigestCall& call, int64_t first, int64_t count) {
    std::vector<uint64_t> found;
    for (int64_t n = 0; n < count; n++) found.push_back(digest(call, (first + n) % (call.steps * call.period)));
    return found;
}

}  // namespace saccade

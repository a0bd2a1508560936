// Digests of a matrix in memory, by which Python notices writes that PyTorch does not count.
//
// The matrix is dealt to `period` parts, each with a digest of its own. Part u has of row i the lines (64 bytes, the last
// one may be shorter) that are i + u modulo `period`. So each part meets every row, and every column of a matrix with
// enough rows; all parts together are the whole matrix.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "parallel.h"

namespace saccade {

struct DigestCall {
    const uint8_t* memory;
    int64_t rows, row_bytes, stride_bytes;
    int64_t period;
};

// Each step is invertible: one changed line always changes the digest, several do but for one chance in 2^64. The rotation
// carries a changed sign bit on, which a product alone would leave in its place.
inline uint64_t mixed(uint64_t sum, uint64_t word) {
    const uint64_t both = sum ^ word;
    return (both << 27 | both >> 37) * 0x9E3779B97F4A7C15;
}

// Of the rows of one part from number `from` to number `end`.
inline uint64_t digest(const DigestCall& call, int64_t part, int64_t from, int64_t end) {
    constexpr int64_t words = 8, line_bytes = 8 * words;
    constexpr int64_t ahead = 32;  // rows lie in other pages, where the processor does not look ahead: 8 ns a line, not 25
    uint64_t sums[words] = {1, 2, 3, 4, 5, 6, 7, 8};
    const int64_t lines = (call.row_bytes + line_bytes - 1) / line_bytes;
    const auto ask = [&](int64_t i) {
        for (int64_t l = (part + i) % call.period; l < lines; l += call.period)
            __builtin_prefetch(call.memory + i * call.stride_bytes + l * line_bytes);
    };
    for (int64_t i = from; i < end && i < from + ahead; i++) ask(i);
    for (int64_t i = from; i < end; i++) {
        if (i + ahead < end) ask(i + ahead);
        const uint8_t* const row = call.memory + i * call.stride_bytes;
        for (int64_t l = (part + i) % call.period; l < lines; l += call.period) {
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

// Of `count` parts from `first` on, modulo their number. Rows wait for memory: each thread reads others.
inline std::vector<uint64_t> digests(const DigestCall& call, int64_t first, int64_t count, int threads) {
    constexpr int64_t block = 128;  // rows; a digest does not depend on how many threads there are
    const int64_t blocks = (call.rows + block - 1) / block;
    std::vector<uint64_t> of_blocks(count * blocks), found(count);
    parallel(threads, count * blocks, [&](int64_t task, int) {
        const int64_t from = task % blocks * block, end = std::min(from + block, call.rows);
        of_blocks[task] = digest(call, (first + task / blocks) % call.period, from, end);
    });
    for (int64_t task = 0; task < count * blocks; task++) found[task / blocks] = mixed(found[task / blocks], of_blocks[task]);
    return found;
}

}  // namespace saccade

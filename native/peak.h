// What this machine can do at most: arithmetic of one kind from registers, and reading of memory. The benchmark's limits.
#pragma once

#include <algorithm>
#include <chrono>
#include <vector>

#include "gemm.h"
#include "parallel.h"

namespace saccade {
namespace SACCADE_SET {

inline double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Multiplications and additions per second of one thread, in rounds that are short against the clock's use.
template <class Math> double peak_of_thread(double seconds) {
    constexpr int chains = registers == 32 ? 24 : 12, rounds = 4096;  // latency times throughput is 8 to 10
    auto a = Math::spread({});
    typename Math::vector b = {};
    vf sum[chains] = {};
    keep(a), keep(b);
    const double start = now();
    double passed = 0;
    int64_t done = 0;
    do {
        for (int n = 0; n < rounds; n++)
#pragma GCC unroll 24
            for (int i = 0; i < chains; i++) {
                sum[i] = Math::multiply(a, b, sum[i]);
                keep(sum[i]);
            }
        done += rounds;
        passed = now() - start;
    } while (passed < seconds);
    return 2.0 * Math::pack * lanes * chains * (double)done / passed;
}

template <class Math> double peak(int threads, double milliseconds) {
    std::vector<double> rates(std::max(threads, 1), 0.0);
    parallel(threads, (int64_t)rates.size(), [&](int64_t n, int) { rates[n] = peak_of_thread<Math>(milliseconds / 1000); });
    double sum = 0;
    for (double rate : rates) sum += rate;
    return sum;
}

inline double peak_f32(int threads, double milliseconds) { return peak<Single>(threads, milliseconds); }

#if defined(SACCADE_PAIRS)
inline double peak_bf16(int threads, double milliseconds) { return peak<Pairs>(threads, milliseconds); }
#else
constexpr double (*peak_bf16)(int, double) = nullptr;
#endif

// Bytes per second of reading `data` once; what is left of it after whole MiB is not read. Threads take pieces as they
// come, each in order, and ask for lines ahead: the processor's own prefetching alone is slower (it stops at every page).
inline double read_bandwidth(const void* data, int64_t bytes, int threads) {
    constexpr int64_t piece = 1 << 20, words = 256 / sizeof(uint32_t), ahead = 4096;
    const uint32_t* from = static_cast<const uint32_t*>(data);
    const int64_t pieces = bytes / piece;
    const double start = now();
    parallel(threads, pieces, [&](int64_t n, int) {
        vu sum[4] = {};
        const uint32_t* at = from + n * (piece / 4);
        for (int64_t i = 0; i < piece / 4; i += words, at += words) {
#pragma GCC unroll 4
            for (int line = 0; line < words; line += 16)
                __builtin_prefetch(reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(at + line) + ahead), 0, 2);
#pragma GCC unroll 16
            for (int v = 0; v < words / lanes; v++) sum[v % 4] |= load(at + v * lanes);
        }
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) keep(sum[v]);
    });
    return (double)(pieces * piece) / (now() - start);
}

}  // namespace SACCADE_SET
}  // namespace saccade

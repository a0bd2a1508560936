// Digests of a matrix: the same by any number of threads, and a changed byte changes that of its part alone.
#pragma once

#include "digest.h"
#include "sanitize_oracle.h"

namespace saccade::sanitize {

// Empty where all is right. The matrix ends where its memory does.
inline std::string fault_of_digest(uint64_t seed) {
    Random random(seed);
    const int64_t rows = draw(random, 1, 400), row_bytes = draw(random, 1, 700), gap = chance(random, 0.5) ? draw(random, 1, 100) : 0;
    const int64_t period = draw(random, 1, 12), first = draw(random, 0, period - 1), count = draw(random, 1, period);
    std::vector<uint8_t> memory((rows - 1) * (row_bytes + gap) + row_bytes);
    for (uint8_t& byte : memory) byte = uint8_t(random());
    const DigestCall call{memory.data(), rows, row_bytes, row_bytes + gap, period};
    const std::vector<uint64_t> before = digests(call, first, count, 3);
    if (before != digests(call, first, count, 1)) return "digests differ by threads";
    const int64_t place = draw(random, 0, int64_t(memory.size()) - 1), row = place / (row_bytes + gap), byte = place % (row_bytes + gap);
    memory[place] ^= uint8_t(1 << draw(random, 0, 7));
    const std::vector<uint64_t> after = digests(call, first, count, 3);
    for (int64_t n = 0; n < count; n++) {
        const bool its = byte < row_bytes && (byte / 64 - (first + n) - row) % period == 0;
        if ((before[n] != after[n]) != its) return its ? "a digest misses a change" : "a digest has a line of another part";
    }
    return "";
}

}  // namespace saccade::sanitize

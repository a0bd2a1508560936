// The order in which tasks add to what they share, so that sums have the same bits for any number of threads.
#pragma once

#include <atomic>
#include <new>
#include <thread>

#include "simd.h"

namespace saccade {
namespace SACCADE_SET {

// A row of turns. A task waits until its turn has come, adds, and passes the turn on. It only ever waits for tasks with
// smaller numbers, which `parallel` has dealt before it.
class Turns {
  public:
    Turns() = default;
    Turns(std::atomic<int32_t>* turn, const std::atomic<bool>* failed) : turn_(turn), failed_(failed) {}
    explicit operator bool() const { return turn_; }

    // Before the first turn: from raw memory.
    void clear(int64_t count) const {
        for (int64_t n = 0; n < count; n++) new (turn_ + n) std::atomic<int32_t>(0);
    }

    // After a task has failed nothing is waited for: its exception is all that comes of the call.
    void wait(int64_t n, int64_t value) const {
        for (int tries = 0; turn_[n].load(std::memory_order_acquire) != value; tries++) {
            if (failed_->load(std::memory_order_relaxed)) return;
            if (tries < 1000) {
                pause();
            } else {
                std::this_thread::yield();
            }
        }
    }
    void pass(int64_t n, int64_t value) const { turn_[n].store((int32_t)value, std::memory_order_release); }

  private:
    std::atomic<int32_t>* turn_ = nullptr;
    const std::atomic<bool>* failed_ = nullptr;
};

}  // namespace SACCADE_SET
}  // namespace saccade

// Threads: PyTorch's own OpenMP team where it is there, so that two teams never fight over the cores.
#pragma once

#include <cstdint>

namespace saccade {

// Runs task(context, n, thread) for every n in [0, count), in ascending order of dealing, on at most `threads` threads
// (0 <= thread < threads). Returns when all are done. A task may wait for a task with a smaller number, never for a
// larger one. One thread, a forked child, or a call from within a parallel region: still every task is run.
// What a task throws ends the dealing and is thrown again here, on the caller's thread, when all threads have stopped.
void parallel(int threads, int64_t count, void (*task)(void* context, int64_t n, int thread), void* context);

template <class F> void parallel(int threads, int64_t count, F&& body) {
    parallel(threads, count, [](void* context, int64_t n, int thread) { (*static_cast<F*>(context))(n, thread); }, &body);
}

// Bytes of the second-level cache; 0 where the system does not tell.
int64_t second_level_cache();

// A buffer of the calling thread that is kept for its next call; aligned to 64 bytes, contents undefined.
// `slot` tells buffers apart that are used at the same time.
void* scratch(int slot, int64_t bytes);

// A large buffer for one call, aligned to 64 bytes; small ones are kept for the next call.
class Workspace {
  public:
    explicit Workspace(int64_t bytes);
    ~Workspace();
    Workspace(const Workspace&) = delete;
    void* data() const { return data_; }

  private:
    void* data_;
    int64_t bytes_;
};

}  // namespace saccade

#include "parallel.h"

#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <mutex>
#include <new>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#if defined(__linux__)
#include <link.h>
#endif

namespace saccade {
namespace {

// One region: threads take a seat each and draw the next task from a counter until there is none, so that whatever team
// really comes, one thread or all, does the whole work.
struct Region {
    int threads;
    int64_t count;
    void (*task)(void*, int64_t, int);
    void* context;
    std::atomic<int> seats{0};
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr failure = nullptr;

    void work() noexcept {
        const int thread = seats.fetch_add(1, std::memory_order_relaxed);
        if (thread >= threads) return;
        try {
            while (!failed.load(std::memory_order_relaxed)) {
                const int64_t n = next.fetch_add(1, std::memory_order_relaxed);
                if (n >= count) return;
                task(context, n, thread);
            }
        } catch (...) {  // no exception may leave a thread of the team: `parallel` throws it again on the caller's
            if (!failed.exchange(true)) failure = std::current_exception();
        }
    }
};

// void GOMP_parallel(void (*fn)(void *), void *data, unsigned num_threads, unsigned flags): what GCC makes of
// `#pragma omp parallel`. GNU's libgomp, LLVM's libomp and Intel's libiomp5 all export it.
using GompParallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

#if defined(__linux__)
void* library_of_torch() {
    void* found = nullptr;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            if (!info->dlpi_name || !std::strstr(info->dlpi_name, "libtorch_cpu")) return 0;
            *static_cast<void**>(data) = dlopen(info->dlpi_name, RTLD_LAZY | RTLD_NOLOAD);
            return 1;
        },
        &found);
    return found;
}
#else
void* library_of_torch() { return nullptr; }  // PyTorch loads its OpenMP globally there as well (untested)
#endif

// The entry point that PyTorch's own calls go to, found as the dynamic linker finds it for them: first what is global
// (PyTorch loads its runtime so; a preloaded one comes before it), then what libtorch_cpu depends on.
GompParallel find_openmp() {
    void* found = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    if (!found)
        if (void* torch = library_of_torch()) found = dlsym(torch, "GOMP_parallel");
    GompParallel entry = nullptr;
    std::memcpy(&entry, &found, sizeof entry);
    return entry;
}

// In a forked child the threads of the parent's team are gone but libgomp waits for them: never call it there again.
// Registered when the module is loaded, since PyTorch may have had a team before our first region.
std::atomic<bool> forked{false};
[[maybe_unused]] const int registered = pthread_atfork(nullptr, nullptr, [] { forked.store(true); });

void run_on_own_threads(Region& region, int threads) {
    std::vector<std::thread> team;
    try {
        team.reserve(threads - 1);
        while (static_cast<int>(team.size()) < threads - 1) team.emplace_back([&region] { region.work(); });
    } catch (const std::system_error&) {  // no more threads to be had: fewer do the work
    } catch (const std::bad_alloc&) {
    }
    region.work();
    for (auto& thread : team) thread.join();
}

constexpr size_t kHugePage = size_t(2) << 20;

// Aligned to 64 bytes; from 2 MiB on in huge pages where the system offers them, because touching fresh 4 KiB pages
// costs about as much as packing keys into them.
void* allocate(int64_t bytes) {
    const size_t size = static_cast<size_t>(bytes);
    void* data = nullptr;
    if (posix_memalign(&data, size < kHugePage ? 64 : kHugePage, size) != 0) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
    if (size >= kHugePage) madvise(data, size / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
    return data;
}

struct Block {
    void* data = nullptr;
    int64_t bytes = 0;

    void reserve(int64_t wanted) {
        if (wanted <= bytes) return;
        std::free(std::exchange(data, nullptr));
        bytes = 0;
        data = allocate(wanted);
        bytes = wanted;
    }
};

struct Scratch {
    std::vector<Block> slots;

    ~Scratch() {
        for (auto& block : slots) std::free(block.data);
    }
};

// Whoever finds the lock taken allocates: nobody waits, and a lock that was held while the process forked does no harm.
constexpr int64_t kSpareLimit = int64_t(64) << 20;
std::mutex spare_lock;
Block spare;

}  // namespace

void parallel(int threads, int64_t count, void (*task)(void*, int64_t, int), void* context) {
    if (threads <= 1 || count <= 1) {
        for (int64_t n = 0; n < count; n++) task(context, n, 0);
        return;
    }
    Region region{threads, count, task, context};
    static const GompParallel openmp = find_openmp();
    if (openmp && !forked.load(std::memory_order_relaxed)) {
        // Always the whole team, even for fewer tasks: libgomp ends the threads that a smaller team leaves out and
        // starts them again for the next one, and PyTorch asks for all of them (pytorch#32008).
        openmp([](void* data) { static_cast<Region*>(data)->work(); }, &region, static_cast<unsigned>(threads), 0);
    } else {
        run_on_own_threads(region, static_cast<int>(std::min<int64_t>(threads, count)));
    }
    if (region.failure) std::rethrow_exception(region.failure);
}

int64_t second_level_cache() {
#if defined(_SC_LEVEL2_CACHE_SIZE)
    static const int64_t told = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return told;
#else
    return 0;
#endif
}

void* scratch(int slot, int64_t bytes) {
    static thread_local Scratch own;
    const size_t index = static_cast<size_t>(slot);
    if (index >= own.slots.size()) own.slots.resize(index + 1);
    own.slots[index].reserve(bytes);
    return own.slots[index].data;
}

Workspace::Workspace(int64_t bytes) : data_(nullptr), bytes_(0) {
    Block block;
    if (bytes <= kSpareLimit && spare_lock.try_lock()) {
        block = std::exchange(spare, Block());
        spare_lock.unlock();
    }
    block.reserve(bytes);
    data_ = block.data;
    bytes_ = block.bytes;
}

Workspace::~Workspace() {
    Block block{data_, bytes_};
    if (block.bytes <= kSpareLimit && spare_lock.try_lock()) {
        if (block.bytes > spare.bytes) std::swap(block, spare);
        spare_lock.unlock();
    }
    std::free(block.data);
}

}  // namespace saccade

#include "dispatch.h"

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#if defined(__x86_64__)
#include <cpuid.h>
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace saccade {

#define SACCADE_HAS(name) extern const Kernels kernels_##name;
#include "sets.inc"  // written by CMake: SACCADE_HAS(name) for each set compiled, lowest first
#undef SACCADE_HAS

namespace {

constexpr const char* kVariable = "SACCADE_INSTRUCTIONS";

const Kernels* const kSets[] = {
#define SACCADE_HAS(name) &kernels_##name,
#include "sets.inc"
#undef SACCADE_HAS
};

std::atomic<const Kernels*> active{nullptr};

// What stands in the way of a set. Registers that the operating system does not save cannot be forced.
enum class Answer { yes, unreported, unsaved };

#if defined(__x86_64__)

struct Processor {
    bool avx2 = false, avx512 = false, avx512_bf16 = false, avx512_vnni = false;
    bool amx_int8 = false;
    bool saves_ymm = false, saves_zmm = false, saves_tiles = false;
    bool intel = false, amd = false;
    unsigned family = 0;
};

// Bit numbers: Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2, CPUID; volume 1, 13.3 (XCR0).
Processor ask_processor() {
    Processor found;
    auto bit = [](unsigned word, int n) { return ((word >> n) & 1) != 0; };
    unsigned a = 0, b = 0, c = 0, d = 0;
    found.intel = __get_cpuid(0, &a, &b, &c, &d) && b == 0x756e6547;  // "Genu"
    found.amd = b == 0x68747541;                              // "Auth"
    if (!__get_cpuid(1, &a, &b, &c, &d) || !bit(c, 27)) return found;  // OSXSAVE: XGETBV may be used
    found.family = ((a >> 8) & 0xf) + ((a >> 20) & 0xff);
    const bool fma = bit(c, 12), avx = bit(c, 28), f16c = bit(c, 29);
    unsigned xcr0 = 0, high = 0;
    __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
    found.saves_ymm = (xcr0 & 0x06) == 0x06;
    found.saves_zmm = (xcr0 & 0xe6) == 0xe6;
    found.saves_tiles = (xcr0 & 0x60000) == 0x60000;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return found;
    const unsigned last = a;
    found.avx2 = found.saves_ymm && avx && fma && f16c && bit(b, 5);
    found.avx512 = found.avx2 && found.saves_zmm && bit(b, 16) && bit(b, 17) && bit(b, 30) && bit(b, 31);  // F DQ BW VL
    found.avx512_vnni = found.avx512 && bit(c, 11);
    found.amx_int8 = found.avx512_vnni && found.saves_tiles && bit(d, 24) && bit(d, 25);
    if (last >= 1 && __get_cpuid_count(7, 1, &a, &b, &c, &d)) found.avx512_bf16 = found.avx512 && bit(a, 5);
    return found;
}

const Processor& known() {
    static const Processor processor = ask_processor();
    return processor;
}

// Whether a set that is there is also the better choice. Intel's vdpbf16ps does half the work of its float32 multipliers
// (Emerald Rapids: 81 against 167 GFLOP/s a core), so there bf16 is faster converted to float32; on AMD it does twice.
bool pays(const std::string& set) { return set != "avx512_bf16" || !known().intel; }

bool wide_amd() { return known().amd && known().family >= 26 && known().avx512; }
bool vnni() { return known().avx512_vnni; }

// Linux gives a process the registers' memory when it asks (Documentation/arch/x86/xstate.rst); PyTorch's oneDNN asks, too.
bool permitted_tiles() {
#if defined(__linux__)
    constexpr int request = 0x1023, tile_data = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return known().amx_int8 && syscall(SYS_arch_prctl, request, tile_data) == 0;
#else
    return false;
#endif
}

Answer ask(const std::string& set) {
    const Processor& processor = known();
    if (set == "baseline") return Answer::yes;
    if (!(set == "avx2" ? processor.saves_ymm : processor.saves_zmm)) return Answer::unsaved;
    const bool reported = set == "avx2" ? processor.avx2 : set == "avx512" ? processor.avx512 : processor.avx512_bf16;
    return reported ? Answer::yes : Answer::unreported;
}

#else

bool pays(const std::string&) { return true; }
bool wide_amd() { return false; }
bool vnni() { return false; }
bool permitted_tiles() { return false; }

// NEON belongs to every 64-bit ARM processor. Other architectures: only `baseline` is compiled (untested).
Answer ask(const std::string& set) {
    if (set != "neon_bf16") return Answer::yes;
    bool reported = false;
#if defined(__aarch64__) && defined(__linux__)
    reported = (getauxval(AT_HWCAP2) >> 14) & 1;  // HWCAP2_BF16, "ARM64 ELF hwcaps" of Linux's documentation
#elif defined(__aarch64__) && defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    reported = sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, nullptr, 0) == 0 && has;
#endif
    return reported ? Answer::yes : Answer::unreported;
}

#endif

std::string joined(const std::vector<std::string>& names) {
    std::string text;
    for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
    return text;
}

const Kernels* best() {
    const Kernels* found = kSets[0];
    for (const Kernels* set : kSets)
        if (ask(set->name) == Answer::yes && pays(set->name)) found = set;
    return found;
}

const Kernels* compiled(const std::string& name) {
    for (const Kernels* set : kSets)
        if (name == set->name) return set;
    return nullptr;
}

const Kernels* named(const std::string& source, const std::string& text) {
    if (text == "auto") return best();
    const bool forced = !text.empty() && text.back() == '!';
    const std::string name = forced ? text.substr(0, text.size() - 1) : text;
    const std::string told = source + " names the instruction set '" + name + "', which ";
    const std::string there = "; this processor has " + joined(supported_sets());
    const Kernels* set = compiled(name);
    if (!set)
        throw std::invalid_argument(told + "is not in this build: expected auto, " + joined(compiled_sets()) + there);
    const Answer answer = ask(name);
    if (answer == Answer::unsaved)
        throw std::invalid_argument(told + "needs registers that the operating system does not save" + there);
    if (answer == Answer::unreported && !forced)
        throw std::invalid_argument(told + "this processor does not report" + there + " ('" + name +
                                    "!' forces it, where a hypervisor hides what is there)");
    return set;
}

}  // namespace

std::vector<std::string> compiled_sets() {
    std::vector<std::string> names;
    for (const Kernels* set : kSets) names.emplace_back(set->name);
    return names;
}

std::vector<std::string> supported_sets() {
    std::vector<std::string> names;
    for (const Kernels* set : kSets)
        if (ask(set->name) == Answer::yes) names.emplace_back(set->name);
    return names;
}

const Kernels& kernels() {
    const Kernels* set = active.load(std::memory_order_acquire);
    if (!set) {
        const char* wanted = std::getenv(kVariable);
        const Kernels* chosen = wanted && *wanted ? named(kVariable, wanted) : best();
        // Another thread may have chosen, or called `use`, meanwhile: that stands.
        if (active.compare_exchange_strong(set, chosen)) set = chosen;
    }
    return *set;
}

bool mkl_at_half() { return wide_amd(); }

bool sums_quads() { return vnni(); }

bool sums_tiles() {
    static const bool there = permitted_tiles();
    return there;
}

void use(const std::string& name) { active.store(named("use()", name), std::memory_order_release); }

}  // namespace saccade

// Which of the compiled instruction sets runs: chosen once, by what the processor reports, or by name.
#pragma once

#include <string>
#include <vector>

#include "call.h"

namespace saccade {

// Names of the sets in this build, lowest first; each contains the one before it.
std::vector<std::string> compiled_sets();

// Those of them that this processor reports and whose registers the operating system saves, lowest first.
std::vector<std::string> supported_sets();

// The kernels in use. The first call chooses: the set that the environment variable SACCADE_INSTRUCTIONS names (as
// `use` takes it), otherwise the highest supported one that pays on this processor. Throws std::invalid_argument while that variable is wrong.
const Kernels& kernels();

// Switches to a set for the whole process: "auto", the name of a supported set, or a compiled set's name with a trailing
// "!" for an instruction set that the processor has and a hypervisor hides. At one's own risk: where the processor does
// not have it, the process ends with SIGILL. Throws std::invalid_argument that says what there is.
void use(const std::string& name);

// Whether the processor has AVX512_VNNI, sums of four products of bytes.
bool sums_quads();

// Whether the processor has AMX-INT8, and Linux lets this process use its registers. The first call asks for them.
bool sums_tiles();

// Whether the processor multiplies 512 bits at once and is not Intel's, so that MKL, which takes AVX2 there, leaves half of its
// multipliers idle: AMD's from family 26 (Zen 5) on.
bool mkl_at_half();

}  // namespace saccade

// Masks for Python: see mask_bindings.cpp.
#pragma once

#include <nanobind/nanobind.h>

namespace saccade {

void bind_mask(nanobind::module_& module);

}  // namespace saccade

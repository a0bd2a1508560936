// The module saccade._native.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "dispatch.h"

namespace nb = nanobind;

NB_MODULE(_native, module) {
    module.def("compiled_sets", &saccade::compiled_sets, "Names of the instruction sets in this build, lowest first.");
    module.def("sets", &saccade::supported_sets, "Those of them that this processor reports, lowest first.");
    module.def("active", [] { return saccade::kernels().name; }, "The instruction set in use.");
    module.def("use", &saccade::use, nb::arg("name"),
               "Switch to 'auto', to a set of `sets()`, or, at one's own risk, to a compiled one as 'name!'.");
}

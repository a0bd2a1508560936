#!/usr/bin/env bash
# Build the compiled module beside the Python sources, for work on the kernels: bash native/build_in_place.sh [CMake options]
# PYTHON names the interpreter (default: python3), BUILD_DIR the build folder (default: build/native).
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
"$python" -c "import nanobind" || { echo "$python has no nanobind: name another interpreter, PYTHON=..., or install it there" >&2; exit 1; }
build=${BUILD_DIR:-build/native}
mkdir -p "$build"

exec 9>"$build/lock" # one build at a time: the next one waits, and finds most of its work done
flock 9
options=(-S . -B "$build" -DPython_EXECUTABLE="$(command -v "$python")")
if command -v ninja >/dev/null; then options+=(-G Ninja); fi
cmake "${options[@]}" "$@" >"$build/configure.log" 2>&1 || { cat "$build/configure.log" >&2; exit 1; }
cmake --build "$build" --parallel "${JOBS:-2}" --target _native
module=$(ls -t "$build"/_native*.so | head -1)
"$python" -c 'import sys; from importlib.util import module_from_spec as make, spec_from_file_location as spec
make(spec("_native", sys.argv[1]))' "$module" # what cannot be loaded does not replace what can
cp "$module" "src/saccade/.$(basename "$module").new"
mv "src/saccade/.$(basename "$module").new" "src/saccade/$(basename "$module")" # in one step: running processes keep the old one
echo "src/saccade/$(basename "$module")"

#!/usr/bin/env bash
# Run the kernels on random problems under AddressSanitizer with UndefinedBehaviorSanitizer, and under ThreadSanitizer:
#   bash native/sanitize.sh [address,undefined | thread | none] [options of native/sanitize.cpp]
# Without the first word both are run, the address sanitizer once more on OpenMP's threads. `none` is the same check at
# full speed. ThreadSanitizer does not know libgomp, so it watches Saccade's own threads, which run the same regions.
# An instruction set that the processor has and does not report is asked for by name: bash native/sanitize.sh none 'avx512_bf16!'
set -euo pipefail
cd "$(dirname "$0")/.."

check() { # sanitizers, options of the driver
    local kind=$1 build=build/sanitize-${1/,/-}
    shift
    local options=(-S . -B "$build" -DSACCADE_SANITIZE="$kind")
    if command -v ninja >/dev/null; then options+=(-G Ninja); fi
    mkdir -p "$build"
    cmake "${options[@]}" >"$build/configure.log" 2>&1 || { cat "$build/configure.log" >&2; exit 1; }
    cmake --build "$build" --parallel "${JOBS:-2}" --target sanitize
    echo "== $kind: sanitize $*"
    # Not detect_stack_use_after_return: GCC 12 misaligns vectors of 64 bytes on that stack.
    ASAN_OPTIONS=detect_stack_use_after_return=0 UBSAN_OPTIONS=print_stacktrace=1 TSAN_OPTIONS=halt_on_error=1 \
        "$build/sanitize" "$@"
}

case ${1:-} in
    address* | undefined* | thread* | none) check "$@" ;;
    *)
        check address,undefined "$@"
        check address,undefined --openmp "$@"
        check thread "$@"
        ;;
esac

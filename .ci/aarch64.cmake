# Cross-compilation for 64-bit ARM Linux, with Debian's g++-aarch64-linux-gnu: cmake -DCMAKE_TOOLCHAIN_FILE=.ci/aarch64.cmake
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)

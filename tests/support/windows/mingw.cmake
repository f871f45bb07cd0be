# Windows programs by mingw-w64 (Debian: apt-get install mingw-w64).

set(CMAKE_SYSTEM_NAME Windows)
set(CMAKE_SYSTEM_PROCESSOR x86_64)
set(CMAKE_C_COMPILER x86_64-w64-mingw32-gcc-posix)
set(CMAKE_CXX_COMPILER x86_64-w64-mingw32-g++-posix)
# ggml asks for threads of Windows 8 that the headers of mingw-w64 10 do not declare.
set(CMAKE_C_FLAGS_INIT -D_WIN32_WINNT=0x0601)
set(CMAKE_CXX_FLAGS_INIT -D_WIN32_WINNT=0x0601)

# The sources of libmtp_kernels. Each file in lanes/ sets its own instruction set.
set(MTP_KERNELS_SOURCES)
foreach(source
        attention columns delta_net experts fewer_threads fusions ggml_api grids huge_pages plug products proof rows states team
        lanes/lanes lanes/lanes-avx2 lanes/lanes-avx-vnni lanes/lanes-avx512 lanes/lanes-avx512-vnni
        lanes/lanes-neon-dotprod lanes/lanes-neon-i8mm)
    list(APPEND MTP_KERNELS_SOURCES ${CMAKE_CURRENT_LIST_DIR}/src/${source}.cpp)
endforeach()

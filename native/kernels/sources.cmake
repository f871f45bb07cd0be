# The sources of libmtp_kernels. Each file in lanes/ sets its own instruction set.
set(MTP_KERNELS_SOURCES)
foreach(source
        attention choices columns delta_net experts fewer_threads fusions ggml_api grids huge_pages limits products read_ahead registration rows self_test states thread_team
        lanes/lanes lanes/lanes-avx2 lanes/lanes-avx-vnni lanes/lanes-avx512 lanes/lanes-avx512-vnni lanes/lanes-amx
        lanes/lanes-neon-dotprod lanes/lanes-neon-i8mm)
    list(APPEND MTP_KERNELS_SOURCES ${CMAKE_CURRENT_LIST_DIR}/src/${source}.cpp)
endforeach()

# Of all sources, so that what was measured with others is measured anew.
file(GLOB_RECURSE MTP_KERNELS_ALL ${CMAKE_CURRENT_LIST_DIR}/src/*.cpp ${CMAKE_CURRENT_LIST_DIR}/src/*.h)
set(MTP_KERNELS_VERSION "")
foreach(source ${MTP_KERNELS_ALL})
    file(SHA256 ${source} digest)
    string(APPEND MTP_KERNELS_VERSION ${digest})
endforeach()
string(SHA256 MTP_KERNELS_VERSION "${MTP_KERNELS_VERSION}")
string(SUBSTRING ${MTP_KERNELS_VERSION} 0 16 MTP_KERNELS_VERSION)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${MTP_KERNELS_ALL})
set_source_files_properties(${CMAKE_CURRENT_LIST_DIR}/src/choices.cpp PROPERTIES
    COMPILE_DEFINITIONS MTP_KERNELS_VERSION="${MTP_KERNELS_VERSION}")

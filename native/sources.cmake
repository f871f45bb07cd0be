# The files of the head and of the choice of depth, which know ggml and nothing of llama.cpp: part
# of libmtp, and compiled into llama-server by patches/ (build-server puts this folder into the tree).
set(MTP_HEAD_INCLUDE ${CMAKE_CURRENT_LIST_DIR}/include)
set(MTP_HEAD_SOURCES
    ${CMAKE_CURRENT_LIST_DIR}/src/acceptance.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/corpus.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/corpus_api.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/costs.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/depth.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/depth_api.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/depth_batch.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/draft_graph.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/draft_vocabulary.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/drafter.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/error.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/file_map.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/gguf_file.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/head.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/head_api.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/head_cache.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/head_config.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/hidden_rows.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/imatrix.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/imatrix_api.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/packed_tensors.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/suffix_index.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/suffix_index_api.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/text_drafts.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/text_drafts_api.cpp
    ${CMAKE_CURRENT_LIST_DIR}/src/weights.cpp)

# The one list of the C++ sources of libmtp, with paths for every CMakeLists.txt that includes this file.

# What drafts, for sessions and for llama-server: the head, the drafts from the text, the choice of depth and
# the driver over them. It knows ggml and nothing of llama.cpp. patches/ compile it into llama-server, into
# whose tree build-server copies this folder without session/.
set(MTP_HEAD_INCLUDE ${CMAKE_CURRENT_LIST_DIR}/include ${CMAKE_CURRENT_LIST_DIR}/src)
set(MTP_HEAD_SOURCES
    src/depth_file.cpp
    src/draft_ring.cpp
    src/drafter.cpp
    src/error.cpp
    src/file_map.cpp
    src/logprobs.cpp
    src/sequence_state.cpp
    src/session_file.cpp
    src/session_file_api.cpp
    src/token_likeness.cpp
    src/depth/acceptance.cpp
    src/depth/costs.cpp
    src/depth/depth.cpp
    src/depth/depth_api.cpp
    src/depth/depth_batch.cpp
    src/depth/depth_state.cpp
    src/head/draft_graph.cpp
    src/head/draft_vocabulary.cpp
    src/head/gguf_file.cpp
    src/head/head.cpp
    src/head/head_api.cpp
    src/head/head_cache.cpp
    src/head/head_config.cpp
    src/head/hidden_rows.cpp
    src/head/imatrix.cpp
    src/head/imatrix_api.cpp
    src/head/packed_tensors.cpp
    src/head/token_symbols.cpp
    src/head/weights.cpp
    src/lookup/corpus.cpp
    src/lookup/corpus_api.cpp
    src/lookup/suffix_index.cpp
    src/lookup/suffix_index_api.cpp
    src/lookup/text_drafts.cpp
    src/lookup/text_drafts_api.cpp)

# What else libmtp has: sessions over a llama.cpp context, the log, and reports of crashes.
set(MTP_SESSION_SOURCES
    src/crashes.cpp
    src/log.cpp
    src/session/checkpoint.cpp
    src/session/checkpoint_api.cpp
    src/session/nextn.cpp
    src/session/runtime.cpp
    src/session/sampling.cpp
    src/session/session.cpp
    src/session/session_api.cpp
    src/session/session_checkpoint.cpp
    src/session/trunk.cpp
    src/session/trunk_state.cpp)

foreach(list MTP_HEAD_SOURCES MTP_SESSION_SOURCES)
    list(TRANSFORM ${list} PREPEND "${CMAKE_CURRENT_LIST_DIR}/")
endforeach()

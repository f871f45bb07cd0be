/* mtp_chat.h: llama.cpp's chat layer for Python. It renders conversations with a model's chat template, makes the
 * grammar of the tool calls that the model may answer with, and reads answers in the format of the model's family.
 *
 * Requests, rendered conversations and messages are JSON texts in UTF-8 that end with a null byte. A call that makes a
 * text returns its number of bytes without the null byte; mtp_chat_result and mtp_chat_answer_result copy it. Every call that can fail returns
 * an mtp_chat_status and stores a sentence for mtp_chat_last_error(). No C++ type and no exception crosses this header.
 * A handle must not be used by two threads at the same time. */
#ifndef MTP_CHAT_H
#define MTP_CHAT_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define MTP_CHAT_API __attribute__((visibility("default")))

/* Increased whenever a signature below changes. */
#define MTP_CHAT_API_VERSION 2

typedef enum mtp_chat_status {
    MTP_CHAT_OK             = 0,
    MTP_CHAT_ERROR_REQUEST  = 1, /* the request is malformed, or the template refuses it */
    MTP_CHAT_ERROR_TEMPLATE = 2, /* the chat template is malformed */
    MTP_CHAT_ERROR_ANSWER   = 3, /* the answer does not have the format that the template asks for */
    MTP_CHAT_ERROR_MEMORY   = 4, /* an allocation failed */
} mtp_chat_status;

struct llama_model;
struct llama_sampler;

typedef struct mtp_chat        mtp_chat;        /* a chat template */
typedef struct mtp_chat_answer mtp_chat_answer; /* an answer that is being read */

MTP_CHAT_API int32_t mtp_chat_api_version(void);

/* Returns the sentence of this thread's last failed call, which stays valid until the next one fails. */
MTP_CHAT_API const char * mtp_chat_last_error(void);

/* Reads a Jinja template. bos, eos: the texts of these tokens, "" for none. */
MTP_CHAT_API mtp_chat_status mtp_chat_open(const char * source, const char * bos, const char * eos, mtp_chat ** out);
MTP_CHAT_API void            mtp_chat_close(mtp_chat * chat);

/* Renders a request to /v1/chat/completions of llama-server, of which `messages`, `tools`, `tool_choice`,
 * `parallel_tool_calls`, `json_schema`, `reasoning_format`, `reasoning_effort`, `chat_template_kwargs`,
 * `add_generation_prompt`, `continue_final_message`, `truncation` and `max_tokens` are read. The result is an object with
 * `prompt`, `grammar`, `grammar_lazy`, `grammar_triggers`, `stops`, `preserved_tokens`, `generation_prompt`,
 * `thinking_start_tag`, `thinking_end_tags`, `dropped_messages`, and what mtp_chat_answer_open reads.
 * model, n_ctx: with a `truncation` of "auto", the oldest turns are left out if the model's tokens of the conversation
 * do not fit a context of n_ctx (server/old_turns.h). Pictures, which are markers in the texts, are counted with
 * `media`, an object with the `marker` and the number of `tokens` of each picture. */
MTP_CHAT_API mtp_chat_status mtp_chat_render(mtp_chat * chat, const char * request, const struct llama_model * model,
                                             size_t n_ctx, size_t * size);

/* Begins to read an answer. rendered: the result of mtp_chat_render. */
MTP_CHAT_API mtp_chat_status mtp_chat_answer_open(const char * rendered, mtp_chat_answer ** out);
MTP_CHAT_API void            mtp_chat_answer_close(mtp_chat_answer * answer);

/* Adds a part of the answer's text, which begins and ends between characters. is_last: whether the answer is complete.
 * The result is an object with `message`, all that was read so far, and `deltas`, the list of its changes as OpenAI's
 * API streams them. */
MTP_CHAT_API mtp_chat_status mtp_chat_answer_add(mtp_chat_answer * answer, const char * text, size_t n, int is_last,
                                                 size_t * size);

/* Copy the last result, a null byte included, to `out`, which has room for capacity bytes. */
MTP_CHAT_API mtp_chat_status mtp_chat_result(const mtp_chat * chat, char * out, size_t capacity);
MTP_CHAT_API mtp_chat_status mtp_chat_answer_result(const mtp_chat_answer * answer, char * out, size_t capacity);

/* Makes the sampler of an answer: the grammar of a rendered conversation, which constrains tool calls only and no
 * thinking if it is lazy, and a budget of `thinking_tokens` tokens of thinking (-1: none), after which `end` and the
 * first thinking_end_tag are forced. NULL if there is nothing to constrain. The caller owns it (llama_sampler_free). */
MTP_CHAT_API mtp_chat_status mtp_chat_sampler(const struct llama_model * model, const char * rendered,
                                              int32_t thinking_tokens, const char * end, struct llama_sampler ** out);

#ifdef __cplusplus
}
#endif

#endif /* MTP_CHAT_H */

"""Fields of requests: of chats, of completions, and of both."""

from typing import Any

from tests.support.compatibility.rows import FieldRow, Status

DIFFERS, REFUSED, LISTED = Status.DIFFERS, Status.REFUSED, Status.LISTED

FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS = {"tools": [{"type": "function", "function": FUNCTION}]}
STREAM = {"stream": True}
BEAMS = {"use_beam_search": True, "n": 2}
ENDED, ENDED_LATE = ({**BEAMS, "stop_token_ids": [token]} for token in (540, 539))
"""With beams that end early, so that it matters how ends are weighed. The engine of the tests follows 539 by 540."""
USER = {"role": "user", "content": "one two three one two three"}

BOTH = (
    FieldRow("model", "nobody", status_code=404, note="any served name; answers carry the first; others are 404"),
    FieldRow("max_tokens", 2, note="never more than what fits"),
    FieldRow("temperature", 0.7, note="0 is greedy; small values are not raised to 0.01"),
    FieldRow("top_p", 0.5),
    FieldRow("top_k", 5, note="0 and -1: off"),
    FieldRow("min_p", 0.1),
    FieldRow("presence_penalty", 0.5),
    FieldRow("frequency_penalty", 0.5),
    FieldRow("repetition_penalty", 1.2, DIFFERS, note="0.01 to 100"),
    FieldRow("n", 2, DIFFERS, note="up to 1024 choices of all prompts; also with temperature 0"),
    FieldRow("best_of", 3, REFUSED, note="1, or equal to `n`, is accepted"),
    FieldRow("seed", 7, note="-1: none; choice i uses seed + i"),
    FieldRow("stop", ["two"], note="up to 4 texts"),
    FieldRow("stop_token_ids", [504]),
    FieldRow("include_stop_str_in_output", True, beside={"stop": ["two"]}),
    FieldRow("ignore_eos", True),
    FieldRow("min_tokens", 2),
    FieldRow("bad_words", ["one"]),
    FieldRow("logit_bias", {"7": 5}, note="values are cut to -100..100"),
    FieldRow("allowed_token_ids", [7, 8]),
    FieldRow("prompt_logprobs", 1, note="not in streams"),
    FieldRow("logprob_token_ids", [7], beside={"logprobs": True}),
    FieldRow("stream", True),
    FieldRow("stream_options", {"include_usage": True}, beside=STREAM, note="400 without `stream`"),
    FieldRow("stream_interval", 3, beside=STREAM, note="without `stream` listed"),
    FieldRow("structured_outputs", {"choice": ["a", "b"]}),
    FieldRow("response_format", {"type": "json_object"}),
    FieldRow("skip_special_tokens", False),
    FieldRow("spaces_between_special_tokens", False, REFUSED, note="`true`, the default, is what happens"),
    FieldRow("truncate_prompt_tokens", 2),
    FieldRow("truncation_side", "right", beside={"truncate_prompt_tokens": 2}, note="alone listed"),
    FieldRow("priority", 3, needs="--scheduling-policy priority"),
    FieldRow("cache_salt", "tenant"),
    FieldRow("request_id", "mine", note="the header `X-Request-Id` wins"),
    FieldRow(
        "return_tokens_as_token_ids", True, beside={"prompt_logprobs": 0}, note="without log-probabilities listed"
    ),
    FieldRow("return_token_ids", True),
    FieldRow("use_beam_search", True, DIFFERS, beside={"n": 2}, note="not with fields about sampling, nor in streams"),
    FieldRow("length_penalty", 3.0, beside=ENDED_LATE, note="without beam search listed"),
    FieldRow("early_stopping", True, beside=ENDED, note="without beam search listed"),
    FieldRow("repetition_detection", {"max_pattern_size": 20, "min_count": 2}, beside={"max_tokens": 60}),
    FieldRow("user", "me", LISTED),
    FieldRow("session_id", "s", LISTED),
    FieldRow("kv_transfer_params", {"a": 1}, REFUSED),
    FieldRow("ec_transfer_params", {"a": 1}, REFUSED),
    FieldRow("vllm_xargs", {"a": 1}, REFUSED),
    FieldRow("prompt_embeds", "x", REFUSED),
    FieldRow("multi_modal_data", {"image": "x"}, REFUSED, note="messages have the media"),
    FieldRow("media_io_kwargs", {"image": {}}, REFUSED, note="taken in chats with media, with the flag for it"),
    FieldRow("mm_processor_kwargs", {"a": 1}, REFUSED, note="taken in chats with media, with the flag for it"),
    FieldRow("guided_json", {}, REFUSED, note="`structured_outputs`, `response_format`"),
    FieldRow("guided_regex", "a", REFUSED, note="`structured_outputs`"),
    FieldRow("guided_choice", ["a"], REFUSED, note="`structured_outputs`"),
    FieldRow("guided_grammar", "a", REFUSED, note="`structured_outputs`"),
    FieldRow("guided_decoding_backend", "a", REFUSED, note="a flag chooses"),
    FieldRow("guided_whitespace_pattern", "a", REFUSED, note="`structured_outputs`"),
)

CHAT = (
    FieldRow("messages", [{"role": "user", "content": "three"}]),
    FieldRow("max_completion_tokens", 2, note="wins over `max_tokens`"),
    FieldRow("logprobs", True),
    FieldRow("top_logprobs", 2, beside={"logprobs": True}, note="400 without `logprobs`"),
    FieldRow(
        "echo",
        True,
        beside={"messages": [USER, {"role": "assistant", "content": "one"}]},
        note="listed unless the assistant spoke last",
    ),
    FieldRow("add_special_tokens", True, note="false by default: the chat template has them"),
    FieldRow("add_generation_prompt", False),
    FieldRow("continue_final_message", True, beside={"messages": [USER, {"role": "assistant", "content": "one"}]}),
    FieldRow("chat_template", "one two {{ messages[0].content }}", needs="--trust-request-chat-template"),
    FieldRow(
        "chat_template_kwargs", {"enable_thinking": True}, note="names that the template does not read are listed"
    ),
    FieldRow("documents", [{"text": "x"}], note="listed where the template does not read them"),
    FieldRow("reasoning_effort", "high", note="400 where the template does not know it"),
    FieldRow("include_reasoning", False, note="listed without a reasoning parser"),
    FieldRow("thinking_token_budget", 5, needs="--reasoning-parser"),
    FieldRow("tools", TOOLS["tools"], note="`custom` ones are refused"),
    FieldRow("tool_choice", "required", beside=TOOLS, note="also `allowed_tools`; forced calls need no parser"),
    FieldRow("parallel_tool_calls", False, beside={**TOOLS, "tool_choice": "required"}),
    FieldRow("functions", [FUNCTION], note="answered with `function_call`"),
    FieldRow("function_call", {"name": "f"}, beside={"functions": [FUNCTION]}),
    FieldRow("return_prompt_text", True, note="in `prompt_text`"),
    FieldRow("modalities", ["text", "audio"], REFUSED, note='`["text"]` is accepted'),
    FieldRow("audio", {"voice": "x"}, REFUSED),
    FieldRow("suffix", "x", REFUSED),
    *(
        FieldRow(name, value, LISTED)
        for name, value in (
            ("metadata", {"a": "b"}),
            ("moderation", {"a": "b"}),
            ("prediction", {"type": "content", "content": "x"}),
            ("prompt_cache_key", "k"),
            ("prompt_cache_options", {"a": "b"}),
            ("prompt_cache_retention", "24h"),
            ("safety_identifier", "s"),
            ("service_tier", "auto"),
            ("store", True),
            ("verbosity", "low"),
            ("web_search_options", {}),
        )
    ),
)

COMPLETIONS = (
    FieldRow("prompt", ["one", "two"], note="text, texts, ids or lists of ids; up to 1024"),
    FieldRow("logprobs", 2),
    FieldRow("echo", True, note="with `max_tokens` 0 the prompt alone"),
    FieldRow("add_special_tokens", False, note="true by default"),
    FieldRow("suffix", "x", REFUSED, note="works for models that fill in the middle"),
    FieldRow("max_completion_tokens", 2, LISTED),
    *(
        FieldRow(name, value, REFUSED)
        for name, value in (
            ("tools", TOOLS["tools"]),
            ("tool_choice", "required"),
            ("functions", [FUNCTION]),
            ("function_call", "auto"),
            ("thinking_token_budget", 5),
            ("include_reasoning", False),
            ("chat_template", "x"),
            ("return_prompt_text", True),
            ("modalities", ["text", "audio"]),
            ("audio", {"voice": "x"}),
        )
    ),
)

VECTORS = (
    FieldRow("model", "nobody", status_code=404, note="any served name; answers carry the first; others are 404"),
    FieldRow("truncate_prompt_tokens", 2, note="tokens that the tokenizer puts around texts stay"),
    FieldRow(
        "truncation_side",
        "left",
        beside={"truncate_prompt_tokens": 2},
        note="else texts keep their beginning; alone listed, and `left` by models for pairs",
    ),
    FieldRow("add_special_tokens", False, note="false is listed by models for pairs"),
    FieldRow("priority", 3, needs="--scheduling-policy priority"),
    FieldRow("request_id", "mine", note="the header `X-Request-Id` wins"),
    FieldRow("mm_processor_kwargs", {"a": 1}, REFUSED),
    FieldRow("user", "me", LISTED),
)
EMBEDDINGS = (
    FieldRow("input", ["one", "two"], note="up to 2048 texts or lists of token ids"),
    FieldRow("encoding_format", "base64", note="`float` or `base64`"),
    FieldRow("dimensions", 2, DIFFERS, note="of any model; the vector is cut, then brought to length 1"),
    FieldRow("use_activation", False, note="vectors keep their length"),
    FieldRow("normalize", False, note="as `use_activation`"),
    FieldRow("messages", [USER], REFUSED),
    FieldRow("embed_dtype", "float16", REFUSED, note="`float32`, the default, is accepted"),
    FieldRow("endianness", "big", REFUSED, note="`native` and `little` are accepted"),
)
SCORES = (
    FieldRow("text_1", ["four", "five"], note="one text, or as many as `text_2`; `queries` is the same"),
    FieldRow("text_2", ["two", "six"]),
    FieldRow("queries", ["x"], REFUSED, note="beside `text_1`; alone it is the same"),
    FieldRow("documents", ["x"], REFUSED, note="beside `text_2`; alone it is the same"),
    FieldRow("use_activation", False, LISTED, note="of models for pairs: scores are not brought between 0 and 1"),
)
RERANKS = (
    FieldRow("query", "four five"),
    FieldRow("documents", ["six", {"text": "two"}], note="strings, or objects with a `text`"),
    FieldRow("top_n", 1, note="0: all"),
    FieldRow("return_documents", False, note="true by default"),
    FieldRow("use_activation", False, LISTED, note="as in `/v1/score`"),
)
FIELDS: dict[str, tuple[FieldRow, ...]] = {
    "/v1/chat/completions": BOTH + CHAT,
    "/v1/completions": BOTH + COMPLETIONS,
    "/v1/embeddings": VECTORS + EMBEDDINGS,
    "/v1/score": VECTORS + SCORES,
    "/v1/rerank": VECTORS + RERANKS,
}
BASES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/completions": {"prompt": "one two three one two three"},
    "/v1/embeddings": {"input": "one two three"},
    "/v1/score": {"text_1": "one two three", "text_2": ["two four five", "one six seven"]},
    "/v1/rerank": {"query": "one two three", "documents": ["two four five", "one six seven"]},
}
"""What a request has beside the field that is tried, and `common_fields`."""
VECTOR_PATHS = frozenset({"/v1/embeddings", "/v1/score", "/score", "/v1/rerank", "/rerank", "/v2/rerank"})
"""Routes of models that make vectors."""


def common_fields(path: str) -> dict[str, Any]:
    """What every request to a route has."""
    common: dict[str, Any] = {"request_id": "same", "model": "smol"}
    return common if path in VECTOR_PATHS else common | {"max_tokens": 4, "temperature": 0}

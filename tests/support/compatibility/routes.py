"""Routes of OpenAI's API and of vLLM."""

from tests.support.compatibility.rows import RouteRow, Status

_MESSAGES = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}

ROUTES = (
    RouteRow("POST", "/v1/chat/completions", body=_MESSAGES),
    RouteRow("POST", "/v1/completions", body={"prompt": "x", "max_tokens": 1}),
    RouteRow("POST", "/v1/embeddings", body={"input": "x"}, note="of models that make vectors, else 400"),
    RouteRow("POST", "/v1/score", body={"text_1": "x", "text_2": "y"}, note="as `/v1/embeddings`"),
    RouteRow("POST", "/score", body={"text_1": "x", "text_2": "y"}, note="as `/v1/score`"),
    RouteRow("POST", "/v1/rerank", body={"query": "x", "documents": ["y"]}, note="as `/v1/embeddings`"),
    RouteRow("POST", "/rerank", body={"query": "x", "documents": ["y"]}, note="as `/v1/rerank`"),
    RouteRow("POST", "/v2/rerank", body={"query": "x", "documents": ["y"]}, note="as `/v1/rerank`"),
    RouteRow("GET", "/v1/models"),
    RouteRow("GET", "/v1/models/{model_id}"),
    RouteRow("POST", "/tokenize", body={"prompt": "x"}),
    RouteRow("POST", "/detokenize", body={"tokens": [7]}),
    RouteRow("GET", "/health", Status.DIFFERS, note="503 also while loading, draining or stalled; the body says why"),
    RouteRow("GET", "/ping", Status.DIFFERS, note="as `/health`"),
    RouteRow("POST", "/ping", Status.DIFFERS, note="as `/health`"),
    RouteRow("GET", "/version"),
    RouteRow("GET", "/metrics", note="names begin with `tokenmill:` or, by a flag, `vllm:`"),
    RouteRow(
        "GET",
        "/load",
        Status.DIFFERS,
        needs="--enable-server-load-tracking",
        note="sequences that wait or run, of all API servers together",
    ),
    RouteRow("GET", "/tokenizer_info", needs="--enable-tokenizer-info-endpoint"),
    RouteRow("GET", "/openapi.json"),
    RouteRow("GET", "/docs"),
    RouteRow("GET", "/redoc"),
    *(
        RouteRow(method, path, Status.ABSENT)
        for method, path in (
            ("POST", "/v1/chat/completions/batch"),
            ("POST", "/v1/responses"),
            ("POST", "/v1/messages"),
            ("POST", "/v1/audio/transcriptions"),
            ("POST", "/v1/audio/translations"),
            ("POST", "/pooling"),
            ("POST", "/classify"),
            ("POST", "/invocations"),
            ("POST", "/v1/load_lora_adapter"),
            ("POST", "/sleep"),
            ("POST", "/reset_prefix_cache"),
            ("POST", "/start_profile"),
            ("POST", "/inference/v1/generate"),
        )
    ),
)

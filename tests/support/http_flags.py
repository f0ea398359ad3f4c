"""Flags of the HTTP front end with the field of the configuration where each ends, and its value there."""

HTTP_CASES: list[tuple[list[str], str, object]] = [
    (
        ["--default-chat-template-kwargs", '{"enable_thinking": false}'],
        "server.default_chat_template_kwargs",
        {"enable_thinking": False},
    ),
    (["--sse-keep-alive-interval", "2.5"], "server.sse_keep_alive_s", 2.5),
    (["--enable-log-requests"], "server.log_requests", True),
    (["--return-tokens-as-token-ids"], "server.return_tokens_as_token_ids", True),
    (["--enable-force-include-usage"], "server.force_include_usage", True),
    (["--disable-fastapi-docs"], "server.disable_docs", True),
    (["--enable-per-request-metrics"], "server.per_request_metrics", True),
    (["--strict-fields"], "server.strict_fields", True),
    (["--max-num-queued-reqs", "7"], "server.max_num_queued_reqs", 7),
    (["--max-num-queued-tokens", "8k"], "server.max_num_queued_tokens", 8000),
    (["--allowed-origins", '["https://a", "b"]'], "server.allowed_origins", ("https://a", "b")),
    (["--allowed-origins", "https://a", "b"], "server.allowed_origins", ("https://a", "b")),
    (["--allowed-methods", "GET"], "server.allowed_methods", ("GET",)),
    (["--allowed-headers", '["x-a"]'], "server.allowed_headers", ("x-a",)),
    (["--allow-credentials"], "server.allow_credentials", True),
    (["--root-path", "/llm/"], "server.root_path", "/llm"),
    (["--disable-webui"], "server.disable_webui", True),
    (["--trust-request-chat-template"], "server.trust_request_chat_template", True),
]

TLS_FIELDS = [f"server.ssl_{name}" for name in ("certfile", "keyfile", "ca_certs", "cert_reqs", "ciphers")]
"""They need files, which `tests/server/flags/test_http.py` makes."""

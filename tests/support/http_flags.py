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
    (["--enable-log-requests", "--enable-log-outputs"], "server.log_outputs", True),
    (["--enable-log-requests", "--max-log-len", "40"], "server.max_log_len", 40),
    (
        ["--enable-log-requests", "--disable-access-log-for-endpoints", "/a, /b"],
        "server.unlogged_paths",
        ("/a", "/b"),
    ),
    (["--h11-max-header-count", "9"], "server.max_headers", 9),
    (["--h11-max-incomplete-event-size", "4K"], "server.max_head_bytes", 4096),
    (["--middleware", "a.B", "--middleware", "c.d.e"], "server.middleware", ("a.B", "c.d.e")),
    (["--enable-server-load-tracking"], "server.load_tracking", True),
    (["--enable-tokenizer-info-endpoint"], "server.tokenizer_info", True),
    (["--fingerprint-mode", "none"], "server.fingerprint_mode", "none"),
    (["--fingerprint-mode", "custom", "--fingerprint-value", "x"], "server.fingerprint_value", "x"),
    (["--trust-request-chat-template"], "server.trust_request_chat_template", True),
]

TLS_FIELDS = [f"server.ssl_{name}" for name in ("certfile", "keyfile", "ca_certs", "cert_reqs", "ciphers", "refresh")]
"""They need files, which `tests/server/flags/test_http.py` makes."""

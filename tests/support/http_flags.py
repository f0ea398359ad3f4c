"""Flags of the HTTP front end with the field of the configuration where each ends, and its value there."""

HTTP_CASES: list[tuple[list[str], str, object]] = [
    (["--strict-fields"], "server.strict_fields", True),
    (["--max-num-queued-reqs", "7"], "server.max_num_queued_reqs", 7),
    (["--max-num-queued-tokens", "8k"], "server.max_num_queued_tokens", 8000),
]

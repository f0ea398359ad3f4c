"""The rows of the table of flags that say which requests are taken, and what their answers tell."""

import json
from typing import Any

from tokenmill_server.flags.flag import Arity, Flag, Group
from tokenmill_server.flags.parsers import boolean, integer, number, path_text, text, text_list
from tokenmill_server.processing.chat_template import RESERVED_NAMES

_MANY = 2**31 - 1


def _text_or_json_list(value: object) -> tuple[str, ...]:
    """Texts, or one that is a JSON list of them as vLLM has it."""
    if isinstance(value, list | tuple) and len(value) == 1:
        (value,) = value
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError("texts, or a JSON list of texts") from None
    return text_list(value)


def _template_variables(value: object) -> dict[str, Any]:
    wanted = "a JSON object of variables of the chat template"
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(wanted) from None
    if not isinstance(value, dict):
        raise ValueError(wanted)
    if names := value.keys() & {"messages", "add_generation_prompt", *RESERVED_NAMES}:
        raise ValueError(f"{wanted} other than {min(names)}")
    return value


def _root_path(value: object) -> str:
    if value in ("", "/"):
        return ""
    if not isinstance(value, str) or not value.startswith("/") or not value.isascii() or set(value) & set("?# "):
        raise ValueError("a path that begins with /")
    return value.rstrip("/")


HTTP = (
    Flag(
        "max-num-queued-reqs",
        Group.FRONTEND,
        integer(1, _MANY),
        None,
        "Most sequences that wait or run at once, of all engine cores together; a request beyond them is refused with "
        "503 before any work is done for it. Default: no limit",
        "server.max_num_queued_reqs",
        metavar="N",
        offline=False,
    ),
    Flag(
        "max-num-queued-tokens",
        Group.FRONTEND,
        integer(1, _MANY),
        None,
        "Most prompt tokens of requests that have no token of their answer yet; a request beyond them is refused with "
        "503, unless there are none. Default: no limit",
        "server.max_num_queued_tokens",
        metavar="TOKENS",
        offline=False,
    ),
    Flag(
        "allowed-origins",
        Group.FRONTEND,
        _text_or_json_list,
        (),
        "Origins whose pages may send requests from browsers (CORS), such as https://chat.example; * for all. "
        "Default: none",
        "server.allowed_origins",
        metavar="ORIGIN",
        arity=Arity.MANY,
        offline=False,
    ),
    Flag(
        "allowed-methods",
        Group.FRONTEND,
        _text_or_json_list,
        ("*",),
        "Methods that such pages may use; * for all",
        "server.allowed_methods",
        metavar="METHOD",
        arity=Arity.MANY,
        offline=False,
    ),
    Flag(
        "allowed-headers",
        Group.FRONTEND,
        _text_or_json_list,
        ("*",),
        "Headers that such pages may send; * for all",
        "server.allowed_headers",
        metavar="HEADER",
        arity=Arity.MANY,
        offline=False,
    ),
    Flag(
        "allow-credentials",
        Group.FRONTEND,
        boolean,
        False,
        "Let browsers send cookies with such requests",
        "server.allow_credentials",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "root-path",
        Group.FRONTEND,
        _root_path,
        "",
        "Prefix that a proxy puts before every path (/prefix); requests with and without it are answered",
        "server.root_path",
        metavar="PATH",
        offline=False,
    ),
    Flag(
        "ssl-certfile",
        Group.FRONTEND,
        path_text,
        None,
        "PEM file with the server's certificate (and those between it and its root): serve HTTPS",
        "server.ssl_certfile",
        metavar="FILE",
        offline=False,
    ),
    Flag(
        "ssl-keyfile",
        Group.FRONTEND,
        path_text,
        None,
        "PEM file with the certificate's private key, if it is not in the same file",
        "server.ssl_keyfile",
        metavar="FILE",
        offline=False,
    ),
    Flag(
        "ssl-ca-certs",
        Group.FRONTEND,
        path_text,
        None,
        "PEM file with the certificates that sign those of clients",
        "server.ssl_ca_certs",
        metavar="FILE",
        offline=False,
    ),
    Flag(
        "ssl-cert-reqs",
        Group.FRONTEND,
        integer(0, 2),
        0,
        "Whether clients show a certificate: 0 no, 1 if they like, 2 always",
        "server.ssl_cert_reqs",
        metavar="0|1|2",
        offline=False,
    ),
    Flag(
        "ssl-ciphers",
        Group.FRONTEND,
        text,
        None,
        "Ciphers of TLS 1.2, in OpenSSL's notation",
        "server.ssl_ciphers",
        metavar="LIST",
        offline=False,
    ),
    Flag(
        "trust-request-chat-template",
        Group.FRONTEND,
        boolean,
        False,
        "Take chat templates from requests (`chat_template`). They run in a sandbox, but may take all time and memory "
        "that they like: only for clients that are trusted",
        "server.trust_request_chat_template",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "sse-keep-alive-interval",
        Group.FRONTEND,
        number(0, 86400),
        0.0,
        "Seconds of silence after which a stream carries a comment, for proxies that close silent connections. A "
        "request that fails after the first comment is told so in the stream, no more by the status. 0: none",
        "server.sse_keep_alive_s",
        metavar="SECONDS",
        offline=False,
    ),
    Flag(
        "enable-log-requests",
        Group.FRONTEND,
        boolean,
        False,
        "A line in the log for each request: its id, status, time, tokens and why it ended; nothing of its text",
        "server.log_requests",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "default-chat-template-kwargs",
        Group.FRONTEND,
        _template_variables,
        {},
        'Variables of the chat template as a JSON object, such as {"enable_thinking": false}; '
        "`chat_template_kwargs` of a request win",
        "server.default_chat_template_kwargs",
        metavar="JSON",
        offline=False,
    ),
    Flag(
        "return-tokens-as-token-ids",
        Group.FRONTEND,
        boolean,
        False,
        "Call tokens token_id:N in all log-probabilities, also where the request does not ask for it",
        "server.return_tokens_as_token_ids",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "enable-force-include-usage",
        Group.FRONTEND,
        boolean,
        False,
        "Tell the usage in every chunk of every stream, also where the request does not ask for it",
        "server.force_include_usage",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "disable-fastapi-docs",
        Group.FRONTEND,
        boolean,
        False,
        "Serve neither /docs nor /redoc nor /openapi.json",
        "server.disable_docs",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "enable-per-request-metrics",
        Group.FRONTEND,
        boolean,
        False,
        "Replies to one prompt with one choice tell in `metrics` how long queueing, prefill and generation took, "
        "preemptions and cached tokens",
        "server.per_request_metrics",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "strict-fields",
        Group.FRONTEND,
        boolean,
        False,
        "Refuse requests with fields that have no effect here. Default: answer them and list the fields in "
        "x-ignored-fields",
        "server.strict_fields",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "disable-webui",
        Group.FRONTEND,
        boolean,
        False,
        "No page at /: a playground for chats, with live charts of what the server does",
        "server.disable_webui",
        arity=Arity.SWITCH,
        offline=False,
    ),
)

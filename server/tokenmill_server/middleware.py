"""What happens around every HTTP request: its id, the API key, the request metrics. Plain ASGI, one layer."""

import hmac
import os
import time

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill_engine.errors import AuthenticationError
from tokenmill_engine.metrics import FrontendMetrics
from tokenmill_server.config import ServerConfig
from tokenmill_server.errors import describe
from tokenmill_server.protocol.fields import is_request_id
from tokenmill_server.request_log import ANSWER, log_request
from tokenmill_server.routes.replying import DIRECT_SEND, error_response
from tokenmill_server.routes.webui import needs_no_key

OPEN_PATHS = frozenset({"/health", "/ping"})
"""Need no API key: load balancers and container probes have none."""

_EXPOSED_HEADERS = ("x-request-id", "x-ignored-fields", "retry-after", "x-should-retry")
"""What scripts of other origins may read of answers."""

_UNCOUNTED_PATHS = frozenset({"/metrics", "/health", "/ping", "/version", "/load"})
"""Left out of the HTTP metrics: polling would drown the requests."""


class RequestFrame:
    """The outermost layer of the application."""

    def __init__(self, app: ASGIApp, config: ServerConfig, metrics: FrontendMetrics | None) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in config.api_keys]
        self._has_webui = not config.disable_webui
        self._root_path = config.root_path
        self._logs_requests = config.log_requests
        self._unlogged_paths = frozenset(config.unlogged_paths)
        self._may_skip_layers = not config.middleware
        # Browsers ask for permission without a key, and hide answers from pages whose origin is not allowed.
        self._answer = _with_cors(self._answer_allowed, config) if config.allowed_origins else self._answer_allowed
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_at = time.monotonic()
        if self._root_path:
            scope["root_path"] = self._root_path  # the API page says it
            if scope["path"].startswith(f"{self._root_path}/"):
                scope["path"] = scope["path"].removeprefix(self._root_path)
        headers = _wanted_headers(scope)
        state = scope.setdefault("state", {})
        own_id = headers.get(b"x-request-id", b"").decode("latin-1")
        state["has_own_id"] = is_request_id(own_id)
        state["request_id"] = own_id if state["has_own_id"] else os.urandom(16).hex()
        if self._may_skip_layers:  # the owner's own may look at answers, or change them
            state[DIRECT_SEND] = send
        status = 500

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", state["request_id"].encode())]
            await send(message)

        try:
            await self._answer(scope, receive, send_with_id)
        finally:
            if self._metrics is not None and scope["path"] not in _UNCOUNTED_PATHS:
                duration_s = time.monotonic() - started_at
                self._metrics.observe_http(_handler(scope), scope["method"], status, duration_s)
                if self._logs_requests and scope["path"] not in self._unlogged_paths:
                    request = state["request_id"], scope["method"], _handler(scope)
                    log_request(*request, status, duration_s, state.get(ANSWER))

    async def _answer_allowed(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._api_keys or self._is_allowed(scope["path"], _wanted_headers(scope).get(b"authorization")):
            await self._app(scope, receive, send)
            return
        error = AuthenticationError("missing or wrong API key; send it as 'Authorization: Bearer KEY'")
        await error_response(describe(error))(scope, receive, send)

    def _is_allowed(self, path: str, authorization: bytes | None) -> bool:
        if not self._api_keys or path in OPEN_PATHS or (self._has_webui and needs_no_key(path)):
            return True
        scheme, _, key = (authorization or b"").partition(b" ")
        if scheme.lower() != b"bearer":
            return False
        matches = [hmac.compare_digest(key.strip(), known) for known in self._api_keys]
        return any(matches)


def _with_cors(app: ASGIApp, config: ServerConfig) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=_EXPOSED_HEADERS,
    )


def _wanted_headers(scope: Scope) -> dict[bytes, bytes]:
    return {name: value for name, value in scope["headers"] if name in (b"authorization", b"x-request-id")}


def _handler(scope: Scope) -> str:
    """The path template of the route that answered."""
    route = scope.get("route")
    return getattr(route, "path", "none")

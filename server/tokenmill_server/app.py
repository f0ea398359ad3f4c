"""The FastAPI application of one API server."""

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill_engine.errors import TokenmillError
from tokenmill_server.config import ServerConfig
from tokenmill_server.context import ServerContext
from tokenmill_server.errors import ErrorReply, describe
from tokenmill_server.middleware import RequestFrame
from tokenmill_server.openapi import DocumentedApp
from tokenmill_server.processing.shown import shown
from tokenmill_server.protocol.chat import ChatRequest
from tokenmill_server.protocol.completions import CompletionRequest
from tokenmill_server.protocol.embeddings import EmbeddingRequest
from tokenmill_server.protocol.scoring import RerankRequest, ScoreRequest
from tokenmill_server.protocol.tokenize import DetokenizeRequest, TokenizeRequest
from tokenmill_server.routes import operations
from tokenmill_server.routes.chat import create_chat_completion
from tokenmill_server.routes.completions import create_completion
from tokenmill_server.routes.embeddings import create_embeddings
from tokenmill_server.routes.models import list_models, retrieve_model
from tokenmill_server.routes.replying import ClientGoneError, error_response
from tokenmill_server.routes.scoring import create_rerank, create_score
from tokenmill_server.routes.tokenization import detokenize, tokenize, tokenizer_info
from tokenmill_server.routes.webui import add_webui

Endpoint = Callable[[Request], Coroutine[Any, Any, Response]]

_CLIENT_CLOSED_REQUEST = 499


class _PlainRoute(APIRoute):
    """A route whose endpoint takes the request and returns the response: nothing to resolve in between."""

    def get_route_handler(self) -> Endpoint:
        endpoint: Endpoint = self.endpoint
        return endpoint


class _Shortcut:
    """Calls the endpoints that generate text directly. The framework's layers around an endpoint cost a third of what
    such a request costs, and do nothing for it that is not done here. Everything else goes through them."""

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._routes = {
            route.path: route
            for route in app.routes
            if isinstance(route, APIRoute) and route.endpoint in (create_chat_completion, create_completion)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self._routes.get(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else None
        if route is None:
            await self._app(scope, receive, send)
            return
        scope["app"], scope["route"] = self._app, route
        started = False

        async def send_watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        request = Request(scope, receive, send_watched)
        try:
            response = await route.endpoint(request)
            await response(scope, receive, send_watched)
        except Exception as error:
            if started:
                raise
            answer = _answer_nobody if isinstance(error, ClientGoneError) else _answer_error
            await (await answer(request, error))(scope, receive, send)
            if not isinstance(error, (TokenmillError, ValidationError, ClientGoneError)):
                raise  # the HTTP server logs the traceback


def create_app(context: ServerContext) -> ASGIApp:
    """All routes, errors in OpenAI's shape for each of them. Raises ConfigError if middleware of the owner fails."""
    config = context.config
    app = DocumentedApp(config)
    app.state.context = context
    app.router.route_class = _PlainRoute
    _add_routes(app, config)
    for kind in (TokenmillError, ValidationError, HTTPException):
        app.add_exception_handler(kind, _answer_error)
    app.add_exception_handler(404, _answer_unknown_route)
    app.add_exception_handler(405, _answer_wrong_method)
    app.add_exception_handler(ClientGoneError, _answer_nobody)
    app.add_exception_handler(Exception, _answer_bug)
    wrapped: ASGIApp = _Shortcut(app)
    for wrap in context.own_middleware:
        wrapped = wrap(wrapped)
    return RequestFrame(wrapped, config, context.metrics)


def _add_routes(app: DocumentedApp, config: ServerConfig) -> None:
    _post(app, "/v1/chat/completions", create_chat_completion, ChatRequest)
    _post(app, "/v1/completions", create_completion, CompletionRequest)
    _post(app, "/v1/embeddings", create_embeddings, EmbeddingRequest)
    for path in ("/v1/score", "/score"):
        _post(app, path, create_score, ScoreRequest)
    for path in ("/v1/rerank", "/rerank", "/v2/rerank"):
        _post(app, path, create_rerank, RerankRequest)
    _post(app, "/tokenize", tokenize, TokenizeRequest)
    _post(app, "/detokenize", detokenize, DetokenizeRequest)
    app.add_api_route("/v1/models", list_models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", retrieve_model, methods=["GET"])
    app.add_api_route("/health", operations.health, methods=["GET"])
    for method in ("GET", "POST"):
        app.add_api_route("/ping", operations.health, methods=[method], name=f"ping_{method.lower()}")
    app.add_api_route("/version", operations.version, methods=["GET"])
    app.add_api_route("/metrics", operations.metrics, methods=["GET"])
    if config.load_tracking:
        app.add_api_route("/load", operations.load, methods=["GET"])
    if config.tokenizer_info:
        app.add_api_route("/tokenizer_info", tokenizer_info, methods=["GET"])
    if not config.disable_webui:
        add_webui(app)
    for route in list(app.routes):
        if isinstance(route, APIRoute) and "GET" in (route.methods or ()):
            app.add_api_route(route.path, route.endpoint, methods=["HEAD"], include_in_schema=False)


def _post(app: DocumentedApp, path: str, endpoint: Endpoint, body: type[BaseModel]) -> None:
    """A route that reads its body itself; the model is for the API page."""
    app.document_body(path, body)
    app.add_api_route(path, endpoint, methods=["POST"])


async def _answer_error(_request: Request, error: Exception) -> Response:
    return error_response(describe(error))


async def _answer_unknown_route(request: Request, _error: Exception) -> Response:
    routes = [route for route in request.app.routes if isinstance(route, APIRoute)]
    served = ", ".join(dict.fromkeys(route.path_format for route in routes))
    path = shown(request.url.path)
    message = f"this server does not serve {path} yet; it serves {served}"
    return error_response(ErrorReply(404, "invalid_request_error", message, code="not_found"))


async def _answer_wrong_method(request: Request, error: Exception) -> Response:
    """With all methods of the path, for which there may be several routes."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    methods = {method for route in routes for method in getattr(route, "methods", None) or ()}
    return error_response(replace(describe(error), headers={"allow": ", ".join(sorted(methods))}))


async def _answer_nobody(_request: Request, _error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _answer_bug(_request: Request, error: Exception) -> Response:
    return error_response(describe(error))  # the HTTP server logs the traceback

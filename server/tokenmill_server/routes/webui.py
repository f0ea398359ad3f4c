"""The page at `/`: its files, and what it has to know of the server. It uses the API as any other client."""

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.responses import Response

from tokenmill_server.context import context_of
from tokenmill_server.routes.bodies import json_reply
from tokenmill_server.version import __version__
from tokenmill_server.webui.files import web_files

_FILES_PATH = "/webui/"
_INFO_PATH = f"{_FILES_PATH}server.json"
_POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' data:",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        # Nothing can be turned into HTML or code from text, whatever a model says.
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
_HEADERS = {
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    # Browsers keep the files and ask whether they are still the same: the page is that of the server that runs now.
    "cache-control": "no-cache",
}


def add_webui(app: FastAPI) -> None:
    """HEAD comes with GET, as for every route."""
    app.add_api_route("/", _index, methods=["GET"], include_in_schema=False)
    app.add_api_route(_INFO_PATH, _info, methods=["GET"], include_in_schema=False)
    app.add_api_route(f"{_FILES_PATH}{{name}}", _file, methods=["GET"], include_in_schema=False)


def needs_no_key(path: str) -> bool:
    """Whether anybody may have it: the page asks for the key itself, and its files say nothing of the server."""
    return path == "/" or (path.startswith(_FILES_PATH) and path.removeprefix(_FILES_PATH) in web_files())


async def _index(request: Request) -> Response:
    return _sent(request, "index.html")


async def _file(request: Request) -> Response:
    return _sent(request, request.path_params["name"])


async def _info(request: Request) -> Response:
    context = context_of(request)
    config = context.config
    return json_reply(
        {
            "version": __version__,
            "models": config.served_model_names,
            "max_model_len": context.inputs.max_model_len,
            "max_images": 0 if context.media is None else config.media.limits.images,
            "sampling": config.default_sampling,
        },
        {"cache-control": "no-store"},
    )


def _sent(request: Request, name: str) -> Response:
    file = web_files().get(name)
    if file is None:
        raise HTTPException(404)
    known = [tag.strip().removeprefix("W/") for tag in request.headers.get("if-none-match", "").split(",")]
    headers = {**_HEADERS, "etag": file.etag}
    if file.etag in known or known == ["*"]:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.content_type)

"""GET /v1/models and GET /v1/models/{id}"""

from typing import Any

from fastapi import Request
from starlette.responses import Response

from tokenmill_server.context import ServerContext, context_of
from tokenmill_server.routes.bodies import json_reply


async def list_models(request: Request) -> Response:
    """Every name under which the model is served."""
    context = context_of(request)
    data = [_model(context, name) for name in context.config.served_model_names]
    return json_reply({"object": "list", "data": data})


async def retrieve_model(request: Request) -> Response:
    """One served name. Names may contain slashes. With none it is the list."""
    context = context_of(request)
    name = request.path_params["model_id"]
    if not name:
        return await list_models(request)
    context.check_model(name)
    return json_reply(_model(context, name))


def _model(context: ServerContext, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.started_at,
        "owned_by": "tokenmill",
        "root": context.engine_config.model.name,
        "parent": None,
        "max_model_len": context.inputs.max_model_len,
    }

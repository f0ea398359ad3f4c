"""The document at /openapi.json. Endpoints read their bodies and make their replies themselves, so the framework knows
of the routes alone: bodies, the names in paths, errors and keys are added here."""

from typing import Any

from fastapi import FastAPI
from pydantic import BaseModel
from pydantic.json_schema import JsonSchemaMode, models_json_schema

from tokenmill_server.config import ServerConfig
from tokenmill_server.middleware import OPEN_PATHS
from tokenmill_server.version import __version__

_SCHEMAS = "#/components/schemas/"
_TEXT = {"type": ["string", "null"]}
_ERROR: dict[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {"message": {"type": "string"}, "type": {"type": "string"}, "param": _TEXT, "code": _TEXT},
        }
    },
}
_HEALTH: dict[str, Any] = {
    "type": "object",
    "required": ["status"],
    "properties": {
        "status": {"type": "string"},
        "reason": {"type": "string"},
        "engines": {"type": "array", "items": {"type": "object"}},
    },
}


class DocumentedApp(FastAPI):
    """An application that says what its bodies and errors are."""

    def __init__(self, config: ServerConfig) -> None:
        docs: dict[str, Any] = {"openapi_url": None} if config.disable_docs else {}
        super().__init__(title="Tokenmill", version=__version__, redirect_slashes=False, **docs)
        self._needs_key = bool(config.api_keys)
        self._bodies: dict[str, type[BaseModel]] = {}

    def document_body(self, path: str, body: type[BaseModel]) -> None:
        """Says what `POST path` takes."""
        self._bodies[path] = body

    def openapi(self) -> dict[str, Any]:
        """Made when it is first asked for."""
        if self.openapi_schema is None:
            document = super().openapi()
            models: list[tuple[type[BaseModel], JsonSchemaMode]] = [
                (body, "validation") for body in self._bodies.values()
            ]
            _, bodies = models_json_schema(models, ref_template=f"{_SCHEMAS}{{model}}")
            components = document.setdefault("components", {})
            components["schemas"] = {**bodies.get("$defs", {}), "Error": _ERROR, "Health": _HEALTH}
            if self._needs_key:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            for path, operations in document["paths"].items():
                for method, operation in operations.items():
                    self._complete(path, method, operation)
            self.openapi_schema = document
        return self.openapi_schema

    def _complete(self, path: str, method: str, operation: dict[str, Any]) -> None:
        replies = operation["responses"]
        replies["4XX"] = _json("The request is at fault.", "Error")
        replies["5XX"] = _json("The server is, or it is busy: `Retry-After` says when to ask again.", "Error")
        if path in OPEN_PATHS:
            replies["200"], replies["503"] = _json("Requests are taken.", "Health"), _json("They are not.", "Health")
        elif self._needs_key:
            operation["security"] = [{"key": []}]
        if path == "/metrics":
            replies["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
        if method == "post" and path in self._bodies:
            body = self._bodies[path]
            operation["requestBody"] = {"content": _content(body.__name__), "required": True}
            if "stream" in body.model_fields:
                replies["200"]["content"]["text/event-stream"] = {"schema": {"type": "string"}}
        if "{model_id}" in path:
            name = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
            operation["parameters"] = [name]


def _json(description: str, schema: str) -> dict[str, Any]:
    return {"description": description, "content": _content(schema)}


def _content(schema: str) -> dict[str, Any]:
    return {"application/json": {"schema": {"$ref": f"{_SCHEMAS}{schema}"}}}

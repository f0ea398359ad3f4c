"""Reads streamed answers and checks what must hold for every one of them."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

Json = dict[str, Any]
REPO = str(Path(__file__).parents[2])


def strict_json(text: str) -> Any:
    """Parses JSON without the NaN and Infinity that Python would let through."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@dataclass
class Stream:
    """The chunks of one answer, without `[DONE]`."""

    chunks: list[Json]
    headers: httpx.Headers

    def choices(self, index: int = 0) -> list[Json]:
        return [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]

    def text(self, index: int = 0) -> str:
        """Text of a choice, for chat and completions."""
        return "".join(
            choice["text"] if "text" in choice else choice["delta"].get("content") or ""
            for choice in self.choices(index)
        )

    def finish_reason(self, index: int = 0) -> str:
        """The only one of a choice, in its last chunk."""
        reasons = [choice["finish_reason"] for choice in self.choices(index)]
        assert reasons[-1] is not None
        assert all(reason is None for reason in reasons[:-1])
        return str(reasons[-1])

    @property
    def usage(self) -> Json | None:
        usage: Json | None = self.chunks[-1].get("usage")
        return usage


def post_stream(client: httpx.Client, path: str, body: Json, **options: Any) -> Stream:
    """Sends `body` with `stream` set and reads the whole answer."""
    response = client.post(path, json={**body, "stream": True}, **options)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = []
    for event in events[:-2]:
        assert event.startswith("data: {"), event
        chunks.append(strict_json(event.removeprefix("data: ")))
    for name in ("id", "created", "model", "object"):
        assert len({chunk[name] for chunk in chunks}) == 1
    return Stream(chunks, response.headers)


def is_error(response: httpx.Response, status: int, param: str | None = None, code: str | None = None) -> bool:
    """Whether this is an error in OpenAI's shape, with nothing of the inside in its message."""
    assert response.status_code == status, response.text
    error = strict_json(response.text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert "Traceback" not in error["message"]
    assert REPO not in error["message"]
    assert response.headers["x-request-id"]
    assert param is None or error["param"] == param, error
    assert code is None or error["code"] == code, error
    return True

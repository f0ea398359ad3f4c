"""The server that the clients of this folder talk to; `tests/e2e/test_clients.py` names it, and runs them."""

import os
from dataclasses import dataclass
from typing import Any

import pytest
from pydantic import BaseModel, Field


@dataclass(frozen=True)
class Endpoint:
    """Where OpenAI's API is, and what it serves."""

    url: str
    key: str
    model: str


@pytest.fixture(scope="session")
def endpoint() -> Endpoint:
    return Endpoint(os.environ["CLIENT_BASE_URL"], os.environ["CLIENT_API_KEY"], os.environ["CLIENT_MODEL"])


class Pet(BaseModel):
    """A pet."""

    name: str = Field(max_length=20)
    kind: str = Field(pattern="^(cat|dog)$")
    legs: int | None


@pytest.fixture(scope="session")
def pet() -> type[Pet]:
    """What answers are parsed as."""
    return Pet


@pytest.fixture(scope="session")
def weather() -> dict[str, Any]:
    """A tool in the form that OpenAI's API has."""
    days = {"type": "integer", "enum": [1, 2, 3]}
    city = {"type": "string", "enum": ["Paris", "Zürich"]}
    parameters = {"type": "object", "properties": {"city": city, "days": days}, "required": ["city", "days"]}
    return {
        "type": "function",
        "function": {"name": "get_weather", "description": "Tells the weather of a city", "parameters": parameters},
    }

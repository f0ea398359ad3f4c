"""A served model that looks at images, and what transformers would answer in its place."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.image_chats import ImageOracle
from tests.support.pictures import data_url, encoded
from tests.support.server import Server

COUNT = 12
"""Tokens of each answer."""
Pixels = NDArray[np.uint8]


@dataclass
class Served:
    """A server and what its model should say."""

    server: Server
    oracle: ImageOracle

    def check(self, *parts: str | Pixels, **fields: Any) -> dict[str, Any]:
        """The reply to parts of a message, which is transformers' own."""
        reply = self.ask(body(*parts, **fields))
        self.check_reply(reply, [part for part in parts if not isinstance(part, str)])
        return reply

    def ask(self, asked: dict[str, Any]) -> dict[str, Any]:
        response = self.server.http.post("/v1/chat/completions", json=asked)
        assert response.status_code == 200, response.text
        reply: dict[str, Any] = response.json()
        return reply

    def check_reply(self, reply: dict[str, Any], images: Sequence[Pixels]) -> None:
        for choice in reply["choices"]:
            assert len(choice["token_ids"]) == COUNT
            assert choice["token_ids"] == self.oracle.greedy(reply["prompt_token_ids"], images, choice["token_ids"])


def body(*parts: str | Pixels, **fields: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(encoded(part))}}
        for part in parts
    ]
    options = {"temperature": 0, "max_tokens": COUNT, "ignore_eos": True, "return_token_ids": True}
    return {"messages": [{"role": "user", "content": content}], **options, **fields}

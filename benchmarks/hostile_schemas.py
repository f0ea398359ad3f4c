"""What schemas that cannot be prepared in time cost others: `python -m benchmarks.hostile_schemas --url URL`.

Sends a running server all of them at once, beside one stream and among ordinary schemas, and prints JSON: how long the
last hostile one took, what became of them, how long the ordinary ones took, and the longest pauses between two tokens
of the stream before and meanwhile, as a client on the same machine sees them. A server knows a schema that it has
prepared: numbers in the schemas are others in every run.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from typing import Any

import httpx

_BEFORE_S = 3.0
"""Of the stream alone."""
_BETWEEN_S = 0.5
"""From one ordinary schema to the next."""
_NUM_ORDINARY = 4
_TIMEOUT_S = 120.0


def intersection(number: int) -> dict[str, Any]:
    """Whether any text has all of the patterns is found out in a minute."""
    letters = "abcdefghijklmnopqrst"
    return {"allOf": [{"type": "string", "pattern": f".*{number}{each}.*"} for each in letters]}


def wide(number: int) -> dict[str, Any]:
    """Refused for its width, after most of a second."""
    return {"type": "object", "properties": {f"p{number}_{index}": {"type": "string"} for index in range(3000)}}


def alternatives(number: int, depth: int = 10) -> dict[str, Any]:
    """Twice the size with each level."""
    schema: dict[str, Any] = {"const": number}
    for level in range(depth):
        required = {"type": "object", "properties": {f"a{level}": schema}, "required": [f"a{level}"]}
        schema = {"oneOf": [required, {"type": "object", "properties": {f"b{level}": schema}}]}
    return schema


def unfolding(number: int, depth: int = 11) -> dict[str, Any]:
    """The same without alternatives: it is prepared in half a second, and then followed."""
    schema: dict[str, Any] = {"const": number}
    for level in range(depth):
        schema = {"type": "object", "properties": {f"{name}{level}": schema for name in "ab"}}
    return schema


HOSTILE = (intersection, wide, alternatives, unfolding)


def ordinary(number: int) -> dict[str, Any]:
    """As applications have them."""
    age = {"type": "integer", "minimum": 0, "maximum": number}
    return {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": age}}


class Stream:
    """Texts without an end, one after the other, and when their tokens came."""

    def __init__(self) -> None:
        self.times: list[float] = []

    async def run(self, client: httpx.AsyncClient) -> None:
        """Until it is cancelled."""
        body = {"prompt": "Once upon a time", "max_tokens": 400, "ignore_eos": True, "stream": True}
        while True:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        self.times.append(time.monotonic())

    def pauses_ms(self, start: float, end: float) -> dict[str, float]:
        """Between tokens that came from `start` to `end`."""
        times = [each for each in self.times if start <= each <= end]
        pauses = sorted(1000 * (later - earlier) for earlier, later in itertools.pairwise(times))
        if not pauses:
            return {}
        return {
            "p50_ms": round(pauses[len(pauses) // 2], 1),
            "p99_ms": round(pauses[99 * len(pauses) // 100], 1),
            "max_ms": round(pauses[-1], 1),
        }


async def ask(client: httpx.AsyncClient, schema: dict[str, Any]) -> tuple[int, float]:
    """Status and seconds."""
    body = {"prompt": "A", "max_tokens": 1, "structured_outputs": {"json": schema}}
    began = time.monotonic()
    response = await client.post("/v1/completions", json=body)
    return response.status_code, time.monotonic() - began


async def measure(url: str, num_hostile: int) -> dict[str, Any]:
    """All of it."""
    first = time.time_ns() // 1_000_000 % 10_000_000 * 1000
    stream = Stream()
    async with httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S) as client:
        running = asyncio.create_task(stream.run(client))
        await ask(client, ordinary(first))
        before = time.monotonic()
        await asyncio.sleep(_BEFORE_S)
        began = time.monotonic()
        schemas = [HOSTILE[index % len(HOSTILE)](first + index) for index in range(num_hostile)]
        hostile = [asyncio.create_task(ask(client, schema)) for schema in schemas]
        others = []
        for index in range(_NUM_ORDINARY):
            await asyncio.sleep(_BETWEEN_S)
            others.append(asyncio.create_task(ask(client, ordinary(first + num_hostile + index))))
        answers = await asyncio.gather(*hostile)
        end = time.monotonic()
        among = await asyncio.gather(*others)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    kinds = Counter(f"{HOSTILE[index % len(HOSTILE)].__name__} {status}" for index, (status, _) in enumerate(answers))
    return {
        "hostile": dict(sorted(kinds.items())),
        "hostile_last_s": round(max(seconds for _, seconds in answers), 2),
        "hostile_median_s": round(sorted(seconds for _, seconds in answers)[len(answers) // 2], 2),
        "ordinary": [(status, round(seconds, 2)) for status, seconds in among],
        "stream_before": stream.pauses_ms(before, began),
        "stream_meanwhile": stream.pauses_ms(began, end),
    }


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile_schemas", description=__doc__)
    parser.add_argument("--url", required=True, help="of a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--num-hostile", type=int, default=32)
    args = parser.parse_args()
    sys.stdout.write(json.dumps(asyncio.run(measure(args.url, args.num_hostile)), indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

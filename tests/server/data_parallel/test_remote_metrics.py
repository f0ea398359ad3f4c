"""An API server's question for metrics of other machines."""

import asyncio
import time

import pytest

from tokenmill_server.data_parallel import remote_metrics
from tokenmill_server.data_parallel.remote_metrics import RemoteMetrics


def test_each_question_waits_for_its_own_answer() -> None:
    async def run() -> None:
        asked: list[int] = []
        metrics = RemoteMetrics(asked.append)
        first, second = asyncio.create_task(metrics.fetch()), asyncio.create_task(metrics.fetch())
        await asyncio.sleep(0)
        assert asked == [1, 2]
        metrics.fetched(2)
        await asyncio.wait_for(second, 5)
        assert not first.done()
        metrics.fetched(1)
        await asyncio.wait_for(first, 5)

    asyncio.run(run())


def test_nobody_waits_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_metrics, "_TIMEOUT_S", 0.05)

    async def run() -> None:
        metrics = RemoteMetrics(lambda number: None)
        began = time.monotonic()
        await metrics.fetch()
        assert time.monotonic() - began >= 0.04
        metrics.fetched(1)  # too late

    asyncio.run(run())

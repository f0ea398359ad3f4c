"""The head's part when a launcher is told to stop: who has to finish before it may end, and how its end is told."""

import logging
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.support.rendezvous import Rendezvous, hear, ready, usable
from tests.support.server import PATIENCE_S, wait_for
from tokenmill_engine.ipc.control import EngineDrained, EngineDraining, EngineLost
from tokenmill_server.data_parallel import joining
from tokenmill_server.data_parallel.draining import EngineDrains
from tokenmill_server.data_parallel.joining import Head
from tokenmill_server.data_parallel.messages import Draining, Leaving, RanksDrained


@pytest.fixture
def joined(rendezvous: Rendezvous) -> Head:
    return rendezvous.join()


def draining(rank: int, incarnation: int = 0) -> EngineDraining:
    reason = f"engine core {rank} takes no new requests, since its launcher was told to stop"
    return EngineDraining(rank, incarnation, reason)


def gone(rank: int, planned: bool) -> EngineLost:
    return EngineLost(rank, 0, f"engine core {rank} is gone with its launcher", may_return=True, planned=planned)


def begin(rendezvous: Rendezvous, *ranks: int, clients: tuple[int, ...] = (0,)) -> None:
    rendezvous.run(lambda: [rendezvous.remote.drains.begin(draining(rank), clients) for rank in ranks] and None)


def answer(rendezvous: Rendezvous, client: int, rank: int) -> None:
    rendezvous.run(lambda: rendezvous.remote.drains.answered(client, EngineDrained(rank, 0)))


def test_every_drain_waits_for_all_api_servers_and_ends_once() -> None:
    over: list[int] = []
    drains = EngineDrains(over.append)
    drains.begin(draining(5), ())
    assert over == [5]
    drains.begin(draining(1, 2), (0, 1, 2))
    drains.begin(draining(2), (0, 1, 2))
    drains.answered(0, EngineDrained(1, 2))
    drains.answered(0, EngineDrained(1, 2))
    drains.answered(1, EngineDrained(1, 1))
    drains.answered(7, EngineDrained(1, 2))
    drains.answered(1, EngineDrained(2, 0))
    drains.client_gone(2)
    assert over == [5]
    drains.answered(1, EngineDrained(1, 2))
    assert over == [5, 1]
    drains.client_gone(1)
    drains.client_gone(0)
    assert over == [5, 1, 2]


def test_a_launcher_may_end_when_nothing_runs_on_any_of_its_ranks(
    rendezvous: Rendezvous, joined: Head, caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody calls its end an error then."""
    served = [usable(joined, rank) for rank in (2, 3)]
    for message in (ready(2), ready(3), Draining(), Draining()):
        joined.channel.send(message)
    told = [*served, draining(2), draining(3)]
    rendezvous.wait_for(*told)
    begin(rendezvous, 2, 3, clients=(0, 1))
    for client, rank in ((0, 3), (1, 3), (1, 2)):
        answer(rendezvous, client, rank)
    rendezvous.run(lambda: rendezvous.remote.fetch_metrics(lambda: None))
    assert not isinstance(hear(joined), RanksDrained)
    rendezvous.run(lambda: rendezvous.remote.drains.client_gone(0))
    assert hear(joined) == RanksDrained()
    with caplog.at_level(logging.INFO):
        joined.channel.send(Leaving("it was told to stop", planned=True))
        joined.channel.close()
        rendezvous.wait_for(*told, gone(2, planned=True), gone(3, planned=True))
    assert [record.levelname for record in caplog.records if "is gone: it was told to stop" in record.message] == [
        "INFO"
    ]


@pytest.mark.parametrize(("planned", "level"), [(True, "WARNING"), (False, "ERROR")])
def test_an_end_before_everything_is_finished_is_told(
    rendezvous: Rendezvous, joined: Head, caplog: pytest.LogCaptureFixture, planned: bool, level: str
) -> None:
    """It ran out of patience, or it was killed."""
    for message in (ready(2), Draining()):
        joined.channel.send(message)
    rendezvous.wait_for(usable(joined, 2), draining(2))
    begin(rendezvous, 2)
    if planned:
        joined.channel.send(Leaving("its time is over", planned=True))
    joined.channel.close()
    rendezvous.wait_for(usable(joined, 2), draining(2), gone(2, planned))
    assert [record.levelname for record in caplog.records if "is gone: " in record.message] == [level]
    answer(rendezvous, 0, 2)


def test_ranks_that_do_not_serve_keep_no_launcher_waiting(rendezvous: Rendezvous, joined: Head) -> None:
    """Whether they died before it was told to stop, or after; they are missed from its end on."""
    restarting = EngineLost(2, 0, "engine core 2 was killed", restarts=True)
    for message in (ready(2), ready(3), restarting, Draining(), EngineLost(3, 0, "engine core 3 was killed")):
        joined.channel.send(message)
    assert hear(joined) == RanksDrained()
    told = EngineLost(3, 0, "engine core 3 was killed, and its launcher does not start it again", may_return=True)
    updates = [usable(joined, 2), usable(joined, 3), restarting, draining(3), told]
    rendezvous.wait_for(*updates)
    joined.channel.close()
    rendezvous.wait_for(*updates, gone(2, planned=False))
    again = rendezvous.join()
    again.channel.send(Draining())
    assert hear(again) == RanksDrained()


def test_a_launcher_waits_for_the_end_of_the_one_that_it_replaces(
    rendezvous: Rendezvous, joined: Head, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For as long as what runs there takes."""
    monkeypatch.setattr(joining, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(joining, "_REMIND_S", 0.0)
    monkeypatch.setattr(joining, "_RETRY_S", 0.05)
    for message in (ready(2), Draining()):
        joined.channel.send(message)
    rendezvous.wait_for(usable(joined, 2), draining(2))
    begin(rendezvous, 2)
    with caplog.at_level(logging.INFO), ThreadPoolExecutor(1) as pool:
        future: Future[Head] = pool.submit(rendezvous.join)
        line = "finishes what runs there before it ends"
        wait_for(lambda: caplog.text.count(line) >= 3 or future.done(), PATIENCE_S, "refusals")
        assert not future.done()
        joined.channel.close()
        again = future.result(PATIENCE_S)
    assert "is refused" not in caplog.text
    again.channel.send(ready(2))
    rendezvous.wait_for(usable(joined, 2), draining(2), gone(2, planned=False), usable(again, 2, 1))

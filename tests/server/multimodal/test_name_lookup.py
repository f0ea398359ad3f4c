"""Lookups of names, some of which never end."""

import asyncio
import socket
import threading

import pytest

from tokenmill_server.multimodal import name_lookup
from tokenmill_server.multimodal.name_lookup import look_up

pytestmark = pytest.mark.asyncio

PATIENCE_S = 60.0


class NameServer:
    """Answers to names on `silent` only when told to."""

    def __init__(self) -> None:
        self.go_on = threading.Event()
        self.asked: list[str] = []

    def getaddrinfo(self, name: str, port: int, *, flags: int = 0, **_options: object) -> list[object]:
        if flags & socket.AI_NUMERICHOST and not name[0].isdigit():
            raise socket.gaierror(socket.EAI_NONAME, "a name")
        self.asked.append(name)
        if name.startswith("silent"):
            self.go_on.wait()
        if name.startswith("unknown"):
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in ("1.1.1.1", "1.1.1.1", "::2")
        ]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> NameServer:
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    return server


async def test_each_address_once(names: NameServer) -> None:
    assert await look_up("some.example", 80) == ["1.1.1.1", "::2"]


async def test_a_name_that_nobody_knows(names: NameServer) -> None:
    with pytest.raises(OSError, match="no such name"):
        await look_up("unknown.example", 80)


async def test_names_that_do_not_answer_keep_nothing_else_waiting(names: NameServer) -> None:
    """Neither other names nor what else wants a thread of the event loop's; more of them than it has."""
    silent = [asyncio.ensure_future(look_up(f"silent{index}.example", 80)) for index in range(40)]
    async with asyncio.timeout(PATIENCE_S):
        assert await look_up("some.example", 80) == ["1.1.1.1", "::2"]
        assert await asyncio.to_thread(lambda: 7) == 7
    names.go_on.set()
    assert await asyncio.gather(*silent) == [["1.1.1.1", "::2"]] * 40


async def test_there_are_never_more_lookups_than_places(names: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when those who wanted to know are gone: their lookups are not."""
    monkeypatch.setattr(name_lookup, "_MAX_LOOKUPS", 3)
    silent = [asyncio.ensure_future(look_up(f"silent{index}.example", 80)) for index in range(3)]
    async with asyncio.timeout(PATIENCE_S):
        while len(names.asked) < 3:
            await asyncio.sleep(0.01)
    for each in silent:
        each.cancel()
    await asyncio.gather(*silent, return_exceptions=True)
    late = asyncio.ensure_future(look_up("late.example", 80))
    await asyncio.sleep(0)
    assert "late.example" not in names.asked
    names.go_on.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await late == ["1.1.1.1", "::2"]


async def all_asked(names: NameServer, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(names.asked) < count:
            await asyncio.sleep(0.01)


async def test_a_slow_site_keeps_no_other_waiting(names: NameServer) -> None:
    """However many names it has, and however often they are asked for."""
    silent = [asyncio.ensure_future(look_up(f"silent{index}.evil.example", 80)) for index in range(400)]
    await all_asked(names, 8)
    async with asyncio.timeout(PATIENCE_S):
        assert await look_up("some.example", 80) == ["1.1.1.1", "::2"]
    assert len(names.asked) == 9
    for each in silent:
        each.cancel()
    await asyncio.gather(*silent, return_exceptions=True)
    names.go_on.set()
    async with asyncio.timeout(PATIENCE_S):
        await look_up("other.evil.example", 80)
    # Those that had not begun never do.
    assert len(names.asked) == 10


async def test_a_name_is_looked_up_once_for_all_who_want_it(names: NameServer) -> None:
    asking = [asyncio.ensure_future(look_up("silent.example", 80)) for _ in range(300)]
    await all_asked(names, 1)
    asking[0].cancel()
    names.go_on.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*asking[1:]) == [["1.1.1.1", "::2"]] * 299
    assert names.asked == ["silent.example"]
    assert asking[0].cancelled()
    assert await look_up("silent.example", 80) == ["1.1.1.1", "::2"]
    assert len(names.asked) == 2


async def test_who_asks_after_all_others_are_gone(names: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether their lookup had begun or not."""
    monkeypatch.setattr(name_lookup, "_MAX_LOOKUPS", 1)
    first = asyncio.ensure_future(look_up("silent.example", 80))
    await all_asked(names, 1)
    waiting = asyncio.ensure_future(look_up("late.example", 80))
    await asyncio.sleep(0)
    for each in (first, waiting):
        each.cancel()
    again = [asyncio.ensure_future(look_up(name, 80)) for name in ("silent.example", "late.example")]
    await asyncio.sleep(0)
    names.go_on.set()
    async with asyncio.timeout(PATIENCE_S):
        assert await asyncio.gather(*again) == [["1.1.1.1", "::2"]] * 2
    assert names.asked == ["silent.example", "late.example"]


async def test_an_address_needs_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lookup, "_MAX_LOOKUPS", 0)
    async with asyncio.timeout(PATIENCE_S):
        assert await look_up("127.0.0.1", 80) == ["127.0.0.1"]
        assert await look_up("::1", 80) == ["::1"]
        assert await look_up("0x7f.1", 80) == ["127.0.0.1"]


async def test_without_a_thread_its_place_is_free_again(names: NameServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(name_lookup, "_MAX_LOOKUPS", 1)

    def fail(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", fail)
        with pytest.raises(OSError, match="no thread"):
            await look_up("some.example", 80)
    async with asyncio.timeout(PATIENCE_S):
        assert await look_up("some.example", 80) == ["1.1.1.1", "::2"]

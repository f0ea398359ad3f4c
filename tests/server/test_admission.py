"""Limits on what may be open, over all API servers of a server."""

import math
from pathlib import Path

import pytest

from tokenmill_engine.errors import OverloadedError
from tokenmill_engine.messages import SamplingParams
from tokenmill_server.admission import REQUESTS, TOKENS, Admission, QueueCounts, make_counts
from tokenmill_server.config import ServerConfig
from tokenmill_server.processing.generation import GenerationRequest


def prompt(num_tokens: int, n: int = 1) -> GenerationRequest:
    return GenerationRequest("", [1] * num_tokens, SamplingParams(n=n), arrival_time=0.0)


def test_what_other_api_servers_have_open_counts(tmp_path: Path) -> None:
    config = ServerConfig(max_num_queued_reqs=5, max_num_queued_tokens=100)
    first, second = (QueueCounts(tmp_path / "counts", 2, own) for own in range(2))
    refused: list[str] = []
    admission = Admission(config, first, refused.append)
    second.write(3, 60)
    admission.check([prompt(40, n=2)])
    for too_many, reason in (([prompt(1, n=3)], REQUESTS), ([prompt(20), prompt(21)], TOKENS)):
        with pytest.raises(OverloadedError) as error:
            admission.check(too_many)
        assert error.value.retry_after_s == 1
        assert refused.pop() == reason
    first.write(2, 0)
    with pytest.raises(OverloadedError, match="5 sequences are waiting or running"):
        admission.check_room()
    QueueCounts(tmp_path / "counts", 2, 1)  # the second one's successor has nothing open
    admission.check_room()


def test_what_will_never_be_taken_is_not_to_be_tried_again(tmp_path: Path) -> None:
    config = ServerConfig(max_num_queued_reqs=5, max_num_queued_tokens=100)
    admission = Admission(config, QueueCounts(tmp_path / "counts", 1, 0), lambda _: None)
    with pytest.raises(OverloadedError) as error:
        admission.check([prompt(1, n=6)])
    assert error.value.retry_after_s is None
    admission.check([prompt(1000)])  # alone


def test_no_limit_costs_nothing(tmp_path: Path) -> None:
    assert make_counts(ServerConfig(), tmp_path, 0) is None
    assert not list(tmp_path.iterdir())


def test_who_is_refused_is_told_when_there_will_be_room(tmp_path: Path) -> None:
    """By how fast others left in the last half minute; at most a minute, and a second where nothing is known."""
    now = 100.0
    counts = QueueCounts(tmp_path / "counts", 1, 0)
    config = ServerConfig(max_num_queued_reqs=10, max_num_queued_tokens=1000)
    admission = Admission(config, counts, lambda _: None, clock=lambda: now)

    def told(*refused: GenerationRequest) -> int | None:
        with pytest.raises(OverloadedError) as error:
            admission.check(refused)
        return error.value.retry_after_s

    counts.write(10, 0)
    assert told(prompt(1)) == 1
    for _ in range(4):  # half a sequence and ten tokens a second
        now += 2.0
        counts.write(9, 980)
        counts.write(10, 1000)
    assert told(prompt(1, n=3)) == 6
    counts.write(2, 1000)
    now = 110.0
    assert told(prompt(300)) == math.ceil(300 / (60 / 10))
    now = 125.0
    assert told(prompt(900)) == 60
    now = 200.0  # nothing is known of the last half minute
    assert told(prompt(900)) == 1

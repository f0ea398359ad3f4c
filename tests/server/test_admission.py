"""Limits on what may be open, over all API servers of a server."""

from pathlib import Path

import pytest

from tokenmill_engine.errors import OverloadedError
from tokenmill_engine.messages import SamplingParams
from tokenmill_server.admission import REQUESTS, TOKENS, Admission, QueueCounts, make_admission
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
    assert make_admission(ServerConfig(), tmp_path, 0, lambda _: None) == (None, None)
    assert not list(tmp_path.iterdir())

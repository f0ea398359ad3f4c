"""What launchers know of their processes before the configuration is checked."""

import os

import pytest

from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.launching import may_spawn_early, workers_asked_for


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", 0),
        ("--distributed-executor-backend uni", 0),
        ("--distributed-executor-backend mp", 1),
        ("-tp 3", 3),
        ("-tp 3 --distributed-executor-backend mp", 3),
        ("-pp 2", 2),
        ("-tp 3 -pp 2", 6),
    ],
)
def test_flags_tell_how_many_workers_there_will_be(arguments: str, expected: int) -> None:
    values = read_flags(["--device", "cpu", *arguments.split()], {})
    assert workers_asked_for(values) == expected
    parallel = build_configuration(values).engine.parallel
    assert expected == (parallel.world_size if parallel.executor == "mp" else 0)


def test_no_more_processes_than_cores_begin_early() -> None:
    cores = len(os.sched_getaffinity(0))
    for num_engines, num_workers in ((cores, 0), (cores, 1), (1, cores)):
        assert may_spawn_early(num_engines, num_workers)
        assert not may_spawn_early(num_engines, num_workers + cores + 1)
        assert not may_spawn_early(num_engines + cores, num_workers)

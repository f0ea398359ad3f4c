"""Which ranks a launcher runs and serves, and the combinations that are refused, with the fix named."""

import logging

import pytest

from tokenmill_engine.config.device import DeviceInfo
from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_server.config import Configuration, LoadBalancing
from tokenmill_server.flags import build
from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.flags.data_parallel import resolve_data_parallel, tell_what_has_no_effect

GIB = 2**30


def configure(arguments: str) -> Configuration:
    return build_configuration(read_flags(["--device", "cpu", *arguments.split()], {}))


@pytest.mark.parametrize(
    ("arguments", "balancing", "local", "served"),
    [
        ("", LoadBalancing.INTERNAL, range(1), range(1)),
        ("-dp 3", LoadBalancing.INTERNAL, range(3), range(3)),
        ("-dp 3 -dpl 3 -dpr 0", LoadBalancing.INTERNAL, range(3), range(3)),
        ("-dp 4 -dph -dpl 2", LoadBalancing.HYBRID, range(2), range(2)),
        ("-dp 4 -dph -dpl 2 -dpr 2", LoadBalancing.HYBRID, range(2, 4), range(2, 4)),
        ("-dp 4 -dpl 1 -dpr 2", LoadBalancing.HYBRID, range(2, 3), range(2, 3)),
        ("-dp 4 -dpn 2", LoadBalancing.EXTERNAL, range(2, 3), range(2, 3)),
        ("-dp 4 -dpn 0 -dpe -dpl 1", LoadBalancing.EXTERNAL, range(1), range(1)),
        ("-dp 4 -dpe -dpr 3", LoadBalancing.EXTERNAL, range(3, 4), range(3, 4)),
        ("-dp 4 -dpn 2 -dpr 2 -dpb mp", LoadBalancing.EXTERNAL, range(2, 3), range(2, 3)),
        ("-dp 4 -dpl 2", LoadBalancing.INTERNAL, range(2), range(4)),
        ("-dp 4 -dpl 0", LoadBalancing.INTERNAL, range(0), range(4)),
        ("-dp 4 --headless -dpl 1 -dpr 2", LoadBalancing.INTERNAL, range(2, 3), range(4)),
        ("-dp 4 --headless -dpr 2", LoadBalancing.INTERNAL, range(2, 4), range(4)),
        ("-dp 4 --headless", LoadBalancing.INTERNAL, range(4), range(4)),
    ],
)
def test_ranks(arguments: str, balancing: LoadBalancing, local: range, served: range) -> None:
    configuration = configure(arguments)
    parallel, engine = configuration.data_parallel, configuration.engine
    assert parallel.load_balancing is balancing
    assert (parallel.local_ranks, parallel.served_ranks) == (local, served)
    assert (engine.data_parallel_size, engine.data_parallel_size_local) == (len(served), len(local))
    assert [engine.rank_of(engine_number) for engine_number in range(len(served))] == list(served)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("-dpn 1", "--data-parallel-rank 1 is out of range: ranks are 0 to 0; choose one of them, or a larger"),
        ("-dp 4 -dpr 4 -dpl 1", "--data-parallel-start-rank 4 is out of range: ranks are 0 to 3"),
        ("-dp 2 -dpl 3", "use at most --data-parallel-size-local 2"),
        ("-dp 4 -dpr 3 -dpl 2", "from rank 3 on is more than the 4 of --data-parallel-size; use at most"),
        ("-dp 4 -dpe", "add --data-parallel-rank with one of 0 to 3"),
        ("-dp 4 -dpn 1 -dpl 2", "use --data-parallel-hybrid-lb with --data-parallel-start-rank 1 instead"),
        ("-dp 4 -dpn 1 -dpr 2", "--data-parallel-rank 1 contradicts --data-parallel-start-rank 2"),
        ("-dp 4 -dpn 1 -dph -dpl 1", "--data-parallel-rank contradicts --data-parallel-hybrid-lb"),
        ("-dp 4 -dpe -dpr 1 -dph", "--data-parallel-external-lb contradicts --data-parallel-hybrid-lb"),
        ("-dp 4 -dph", "add --data-parallel-size-local with 1 to 4"),
        ("-dp 4 -dpr 1", "add --data-parallel-size-local with 1 to 3"),
        ("-dp 4 -dph -dpl 0", "use at least 1"),
        ("-dp 4 --headless -dph -dpl 1", "--headless contradicts --data-parallel-hybrid-lb"),
        ("-dp 4 --headless -dpn 1", "--headless contradicts --data-parallel-rank"),
        ("-dp 4 --headless -dpl 0", "use at least 1"),
        ("-dpl -1", "--data-parallel-size-local must be a whole number, 0 to 256; got '-1'"),
        ("-dpb ray", "--data-parallel-backend ray is not supported yet (only mp is)"),
    ],
)
def test_refused_before_anything_starts(arguments: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configure(arguments)
    assert message in raised.value.message


def test_gpus_are_needed_for_local_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "detect_device", lambda requested: DeviceInfo("cuda", "GPU", 80 * GIB, 2, (9, 0)))
    assert configure("-dp 8 -dph -dpl 2 -dpr 4").engine.data_parallel_size == 2
    with pytest.raises(StartupError, match=r"-size-local 3 needs 3 GPUs, 2 are visible; use at most .*-size-local 2$"):
        configure("-dp 8 -dph -dpl 3")


@pytest.mark.parametrize(
    ("arguments", "count"),
    [
        ("-dp 4", 16),
        ("-dp 4 -dpl 2", 16),
        ("-dp 4 -dph -dpl 2", 8),
        ("-dp 4 -dpn 1", 1),
        ("-dp 4 -dpn 1 -asc 3", 3),
        ("-dp 4 -dpl 2 --headless", 1),
    ],
)
def test_api_servers_follow_the_engine_cores_that_they_serve(
    monkeypatch: pytest.MonkeyPatch, arguments: str, count: int
) -> None:
    monkeypatch.setattr(build, "detect_device", lambda requested: DeviceInfo("cuda", "GPU", 80 * GIB, 4, (9, 0)))
    monkeypatch.setattr(build, "usable_cpus", lambda: 128)
    assert configure(arguments).server.api_server_count == count


@pytest.mark.parametrize(
    ("arguments", "is_head"),
    [
        ("", False),
        ("-dp 2", False),
        ("-dp 2 -dpl 1", True),
        ("-dp 2 -dpl 0", True),
        ("-dp 2 -dpl 1 --headless", False),
        ("-dp 2 -dpl 1 -dph", False),
        ("-dp 2 -dpn 1", False),
    ],
)
def test_heads_are_joined_by_headless_launchers(arguments: str, is_head: bool) -> None:
    assert configure(arguments).data_parallel.is_head is is_head


def test_memory_is_needed_for_local_ranks_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "detect_device", lambda requested: DeviceInfo("cpu", "cpu", 2**30, 1))
    assert configure("-dp 8 -dpl 1 --dtype float32").engine.device.num_threads >= 1
    with pytest.raises(StartupError, match="use a smaller --data-parallel-size-local than 4"):
        configure("-dp 8 -dpl 4 --dtype float32")
    assert configure("-dp 8 -dpl 0 --dtype float32").engine.data_parallel_size_local == 0


def test_a_headless_launcher_names_what_it_has_no_use_for(caplog: pytest.LogCaptureFixture) -> None:
    words = "-dp 2 --headless -dpl 1 --port 1 -asc 2 --served-model-name m --dtype float32 --max-logprobs 3"
    words += " --shutdown-timeout 5"
    values = read_flags(words.split(), {"TOKENMILL_DP_TOKEN": "s"})
    with caplog.at_level(logging.INFO):
        tell_what_has_no_effect(values, resolve_data_parallel(values))
    assert caplog.messages == [
        "without effect, because a headless launcher has no API servers: --max-logprobs, --port, --api-server-count"
    ]


def test_flags_of_other_launchers_are_named_where_there_are_none(caplog: pytest.LogCaptureFixture) -> None:
    values = read_flags(["-dp", "2", "-dpn", "1", "-dpa", "10.0.0.1", "-dpp", "7"], {"TOKENMILL_DP_TOKEN": "s"})
    with caplog.at_level(logging.INFO):
        tell_what_has_no_effect(values, resolve_data_parallel(values))
    assert (
        "no other launcher: --data-parallel-address, --data-parallel-rpc-port, TOKENMILL_DP_TOKEN" in caplog.messages[0]
    )

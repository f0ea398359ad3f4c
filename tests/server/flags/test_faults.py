"""What is refused of the flags about engine cores that die or hang."""

import pytest

from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.command_line import read_flags


@pytest.mark.parametrize("value", ["0.3", "1", "4.999", "-1", "-0.1", "nan", "inf", "soon"])
def test_a_stall_timeout_that_would_kill_healthy_engine_cores_is_refused(value: str) -> None:
    with pytest.raises(ConfigError) as raised:
        read_flags([f"--engine-stall-timeout={value}"])
    message = raised.value.message
    assert message.startswith("--engine-stall-timeout must be 0, or at least 5 (engine cores are asked once a second")
    assert value in message


@pytest.mark.parametrize(("value", "seconds"), [("0", 0.0), ("0.0", 0.0), ("5", 5.0), ("1e3", 1000.0)])
def test_stall_timeouts_that_hold(value: str, seconds: float) -> None:
    assert read_flags(["--engine-stall-timeout", value])["engine_stall_timeout"] == seconds

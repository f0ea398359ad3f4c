"""The rows of the table of flags that say what happens when an engine core dies or hangs."""

import math

from tokenmill_server.flags.flag import EnvAlias, Flag, Group
from tokenmill_server.flags.parsers import integer, number

_MIN_STALL_TIMEOUT_S = 5


def _stall_timeout(value: object) -> float:
    """0, or seconds that an engine core which is well never needs for a step."""
    wanted = (
        f"0, or at least {_MIN_STALL_TIMEOUT_S} (engine cores are asked once a second what they get done, and one that "
        "computes a long prompt would be killed)"
    )
    try:
        seconds = float(number(0, math.inf)(value))
    except ValueError:
        raise ValueError(wanted) from None
    if 0 < seconds < _MIN_STALL_TIMEOUT_S:
        raise ValueError(wanted)
    return seconds


FAULTS = (
    Flag(
        "max-engine-restarts",
        Group.FAULTS,
        integer(0, 2**31 - 1),
        None,
        "How often each engine core is started again after it died or hung; one that has served for 10 minutes since "
        "may fail as often again. The server ends when all are gone for good. Default: 3, and 0 where there is one",
        "faults.max_engine_restarts",
        metavar="N",
        offline=False,
    ),
    Flag(
        "engine-stall-timeout",
        Group.FAULTS,
        _stall_timeout,
        None,
        "Seconds an engine core may have work and finish no step. After that it counts as stalled and gets requests "
        "only if all are; after twice as long it is killed. At least 5, and more than the longest step; 0: nothing "
        "that hangs is looked for, as under a debugger. Default: 60 on a GPU, 300 on the CPU",
        "faults.engine_stall_timeout_s",
        metavar="SECONDS",
        offline=False,
        env=(EnvAlias("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),),
    ),
)

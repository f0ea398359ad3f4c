"""What the log of a launcher says of engine cores that have served: in the same words, whoever runs them."""

import logging

from tokenmill_engine.ipc.control import EngineDraining, EngineLost, EngineRecovered, EngineStalled
from tokenmill_engine.messages import EngineReady
from tokenmill_server.engine_table import EngineUpdate

logger = logging.getLogger(__name__)


def log_engine(update: EngineUpdate, rank: int, stall_timeout_s: float, restart: str = "starting it again") -> None:
    """One line. `rank` is the engine core's in its deployment; `restart` is what happens after a loss that is followed
    by a restart."""
    match update:
        case EngineReady():
            logger.info("engine core %d serves again", rank)
        case EngineDraining(message=message):
            logger.info("%s; what runs there may finish", message)
        case EngineLost(message=message, planned=True):
            logger.info("%s, which was told to stop; a launcher that brings it back may join", message)
        case EngineLost(message=message):
            outlook = "a launcher that brings it back may join" if update.may_return else "it is not started again"
            logger.error("%s; its requests are lost, %s", message, restart if update.restarts else outlook)
        case EngineStalled():
            logger.error("engine core %d is stalled: it has work but finished no step for %g s", rank, stall_timeout_s)
        case EngineRecovered():
            logger.info("engine core %d gets on again", rank)


def log_sharing(ready: EngineReady, rank: int, expected: bool) -> None:
    """A warning if API servers share memory with engine cores, but not with this one."""
    if expected and ready.num_segments == 0:
        logger.warning(
            "engine core %d is on another machine and shares no memory with API servers: images travel to it with each "
            "request, whatever --mm-processor-cache-type says",
            rank,
        )

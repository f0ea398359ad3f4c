"""A headless launcher's way to the head: it looks for it for as long as need be, both prove who they are and that they
fit together."""

import logging
import os
import socket
import time
from dataclasses import dataclass

import msgspec

from tokenmill_engine.errors import ConfigError
from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel, ForeignFrameError
from tokenmill_engine.messages import Endpoints
from tokenmill_server.config import DataParallelConfig
from tokenmill_server.data_parallel.authentication import engine_key, is_proof, new_nonce, proof
from tokenmill_server.data_parallel.connection import channel_over, connect, shown
from tokenmill_server.data_parallel.messages import (
    Accepted,
    Challenge,
    Facts,
    FromHead,
    HeadStopped,
    JoinRequest,
    Refused,
    Registration,
)
from tokenmill_server.data_parallel.ranks import phrase
from tokenmill_server.liveness import SILENT_S
from tokenmill_server.version import __version__

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S = 5.0
_ANSWER_TIMEOUT_S = 10.0
_RETRY_S = 0.5
_REMIND_S = 10.0
_PATIENCE_S = 12.0
"""With a head that takes this launcher's predecessor for alive: within ten seconds it notices that it has vanished."""


class _NotThereError(Exception):
    """The head cannot be reached, is about to end, or waits for another launcher to end; why. Another try may do."""


class _NotNowError(Exception):
    """The head does not let this launcher in for now; why. Another try soon may succeed."""


@dataclass(frozen=True, slots=True)
class Head:
    """The head that this launcher has joined."""

    channel: ControlChannel[FromHead]
    address: str
    """Of the head."""
    own_address: str
    """Of this machine, as the head reaches it."""
    secret_key: str
    """Of the sockets of engine cores."""

    def bind(self) -> Endpoints:
        """Where an engine core binds its sockets: at ports that the system chooses."""
        host = f"[{self.own_address}]" if ":" in self.own_address else self.own_address
        return Endpoints(f"tcp://{host}:*", f"tcp://{host}:*", self.secret_key)


def join(parallel: DataParallelConfig, facts: Facts) -> Head:
    """Waits until the head is there, and registers this launcher's ranks.

    Raises:
        ConfigError: the head does not let this launcher in, or is none.
    """
    where = shown(parallel.address, parallel.rpc_port)
    remind_at = time.monotonic() + _REMIND_S
    give_up_at: float | None = None
    logger.info("joining the head at %s with %s", where, phrase(parallel.local_ranks))
    while True:
        try:
            return _try_to_join(parallel, facts, where)
        except _NotNowError as error:
            if give_up_at is None:
                give_up_at = time.monotonic() + _PATIENCE_S
                logger.info("the head does not let this launcher join, which may pass within seconds: %s", error)
            elif time.monotonic() >= give_up_at:
                raise ConfigError(f"the head does not let this launcher join: {error}") from None
        except _NotThereError as error:
            give_up_at = None
            if time.monotonic() >= remind_at:
                remind_at = time.monotonic() + _REMIND_S
                logger.info("still waiting for the head at %s: %s", where, error)
        time.sleep(_RETRY_S)


def _try_to_join(parallel: DataParallelConfig, facts: Facts, where: str) -> Head:
    try:
        connection = connect(parallel.address, parallel.rpc_port, _CONNECT_TIMEOUT_S)
    except socket.gaierror as error:
        raise _NotThereError(f"its address is unknown ({error.strerror})") from None
    except OSError as error:
        raise _NotThereError(os.strerror(error.errno) if error.errno else "it does not answer") from None
    own_address = str(connection.getsockname()[0])
    try:
        channel: ControlChannel[FromHead] = channel_over(connection, FromHead, send_timeout_s=int(SILENT_S))
    except OSError as error:
        connection.close()
        raise _NotThereError(f"it takes connections, but lets nobody join ({error})") from None
    try:
        # Of a head that is stopped the kernel still takes connections; whoever else answers there says other things.
        connection.settimeout(_ANSWER_TIMEOUT_S)
        accepted = _shake_hands(channel, parallel, facts)
        connection.settimeout(None)
    except (ForeignFrameError, msgspec.MsgspecError, UnicodeDecodeError):
        channel.close()
        raise ConfigError(
            f"what answers at {where} is no head of ours; check --data-parallel-address and --data-parallel-rpc-port"
        ) from None
    except ChannelClosedError as error:
        channel.close()
        raise _NotThereError(f"it takes connections, but lets nobody join ({error})") from None
    except (_NotThereError, _NotNowError, ConfigError):
        channel.close()
        raise
    return Head(channel, where, own_address, engine_key(parallel.token, accepted.key_nonce))


def _shake_hands(channel: ControlChannel[FromHead], parallel: DataParallelConfig, facts: Facts) -> Accepted:
    nonce = new_nonce()
    channel.send(JoinRequest(__version__, nonce))
    challenge = channel.receive()
    if not isinstance(challenge, Challenge):
        raise _refusal(challenge)
    if not is_proof(challenge.proof, parallel.token, "head", nonce, challenge.nonce):
        raise ConfigError(
            "the head at --data-parallel-address has another --data-parallel-token; give all launchers the same"
        )
    ranks = parallel.local_ranks
    numbers = b"%d %d" % (ranks.start, ranks.stop)
    evidence = proof(parallel.token, "launcher", challenge.nonce, nonce, numbers, msgspec.json.encode(facts))
    channel.send(Registration(ranks.start, len(ranks), facts, evidence))
    answer = channel.receive()
    if not isinstance(answer, Accepted):
        raise _refusal(answer)
    return answer


def _refusal(message: FromHead) -> Exception:
    if isinstance(message, HeadStopped):
        return _NotThereError("it is about to end")
    if isinstance(message, Refused):
        if message.worth_waiting:
            return _NotThereError(message.message)
        if message.may_pass:
            return _NotNowError(message.message)
        return ConfigError(f"the head does not let this launcher join: {message.message}")
    return ConfigError("the head says what no head of this version says; install the same Tokenmill on all machines")

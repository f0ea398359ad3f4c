"""The API server processes of one launcher: starts them, speaks to them, replaces those that die or hang.

When the server as a whole starts, drains or ends is the launcher's business.
"""

import logging
import os
import signal
import time
from collections import deque
from collections.abc import Mapping, Sequence

from tokenmill_engine.errors import EngineDeadError, StartupError
from tokenmill_engine.ipc.channel import ChannelClosedError
from tokenmill_engine.ipc.child import ChildProcess, spawn_child
from tokenmill_engine.ipc.control import FromApiServer, ToApiServer
from tokenmill_engine.ipc.exits import describe_exit
from tokenmill_server.children import stop_children, watch_child
from tokenmill_server.config import Configuration
from tokenmill_server.control import ApiServerStart
from tokenmill_server.liveness import Liveness
from tokenmill_server.watcher import Watcher

logger = logging.getLogger(__name__)

_MODULE = "tokenmill_server.api_process"
_MAX_DEATHS = 5
_DEATHS_WINDOW_S = 60.0
_BACKOFF_S = 4.0
_MAX_BACKOFF_S = 30.0
_NUM_INCARNATIONS = 256
"""After so many they begin again."""


class ApiServers:
    """One process per slot, or none for the moment. Their keys in the watcher are `("api_server", slot)`."""

    def __init__(
        self,
        configuration: Configuration,
        listen_fd: int,
        run_dir: str,
        environment: Mapping[str, str],
        watcher: Watcher,
        segments: Sequence[int] = (),
    ) -> None:
        """`segments`: descriptors of the memory in which each shares media, by slot; none where nothing is shared. They
        stay the caller's, who keeps them open."""
        self._configuration = configuration
        self._listen_fd = listen_fd
        self._run_dir = run_dir
        self._environment = environment
        self._watcher = watcher
        self._segments = segments
        self._children: dict[int, ChildProcess[FromApiServer]] = {}
        self._incarnations = dict.fromkeys(range(configuration.server.api_server_count), 0)
        self._listening: set[int] = set()
        self._serving: set[int] = set()
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        self._faults: dict[int, str] = {}
        """What those did that were killed for it."""
        self._starts: dict[int, float] = {}
        """When those are to be started that take the place of others, on the monotonic clock."""
        self._num_failures = dict.fromkeys(self._incarnations, 0)
        """How often such a start has failed in a row."""
        self._liveness = Liveness(gives_up=configuration.faults.engine_stall_timeout_s > 0)

    @property
    def running(self) -> set[int]:
        """Slots with a process."""
        return set(self._children)

    @property
    def all_serve(self) -> bool:
        """Whether every one answers requests."""
        return len(self._serving) == len(self._incarnations)

    def is_listening(self, slot: int) -> bool:
        """Whether it accepts connections."""
        return slot in self._listening

    def incarnation(self, slot: int) -> int:
        """Of the process in this slot, or of the last one."""
        return self._incarnations[slot] % _NUM_INCARNATIONS

    def start(self) -> None:
        """Starts all of them. Raises StartupError if the machine does not let us."""
        for slot in self._incarnations:
            try:
                self._start(slot)
            except OSError as error:
                raise StartupError(f"API server {slot} could not be started: {error}") from error

    def replace(self, slot: int) -> None:
        """Lets the next `tick` start another in the place of one that ended."""
        self._incarnations[slot] += 1
        self._starts[slot] = time.monotonic()

    def end_replacements(self) -> None:
        """From now on nothing is started any more."""
        self._starts.clear()

    def listens(self, slot: int) -> None:
        """It says so."""
        self._listening.add(slot)

    def serves(self, slot: int) -> None:
        """It says so; from now on it must react."""
        self._serving.add(slot)
        self._liveness.expect_answers(("api_server", slot))

    def answered(self, slot: int) -> None:
        """It shows that it lives."""
        self._liveness.answered(("api_server", slot))

    def ended(self, slot: int, returncode: int) -> str:
        """Its process is gone. Returns how it ended, as the predicate of a sentence."""
        del self._children[slot]
        self._listening.discard(slot)
        self._serving.discard(slot)
        self._liveness.forget(("api_server", slot))
        fault = self._faults.pop(slot, None)
        if fault is not None:
            return f"{fault} and was killed"
        return describe_exit(returncode, savers="--kv-cache-memory-bytes or --api-server-count")

    def count_death(self, reason: str) -> None:
        """Raises EngineDeadError if too many have ended within a short time; the last one for `reason`."""
        self._deaths.append(time.monotonic())
        if len(self._deaths) == _MAX_DEATHS and self._deaths[-1] - self._deaths[0] < _DEATHS_WINDOW_S:
            raise EngineDeadError(
                f"API servers ended {_MAX_DEATHS} times in {_DEATHS_WINDOW_S:.0f} s; the last one {reason}"
            )

    @property
    def next_tick(self) -> float:
        """When `tick` has something to do next, on the monotonic clock."""
        return min((self._liveness.next_look, *self._starts.values()))

    def tick(self) -> list[int]:
        """To be called when `next_tick` has come, or more often: ends those that hang, and starts those that replace
        others. Returns the slots of the latter.

        Raises:
            EngineDeadError: a start failed, and too many have failed or ended within a short time.
        """
        for (_, slot), fault in self._liveness.look():
            if slot not in self._faults:
                self._faults[slot] = fault
                os.killpg(self._children[slot].process.pid, signal.SIGKILL)
        now = time.monotonic()
        return [slot for slot, at in list(self._starts.items()) if at <= now and self._try_to_start(slot)]

    def send(self, slot: int, message: ApiServerStart | ToApiServer) -> None:
        """Tells one of them, if it is still there."""
        if slot not in self._children:
            return
        try:
            self._children[slot].channel.send(message)
        except ChannelClosedError:
            logger.debug("API server %d is gone; its end will be noticed", slot)

    def broadcast(self, message: ToApiServer) -> None:
        """Tells all of them."""
        for slot in self._children:
            self.send(slot, message)

    def stop(self) -> None:
        """Ends every one and waits for it."""
        stop_children(self._children.values())
        self._children.clear()

    def _try_to_start(self, slot: int) -> bool:
        """One that replaces another. If the machine does not let us, that counts as a death; later it is tried
        again."""
        try:
            self._start(slot)
        except OSError as error:
            self.count_death(f"could not be started: {error}")
            wait_s = min(_MAX_BACKOFF_S, _BACKOFF_S * 2.0 ** self._num_failures[slot])
            logger.error("API server %d could not be started: %s; trying again in %g s", slot, error, wait_s)
            self._num_failures[slot] += 1
            self._starts[slot] = time.monotonic() + wait_s
            return False
        self._num_failures[slot] = 0
        del self._starts[slot]
        return True

    def _start(self, slot: int) -> None:
        # The next in this slot goes on with the memory of the last one: engine cores have it already.
        own = self._segments[slot : slot + 1]
        child: ChildProcess[FromApiServer] = spawn_child(
            _MODULE, FromApiServer, pass_fds=(self._listen_fd, *own), env=self._environment
        )
        watch_child(self._watcher, ("api_server", slot), child)
        self._children[slot] = child
        self._liveness.watch(("api_server", slot), child.channel, child.process.pid)
        start = ApiServerStart(
            client=slot,
            incarnation=self.incarnation(slot),
            run_dir=self._run_dir,
            listen_fd=self._listen_fd,
            server=self._configuration.server,
            engine=self._configuration.engine,
            segment_fd=own[0] if own else None,
        )
        self.send(slot, start)

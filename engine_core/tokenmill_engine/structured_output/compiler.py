"""An engine core's end of the process that compiles grammars."""

import contextlib
import os
import pickle
import socket
import subprocess
import threading
import time
from typing import Never

from tokenmill_engine.config.engine import ModelConfig
from tokenmill_engine.errors import NotBegunError
from tokenmill_engine.ipc.child import ChildProcess, spawn_child
from tokenmill_engine.structured_output.asking import BACKENDS, BEGUN, Answer, BackendName, Question, receive, send
from tokenmill_engine.structured_output.grammar import GrammarError, NotExpressibleError

_MODULE = "tokenmill_engine.structured_output.compiler_process"
_PATIENCE_S = 60.0
"""For an answer, or the end of who was to give it, which the kernel sees to."""
_END_S = 1.0
"""For the end of a process that ends."""


class TooSlowError(GrammarError):
    """It takes more time than it was given."""


class GrammarCompiler:
    """Starts the process, and asks it. It ends with the thread that made this object."""

    def __init__(self, model: ModelConfig) -> None:
        """The thread must live as long as the process is to. Raises OSError if the machine allows no more processes."""
        self._jobs, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._sending = threading.Lock()
        with theirs:
            self._child: ChildProcess[Never] = spawn_child(
                _MODULE,
                None,
                args=[
                    *("--jobs-fd", str(theirs.fileno())),
                    *("--tokenizer", model.tokenizer_path),
                    *("--vocab-size", str(model.architecture.vocab_size)),
                    *("--end-tokens", *map(str, model.eos_token_ids)),
                ],
                pass_fds=(theirs.fileno(),),
            )

    @property
    def is_alive(self) -> bool:
        return self._child.process.poll() is None

    def compile(self, question: Question) -> str:
        """What came of it, for `load`. Blocks; any thread may ask.

        Raises:
            TooSlowError: it takes more time than it may.
            GrammarError: it is malformed, not supported, or takes more memory than it may.
            NotBegunError: the process has ended.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with ours:
            with theirs, self._sending:
                self._hand_over(theirs, question.backend)
            began = time.monotonic()
            ours.settimeout(_PATIENCE_S)
            try:
                send(ours, question)
                data = receive(ours)
            except OSError:
                data = b""
        if len(data) <= len(BEGUN):
            if not data or not self.is_alive:
                self._wait_for_end()
                raise NotBegunError("the process that compiles grammars has ended; the request may be sent again")
            if time.monotonic() - began < question.limit_s:
                raise GrammarError("it takes too much memory to prepare, or its library fails on it")
            raise TooSlowError(f"it takes more than {question.limit_s:g} s to prepare, which is the limit")
        answer: Answer = pickle.loads(data[len(BEGUN) :])
        if answer.compiled is None:
            raise (NotExpressibleError if answer.is_for_another else GrammarError)(answer.error)
        return answer.compiled

    def close(self) -> None:
        """End the process."""
        self._jobs.close()
        with contextlib.suppress(OSError):
            self._child.process.kill()
        self._child.process.wait()
        self._child.channel.close()

    def _wait_for_end(self) -> None:
        """It has closed its sockets and is about to be seen as ended: who asks next is to know, and start another."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.process.wait(_END_S)

    def _hand_over(self, job: socket.socket, backend: BackendName) -> None:
        try:
            socket.send_fds(self._jobs, [bytes([BACKENDS.index(backend)])], [job.fileno()])
        except OSError as error:
            self._wait_for_end()
            raise NotBegunError(
                f"the process that compiles grammars is gone ({os.strerror(error.errno or 0)}); the request may be "
                "sent again"
            ) from error

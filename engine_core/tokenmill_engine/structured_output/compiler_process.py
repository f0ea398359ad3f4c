"""A program of its own that compiles grammars for an engine core, each in a process that is forked for it: a schema
that takes for ever, or all memory, or the library down, ends that process and nothing else.

The kernel ends it when its processor time is over; nobody has to watch it. This process itself never compiles and has
one thread, so that it can be forked at any time.
"""

import argparse
import contextlib
import os
import pickle
import resource
import signal
import socket
import sys
from typing import NoReturn

from tokenmill_engine.errors import TokenmillError
from tokenmill_engine.ipc.lifecycle import become_child
from tokenmill_engine.ipc.priority import give_way
from tokenmill_engine.structured_output.asking import BACKENDS, BEGUN, Answer, Question, receive, send
from tokenmill_engine.structured_output.backends import Backends
from tokenmill_engine.structured_output.grammar import GrammarError, NotExpressibleError

_MEMORY_BYTES = 1 << 30
"""That compiling may take."""
_PATIENCE_S = 30.0
"""How long it may take where the machine is busy."""


def main() -> NoReturn:
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    parser.add_argument("--jobs-fd", type=int, required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--vocab-size", type=int, required=True)
    parser.add_argument("--end-tokens", type=int, nargs="+", required=True)
    args = parser.parse_args()
    become_child("grammar compiler", args.parent_pid)
    give_way()
    # Who is forked is not waited for.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    jobs = socket.socket(fileno=args.jobs_fd)
    backends = Backends(args.tokenizer, args.vocab_size, tuple(args.end_tokens))
    while True:
        message, descriptors, _, _ = socket.recv_fds(jobs, 1, 1)
        if not message:
            os._exit(0)
        # Once, for all that are forked. What goes wrong here goes wrong there again, and is told.
        with contextlib.suppress(Exception):
            backends.of(BACKENDS[message[0]])
        for descriptor in descriptors:
            if os.fork() == 0:
                jobs.close()
                _serve(socket.socket(fileno=descriptor), backends)
            os.close(descriptor)


def _serve(job: socket.socket, backends: Backends) -> NoReturn:
    """The life of a forked process."""
    become_child("grammar", os.getppid())
    signal.setitimer(signal.ITIMER_REAL, _PATIENCE_S)
    question: Question = pickle.loads(receive(job))
    job.sendall(BEGUN)
    signal.setitimer(signal.ITIMER_PROF, question.limit_s)
    allowed = _address_space() + _MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (allowed, allowed))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    # What libraries say about a schema is for its author, not for our log.
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, sys.stdout.fileno())
    os.dup2(quiet, sys.stderr.fileno())
    try:
        answer = Answer(backends.of(question.backend).compile(question.spec))
    except GrammarError as error:
        answer = Answer(None, error.message, isinstance(error, NotExpressibleError))
    except TokenmillError as error:
        answer = Answer(None, f"the model's tokenizer is of no use for grammars: {error}")
    except MemoryError:
        os._exit(1)
    send(job, answer)
    os._exit(0)


def _address_space() -> int:
    """Bytes of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    main()

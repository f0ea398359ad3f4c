"""One API server process: `python -m tokenmill_server.api_process --control-fd N --parent-pid P`.

Started by the launcher. Serves the inherited listening socket at once; inference is answered with 503 until the
engine cores are ready. Never imports torch or transformers.
"""

import argparse
import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import uvloop
import zmq

from tokenmill_engine.config.model_files import read_tokenizer_facts
from tokenmill_engine.errors import TokenmillError, describe_os_error
from tokenmill_engine.ipc.channel import ChannelClosedError, ControlChannel
from tokenmill_engine.ipc.control import (
    Drain,
    Drained,
    EngineBack,
    EngineDrained,
    EngineDraining,
    EngineLost,
    EngineRecovered,
    EnginesReady,
    EngineStalled,
    FromApiServer,
    Listening,
    MetricsFetched,
    MetricsWanted,
    Ping,
    Pulse,
    RanksMissing,
    Serving,
    StartFailed,
    ToApiServer,
)
from tokenmill_engine.ipc.free_memory import return_free_memory
from tokenmill_engine.ipc.lifecycle import become_child, exit_orphaned, exit_terminated
from tokenmill_engine.ipc.logs import configure_logging
from tokenmill_engine.ipc.signals import END_SIGNAL
from tokenmill_engine.messages import EngineReady
from tokenmill_engine.metrics import FrontendMetrics
from tokenmill_server.accept import ConnectionCounts
from tokenmill_server.admission import make_admission, make_counts
from tokenmill_server.app import create_app
from tokenmill_server.balancing.load_balancer import make_balancer
from tokenmill_server.context import ServerContext
from tokenmill_server.control import ApiServerStart
from tokenmill_server.data_parallel.remote_metrics import RemoteMetrics
from tokenmill_server.engine_client import EngineClient
from tokenmill_server.engine_connections import EngineConnections
from tokenmill_server.errors import ShuttingDownError
from tokenmill_server.fingerprint import make_fingerprint
from tokenmill_server.http_connection import HeadLimits
from tokenmill_server.http_server import HttpServer
from tokenmill_server.media_segments import open_store
from tokenmill_server.multimodal.chat import make_media_chats
from tokenmill_server.multimodal.own_process import prepare_beside_event_loop
from tokenmill_server.own_middleware import load_middleware
from tokenmill_server.processing.chat_template import ChatTemplate
from tokenmill_server.processing.input_processor import InputProcessor
from tokenmill_server.processing.request_templates import RequestTemplates
from tokenmill_server.processing.tokenizer import load_tokenizer
from tokenmill_server.processing.vectors import make_vector_inputs
from tokenmill_server.readiness import Phase, Readiness
from tokenmill_server.text_generator import TextGenerator
from tokenmill_server.tls import make_tls_context
from tokenmill_server.tls_refresh import CertificateRefresher

logger = logging.getLogger(__name__)

ApiControl = ApiServerStart | ToApiServer
"""What an API server receives from the launcher; `ApiServerStart` comes first."""

ACCEPT_COUNTS_FILE = "accept.counts"

_LAST_WORDS_S = 1.0
"""How long cut-off requests have to deliver their error."""
_PATIENCE_S = 1.0
"""How long to wait for connections to engine cores before who asks is told which are missing."""
_GC_THRESHOLDS = (10_000, 10, 10)
"""Tokens make much garbage but no cycles; look for those rarely."""


def main() -> None:
    """Entry point of the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--control-fd", type=int, required=True)
    parser.add_argument("--parent-pid", type=int, required=True)
    arguments = parser.parse_args()
    channel: ControlChannel[ApiControl] = ControlChannel.from_fd(arguments.control_fd, ApiControl)
    try:
        start = channel.receive()
    except ChannelClosedError:
        sys.exit(1)
    if not isinstance(start, ApiServerStart):
        raise TypeError(f"the first message must be ApiServerStart, not {type(start).__name__}")
    # The handler comes first: from here on whoever ends us, the run directory does not stay behind.
    signal.signal(END_SIGNAL, lambda _number, _frame: exit_terminated(channel, start.run_dir))
    become_child(f"api server {start.client}", arguments.parent_pid, END_SIGNAL, start.run_dir)
    configure_logging(start.server.log_level, f"api server {start.client}")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            server = runner.run(_make_server(start, channel))
        except TokenmillError as error:
            _tell(channel, StartFailed(str(error)), start.run_dir)
            sys.exit(1)
        except (OSError, zmq.ZMQError) as error:
            is_there = os.path.isdir(start.run_dir)
            reason = describe_os_error(error) if is_there else f"the folder {start.run_dir} was removed"
            _tell(channel, StartFailed(f"API server {start.client} cannot start: {reason}"), start.run_dir)
            sys.exit(1)
        runner.run(server.run())


async def _make_server(start: ApiServerStart, channel: ControlChannel[ApiControl]) -> "ApiServer":
    """In the event loop: middleware of the owner may look for it. Raises as `build_context` and `create_app`."""
    return ApiServer(start, build_context(start), channel)


def _tell(channel: ControlChannel[ApiControl], message: FromApiServer, run_dir: str) -> None:
    """Sends to the launcher. If that is gone, the run directory is removed and the process ends."""
    try:
        channel.send(message)
    except ChannelClosedError:
        exit_orphaned(run_dir)


def build_context(start: ApiServerStart) -> ServerContext:
    """Everything the routes need. Raises ConfigError if the tokenizer, the template or the processor of images is
    unusable."""
    config, model = start.server, start.engine.model
    tokenizer = load_tokenizer(model.tokenizer_path)
    inputs = InputProcessor(tokenizer, load_template(start), start.engine)
    observability = start.engine.observability
    namespaces = observability.metrics_namespaces if observability.log_stats else ()
    num_engines = start.engine.data_parallel_size
    metrics = FrontendMetrics(
        observability.model_name,
        num_engines,
        model.max_model_len,
        namespaces,
        first_rank=start.engine.data_parallel_first_rank,
    )
    balancer = make_balancer(start.engine, config.api_server_count)
    client = EngineClient(start.client, start.incarnation, balancer)
    store = None if start.segment_fd is None else open_store(start.segment_fd, start.client, config.media)
    generator = TextGenerator(client, tokenizer, metrics)
    counts = make_counts(config, Path(start.run_dir), start.client)
    if counts is not None:
        generator.on_queue = counts.write
    return ServerContext(
        config=config,
        engine_config=start.engine,
        inputs=inputs,
        generator=generator,
        readiness=Readiness(num_engines),
        started_at=int(time.time()),
        fingerprint=make_fingerprint(config, start.engine),
        metrics=metrics,
        metrics_dir=os.environ["PROMETHEUS_MULTIPROC_DIR"],
        media=make_media_chats(
            inputs, start.engine, config.media, config.api_server_count, metrics.count_media_lookup, store
        ),
        request_templates=RequestTemplates(inputs.template, trusted=config.trust_request_chat_template),
        vectors=make_vector_inputs(inputs, model),
        admission=make_admission(config, counts, metrics.count_rejection),
        queue_counts=counts,
        own_middleware=load_middleware(config.middleware),
    )


def load_template(start: ApiServerStart) -> ChatTemplate | None:
    """The template given on the command line, else the tokenizer's, else the model's own."""
    model = start.engine.model
    template, bos_token, eos_token = read_tokenizer_facts(Path(model.tokenizer_path))
    source = start.server.chat_template or template
    if source is None and model.path != model.tokenizer_path:
        source = read_tokenizer_facts(Path(model.path))[0]
    return None if source is None else ChatTemplate(source, bos_token, eos_token)


class ApiServer:
    """Serves until the launcher says otherwise."""

    def __init__(self, start: ApiServerStart, context: ServerContext, channel: ControlChannel[ApiControl]) -> None:
        self._start = start
        self._context = context
        self._channel = channel
        self._engines = EngineConnections(
            context.generator,
            context.readiness,
            self._begin,
            start.engine.data_parallel_first_rank,
            lambda each: _tell(channel, EngineDrained(each.engine, each.incarnation), start.run_dir),
        )
        self._events: asyncio.Queue[ApiControl | asyncio.Task[bool]] = asyncio.Queue()
        """Messages of the launcher, and what they set off once it is done."""
        self._counts = ConnectionCounts(
            Path(start.run_dir) / ACCEPT_COUNTS_FILE, start.server.api_server_count, start.client
        )
        if start.engine.data_parallel_size > start.engine.data_parallel_size_local:
            context.remote_metrics = RemoteMetrics(lambda number: _tell(channel, MetricsWanted(number), start.run_dir))
        self._limits = HeadLimits(start.server.max_headers, start.server.max_head_bytes)
        self._refresher = CertificateRefresher(start.server)
        self._tls = make_tls_context(start.server)
        self._app = create_app(context)
        self._drains = False
        self._num_cut_off = 0

    async def run(self) -> None:
        """Accepts connections and follows the launcher's messages until the server is drained."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(END_SIGNAL, exit_terminated, self._channel, self._start.run_dir)
        with socket.socket(fileno=self._start.listen_fd) as listener:
            server = HttpServer(self._app, listener, self._counts, self._limits, self._tls)
            self._context.generator.around_outputs(server.writes.gather, server.writes.flush)
            loop.add_reader(self._channel.fileno(), self._receive)
            self._receive()
            if self._events.empty():  # engine cores are loading: who asks is told so
                server.open()
            # Else this process replaces another, and takes its first connection when it can serve.
            _tell(self._channel, Listening(), self._start.run_dir)
            if self._context.media is not None:
                prepare_beside_event_loop()
            gc.collect()
            gc.freeze()
            gc.set_threshold(*_GC_THRESHOLDS)
            return_free_memory()  # reading a vocabulary took as much as all that is kept of it
            if self._tls is not None and self._start.server.ssl_refresh:
                self._refreshing = loop.create_task(self._refresher.run(self._tls))
            await self._follow(server)

    async def _follow(self, server: HttpServer) -> None:
        """Reacts to every message at once: an engine may die while this connects to it, or drains."""
        while True:
            match await self._events.get():
                case EnginesReady() as ready:
                    self._limit_length(ready.engines)
                    self._engines.introduce(ready)
                    self._begin(self._serve(server))
                case EngineLost() as lost:
                    self._engines.lost(lost)
                    if self._context.media is not None:
                        self._context.media.engine_lost()
                case EngineDraining() as draining:
                    self._engines.drains(draining)
                case EngineStalled() | EngineRecovered() as change:
                    self._engines.stalls(change)
                case MetricsFetched(number=number) if self._context.remote_metrics is not None:
                    self._context.remote_metrics.fetched(number)
                case EngineBack(engine=engine):
                    self._limit_length([engine])
                    self._engines.connect(engine)
                case Drain() if self._drains:
                    self._cut_off(server)
                case Drain(timeout_s=timeout_s):
                    self._drains = True
                    self._begin(self._drain(server, timeout_s))
                case asyncio.Task() as task if task.result():
                    return

    def _begin(self, work: Coroutine[Any, Any, bool]) -> asyncio.Task[bool]:
        """Runs `work` beside the messages. Its result says whether the process is to end; its error ends it too."""
        task = asyncio.get_running_loop().create_task(work)
        task.add_done_callback(self._events.put_nowait)
        return task

    def _receive(self) -> None:
        try:
            for message in self._channel.receive_available():
                match message:
                    case Ping():
                        _tell(self._channel, Pulse(), self._start.run_dir)
                    case RanksMissing(ranks=ranks):
                        self._context.readiness.ranks_missing(ranks)
                    case _:
                        self._events.put_nowait(message)
        except ChannelClosedError:
            exit_orphaned(self._start.run_dir)

    def _limit_length(self, engines: list[EngineReady]) -> None:
        """Every engine core must be able to hold every request."""
        inputs = self._context.inputs
        inputs.max_model_len = min([inputs.max_model_len, *(engine.max_model_len for engine in engines)])

    async def _serve(self, server: HttpServer) -> bool:
        """Accepts connections with the first engine core, or without any if that takes long. Tells the launcher once
        there is one and the others had their time."""
        await self._engines.wait_for_one(_PATIENCE_S)
        if not self._drains:
            server.open()
        await self._engines.wait_for_all(_PATIENCE_S)
        await self._engines.wait_for_one()
        if self._context.readiness.phase is not Phase.DEAD:
            _tell(self._channel, Serving(), self._start.run_dir)
        return False

    async def _drain(self, server: HttpServer, timeout_s: float) -> bool:
        context = self._context
        if context.readiness.phase is not Phase.DEAD:
            context.readiness.move(Phase.DRAINING)
        if not await server.wait_idle(timeout_s):
            self._cut_off(server)
            await server.wait_idle(_LAST_WORDS_S)
        await server.close()
        if context.media is not None:
            context.media.close()
        _tell(self._channel, Drained(self._num_cut_off), self._start.run_dir)
        return True

    def _cut_off(self, server: HttpServer) -> None:
        """Whoever still waits for an answer is told that it will not be complete."""
        self._num_cut_off = max(self._num_cut_off, server.num_open)
        reason = ShuttingDownError("the server stopped before the answer was complete")
        if self._context.media is not None:
            self._context.media.give_up(reason)
        self._context.generator.fail_all(reason)


if __name__ == "__main__":
    main()

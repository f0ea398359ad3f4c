"""Echo engines reached as those of another machine: over TCP, through proxies that can be cut and closed."""

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import msgspec

from tests.support.echo_engine import EchoEngine
from tests.support.tcp_proxy import TcpProxy
from tokenmill_engine.messages import Endpoints, EngineReady


@dataclass
class FarEngine:
    """An engine, and the way to it."""

    engine: EchoEngine
    proxies: list[TcpProxy]
    """Of its input and of its output."""

    def ready(self) -> EngineReady:
        endpoints = Endpoints(*(f"tcp://127.0.0.1:{proxy.port}" for proxy in self.proxies))
        return msgspec.structs.replace(self.engine.ready(), endpoints=endpoints)

    def let_in(self, lets_in: bool) -> None:
        """Whether it can be connected from now on."""
        for proxy in self.proxies:
            proxy.lets_in = lets_in

    def cut(self) -> None:
        """Breaks its connections."""
        for proxy in self.proxies:
            proxy.cut()


@contextmanager
def far_way_to(engine: EchoEngine, lets_in: bool = True) -> Iterator[FarEngine]:
    """The way to an engine that was started over TCP."""
    endpoints = engine.ready().endpoints
    ports = [int(endpoint.rpartition(":")[2]) for endpoint in (endpoints.input, endpoints.output)]
    far = FarEngine(engine, [TcpProxy(port, lets_in) for port in ports])
    try:
        yield far
    finally:
        for proxy in far.proxies:
            proxy.stop()


@contextmanager
def far_engines(num_engines: int, lets_in: bool = True) -> Iterator[list[FarEngine]]:
    """Engines 0 to `num_engines` - 1."""
    with tempfile.TemporaryDirectory(prefix="tokenmill-test-") as run_dir, ExitStack() as stack:
        far = []
        for index in range(num_engines):
            engine = EchoEngine(run_dir, index, over_tcp=True).start()
            stack.callback(engine.stop)
            far.append(stack.enter_context(far_way_to(engine, lets_in)))
        yield far

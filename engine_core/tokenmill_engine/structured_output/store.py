"""Compiled grammars of one engine core: cached, and compiled away from its loop.

Compiling happens in a process of its own (`compiler_process`); threads of this one (`turns`) wait for it, and load what
it gives.
"""

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue
from typing import Final

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import EngineError, NotBegunError, TokenmillError
from tokenmill_engine.messages import StructuredKind, StructuredSpec
from tokenmill_engine.structured_output.asking import Question
from tokenmill_engine.structured_output.backends import backends_of, order_of
from tokenmill_engine.structured_output.compiler import GrammarCompiler, TooSlowError
from tokenmill_engine.structured_output.grammar import Grammar, GrammarError, NotExpressibleError
from tokenmill_engine.structured_output.turns import Turns

logger = logging.getLogger(__name__)

CACHE_BYTES: Final = 256 << 20
"""Of grammars that are kept for later requests."""
_LIMIT_S: Final = 1.0
"""Processor time that a library may take for one grammar, and if there is another one to ask after it:"""
_FIRST_LIMIT_S: Final = 0.5
_SHORT_S: Final = 0.03
"""The same for a first attempt, which others wait for: ordinary schemas take a tenth of it."""
_RETRY_AFTER_S: Final = 2

Compiled = tuple[StructuredSpec, Grammar | TokenmillError]


class GrammarStore:
    """Used by one thread."""

    def __init__(self, config: EngineConfig, wake: Callable[[], None]) -> None:
        """`wake` is called, in any thread, whenever `finished` has something new."""
        model = config.model
        self._model, self._wake = model, wake
        self._wanted = config.structured_output.backend
        self._backends = backends_of(model)
        self._compiler: GrammarCompiler | None = None
        self._starting = threading.Lock()
        self._is_closed = False
        self._turns = Turns(self._work, self._send_away)
        self._compiling: set[StructuredSpec] = set()
        self._finished: SimpleQueue[Compiled] = SimpleQueue()
        self._cache: OrderedDict[StructuredSpec, Grammar] = OrderedDict()
        """The one used last is the last."""
        self._num_bytes = 0

    def find(self, spec: StructuredSpec) -> Grammar | None:
        """The grammar, if it is known."""
        grammar = self._cache.get(spec)
        if grammar is not None:
            self._cache.move_to_end(spec)
        return grammar

    def compile(self, spec: StructuredSpec) -> None:
        """Begin to compile, unless that has begun."""
        if spec not in self._compiling:
            self._compiling.add(spec)
            try:
                self._turns.join(spec)
            except NotBegunError as error:
                self._finish(spec, error)

    def give_up(self, spec: StructuredSpec) -> None:
        """Nobody waits for it any more: others go first. A turn that has begun is finished."""
        if self._turns.leave(spec):
            self._compiling.discard(spec)

    def finished(self) -> Iterator[Compiled]:
        """What was compiled since the last call, and what could not be."""
        while True:
            try:
                spec, grammar = self._finished.get(block=False)
            except Empty:
                return
            self._compiling.discard(spec)
            # It comes twice if it was given up in its turn, and wanted again after that.
            if not isinstance(grammar, TokenmillError) and spec not in self._cache:
                self._keep(spec, grammar)
            yield spec, grammar

    def close(self) -> None:
        """End the compiler; nothing is finished any more."""
        with self._starting:
            self._is_closed = True
            if self._compiler is not None:
                self._compiler.close()
                self._compiler = None
        self._turns.close()

    def _started_compiler(self) -> GrammarCompiler:
        """It lives as long as the thread that calls this, which is as long as this store is open. Raises NotBegunError
        if the machine does not allow one more process."""
        with self._starting:
            if self._is_closed:
                raise NotBegunError("no grammars are compiled any more")
            if self._compiler is not None and not self._compiler.is_alive:
                logger.error("the process that compiles grammars has ended; another one is started")
                self._compiler.close()
                self._compiler = None
            if self._compiler is None:
                try:
                    self._compiler = GrammarCompiler(self._model)
                except OSError as error:
                    raise NotBegunError(f"grammars cannot be compiled now: {error}") from error
            return self._compiler

    def _work(self, spec: StructuredSpec, is_long: bool) -> bool:
        """A turn of `Turns`. Returns whether it was long enough."""
        try:
            result: Grammar | TokenmillError = self._compiled(spec, self._started_compiler(), is_long)
        except TooSlowError as error:
            if is_long:
                self._finish(spec, error)
            return False
        except TokenmillError as error:
            result = error
        except Exception as error:
            logger.exception("a grammar cannot be compiled")
            result = EngineError(f"the grammar cannot be compiled: {type(error).__name__}")
        self._finish(spec, result)
        return True

    def _send_away(self, spec: StructuredSpec) -> None:
        reason = "too many grammars that take long are being prepared; the request may be sent again"
        self._finish(spec, NotBegunError(reason, _RETRY_AFTER_S))

    def _finish(self, spec: StructuredSpec, result: Grammar | TokenmillError) -> None:
        self._finished.put((spec, result))
        self._wake()

    def _compiled(self, spec: StructuredSpec, compiler: GrammarCompiler, is_long: bool) -> Grammar:
        """By the first library that can. What the last one says of it is told: it knows the most. Raises TooSlowError
        without asking another one if the turn is short."""
        order = order_of(self._wanted, spec)
        for backend in order[:-1]:
            try:
                compiled = compiler.compile(Question(backend, spec, _FIRST_LIMIT_S if is_long else _SHORT_S))
                return self._backends.of(backend).load(compiled)
            except GrammarError as error:
                if isinstance(error, TooSlowError) and not is_long:
                    raise
                if spec.kind is StructuredKind.STRUCTURAL_TAG and not isinstance(error, NotExpressibleError):
                    raise  # the other library would pass over what is wrong
                logger.debug("%s: %s", backend, error)
        compiled = compiler.compile(Question(order[-1], spec, _LIMIT_S if is_long else _SHORT_S))
        return self._backends.of(order[-1]).load(compiled)

    def _keep(self, spec: StructuredSpec, grammar: Grammar) -> None:
        self._cache[spec] = grammar
        self._num_bytes += grammar.num_bytes
        while self._num_bytes > CACHE_BYTES and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._num_bytes -= dropped.num_bytes

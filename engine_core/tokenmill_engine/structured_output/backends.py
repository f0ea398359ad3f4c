"""The libraries of grammars, set up when they are first needed, and which of them is to do what."""

import logging
import threading
from typing import Final, Protocol

from tokenmill_engine.config.engine import EngineConfig, ModelConfig
from tokenmill_engine.config.structured_output import StructuredBackend
from tokenmill_engine.messages import StructuredKind, StructuredSpec
from tokenmill_engine.structured_output.asking import BackendName
from tokenmill_engine.structured_output.grammar import GrammarBackend
from tokenmill_engine.structured_output.guidance_backend import GuidanceBackend
from tokenmill_engine.structured_output.xgrammar_backend import XgrammarBackend, is_lark
from tokenmill_engine.vocabulary.vocabulary import Vocabulary, read_vocabulary

logger = logging.getLogger(__name__)

_USUAL: Final = StructuredSpec(StructuredKind.JSON, "{}")


class CompilingBackend(GrammarBackend, Protocol):
    """What both libraries offer."""

    def compile(self, spec: StructuredSpec) -> str:
        """For `load`. Raises GrammarError for what is malformed or not supported."""


class Backends:
    """Both libraries with one vocabulary. Safe in several threads."""

    def __init__(self, tokenizer_path: str, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        self._where = (tokenizer_path, vocab_size, end_token_ids)
        self._vocabulary: Vocabulary | None = None
        self._backends: dict[BackendName, CompilingBackend] = {}
        self._setting_up = threading.Lock()

    def of(self, name: BackendName) -> CompilingBackend:
        """Raises ConfigError if the tokenizer cannot be used."""
        with self._setting_up:
            if self._vocabulary is None:
                self._vocabulary = read_vocabulary(*self._where)
            if name not in self._backends:
                kind = XgrammarBackend if name == "xgrammar" else GuidanceBackend
                self._backends[name] = kind(self._vocabulary)
            return self._backends[name]


_shared: Final[dict[tuple[str, int, tuple[int, ...]], Backends]] = {}
_sharing: Final = threading.Lock()


def backends_of(model: ModelConfig) -> Backends:
    """The same for all of a process, whichever thread asks first: to set them up takes a quarter of a second, and
    memory."""
    key = (model.tokenizer_path, model.architecture.vocab_size, model.eos_token_ids)
    with _sharing:
        if key not in _shared:
            _shared[key] = Backends(*key)
        return _shared[key]


def begin_setup(config: EngineConfig) -> threading.Thread:
    """Has a thread set up the library that most grammars go to, so that no request waits for it and no step beside it:
    the library keeps all threads of the interpreter waiting meanwhile."""
    thread = threading.Thread(target=_set_up, args=(config,), name="vocabulary", daemon=True)
    thread.start()
    return thread


def _set_up(config: EngineConfig) -> None:
    if config.model.pooling is not None or not config.model.eos_token_ids:
        return  # Nothing is generated, or nothing that could end: grammars are refused.
    try:
        backends_of(config.model).of(order_of(config.structured_output.backend, _USUAL)[0])
    except Exception:  # goes wrong again when a request needs it, which is told then
        logger.debug("what grammars need cannot be set up", exc_info=True)


def order_of(wanted: StructuredBackend, spec: StructuredSpec) -> tuple[BackendName, ...]:
    """Who is to compile `spec`: the first, and those after it where one before cannot. With `auto` that is llguidance,
    which compiles in a hundredth of the time, has masks as quickly, and keeps to all of a schema or refuses it;
    xgrammar for EBNF, and for structural tags that mean nothing to llguidance."""
    if wanted != "auto":
        return (wanted,)
    match spec.kind:
        case StructuredKind.STRUCTURAL_TAG:
            return ("guidance", "xgrammar")
        case StructuredKind.GRAMMAR:
            return ("guidance", "xgrammar") if is_lark(spec.text) else ("xgrammar", "guidance")
    return ("guidance",)

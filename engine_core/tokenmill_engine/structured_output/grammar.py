"""What a library of grammars has to offer. Knows nothing of requests or steps."""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.errors import InvalidRequestError


class GrammarError(InvalidRequestError):
    """What is asked of the output cannot be had: it is malformed, not supported, or takes too long to prepare."""


class NotExpressibleError(GrammarError):
    """It is nothing for this library; another one may know it."""


class Matcher(Protocol):
    """How far one output has come in its grammar."""

    def fill(self, bits: NDArray[np.int32], row: int) -> None:
        """Write the tokens that may follow into `bits[row]`, as `outputs.TokenMasks` has them.

        Raises GrammarError if that takes too long.
        """

    def accept(self, token_id: int) -> None:
        """The next token. Raises GrammarError if it may not follow, or what follows takes too long."""

    def forced(self) -> list[int]:
        """The tokens of a text that has to follow, as the tokenizer writes it; empty if there is a choice, or that is
        not known. No token at the end of which the text may go on so that the tokenizer would write it otherwise.

        Raises GrammarError if that takes too long.
        """


class Grammar(Protocol):
    """A compiled grammar; requests with the same one share it."""

    num_bytes: int
    """Of memory, roughly."""

    def matcher(self) -> Matcher:
        """For an output that is empty yet."""


class GrammarBackend(Protocol):
    """One library, with the vocabulary of one model. Methods may be called in any thread."""

    def load(self, compiled: str) -> Grammar:
        """What `compile` has given, usually in another process."""

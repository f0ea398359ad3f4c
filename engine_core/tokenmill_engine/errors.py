"""The tree of every error Tokenmill raises on purpose.

    TokenmillError
    ├── ConfigError              the command line, a config file or the model folder is wrong: nothing starts
    ├── StartupError             the configuration was fine, the machine is not (memory, port, device)
    ├── RequestError             one request is wrong; nothing else is disturbed
    │   ├── InvalidRequestError  a field has a wrong type, range or combination
    │   ├── ContextLengthError   the prompt does not fit
    │   ├── NotFoundError        unknown model or route
    │   └── AuthenticationError  missing or wrong API key
    └── EngineError              the engine could not finish a request
        ├── OverloadedError      refused before work started; a retry later helps
        │   ├── EngineStartingError     still loading
        │   ├── NotBegunError           what was to prepare the request is gone or busy; later it is there again
        │   └── EngineUnavailableError  the engine that the client named is gone, others are not
        ├── DeadlineError        the client's own time was over before the answer was complete
        └── EngineDeadError      the engine process is gone
            └── ExchangeError    a worker cannot reach another one

A start error's message is one line that names the wrong number and the flag value that would work.
A request error names the field. Nothing here knows of HTTP; the server maps the tree in one table.
"""

import errno


class TokenmillError(Exception):
    """Base of every deliberate error."""

    @property
    def message(self) -> str:
        return str(self)


class ConfigError(TokenmillError):
    """The configuration is contradictory or names something that is not there."""


class StartupError(TokenmillError):
    """The machine cannot give what the configuration asks for."""


class RequestError(TokenmillError):
    """A request was refused. `param` is the field's path, `code` OpenAI's string code."""

    code: str | None = None

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        if code is not None:
            self.code = code


class InvalidRequestError(RequestError):
    """A field is malformed, out of range or contradicts another."""


class ContextLengthError(InvalidRequestError):
    """The prompt (plus what must be generated) is longer than the server can hold."""

    code = "context_length_exceeded"


class NotFoundError(RequestError):
    """The named model or resource does not exist."""

    code = "not_found"


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    code = "invalid_api_key"


class EngineError(TokenmillError):
    """The engine failed while it owned a request."""


class OverloadedError(EngineError):
    """Refused before any work was done; `retry_after_s` seconds later it may work, unless that is None."""

    def __init__(self, message: str, retry_after_s: int | None = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class EngineStartingError(OverloadedError):
    """The model is still loading."""


class NotBegunError(OverloadedError):
    """An engine could not begin with a request, for a reason that has nothing to do with it: what was to prepare it has
    ended, or has too much to do."""


class EngineUnavailableError(OverloadedError):
    """The engine that a request names is gone, for now or (no `retry_after_s`) for good; others are there."""


class DeadlineError(EngineError):
    """The answer was not complete when the time was over that the client had set."""


class EngineDeadError(EngineError):
    """The engine process exited or lost its device."""


class ExchangeError(EngineDeadError):
    """What workers tell each other does not arrive: most often because one of them is gone, which is the cause then."""


def describe_os_error(error: Exception) -> str:
    """What the system refused, for somebody who can change that."""
    if getattr(error, "errno", None) in (errno.EMFILE, errno.ENFILE):
        return "too many open files: raise `ulimit -n`"
    if getattr(error, "errno", None) == errno.EFBIG:
        return "a file would be too large: raise `ulimit -f`"
    return str(error)

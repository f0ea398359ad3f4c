"""Fields of requests that have no effect: the answer lists them, or the request is refused (`--strict-fields`)."""

from collections.abc import Sequence

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.context import ServerContext
from tokenmill_server.processing.shown import shown

IGNORED_HEADER = "x-ignored-fields"
"""Lists the fields of the request that had no effect."""

_MAX_IGNORED_CHARS = 500
_MAX_REFUSED = 10


def note_ignored(context: ServerContext, headers: dict[str, str], names: Sequence[str]) -> None:
    """These parts of a request have no effect: the headers of the answer say so.

    Raises InvalidRequestError if the server refuses such requests.
    """
    if names and context.config.strict_fields:
        listed = ", ".join(map(shown, names[:_MAX_REFUSED]))
        raise InvalidRequestError(
            f"without effect on this server, which refuses such fields: {listed}", names[0], "unsupported_parameter"
        )
    told = [name for name in names if name.isascii() and name.isprintable()]
    if told:
        earlier = [headers[IGNORED_HEADER]] if IGNORED_HEADER in headers else []
        headers[IGNORED_HEADER] = ", ".join(earlier + told)[:_MAX_IGNORED_CHARS]

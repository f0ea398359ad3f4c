"""Environment variables that begin like Tokenmill's but are none: most of them are misspelt."""

import difflib
import logging
import re
from collections.abc import Mapping

from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.unsupported import UNSUPPORTED

logger = logging.getLogger(__name__)

_PREFIX = "TOKENMILL_"
_OTHER_VARIABLES = frozenset({"TOKENMILL_CACHE_DIR", "TOKENMILL_TEST_GGUF"})
"""Not of flags: where built kernels are kept; a file for tests/gpu."""
_SERVICE_LINK = re.compile(r"\w+_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP))(_\w+)?")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set this variable, as it does in every pod for each service, also for one named "tokenmill"
    or "tokenmill-something"."""
    return _SERVICE_LINK.fullmatch(name) is not None or _SERVICE_ADDRESS.match(value) is not None


def warn_of_unknown_variables(environment: Mapping[str, str]) -> None:
    """One line in the log for all variables that have no effect although their name says that they should."""
    known = {flag.environment_variable for flag in FLAGS.values()} | _OTHER_VARIABLES
    known |= {alias.name for flag in FLAGS.values() for alias in flag.env}
    accepted = known | {row.environment_variable for row in UNSUPPORTED.values()}
    unknown = [
        name
        for name, value in sorted(environment.items())
        if name.startswith(_PREFIX) and name not in accepted and not is_service_link(name, value)
    ]
    if unknown:
        logger.warning(
            "unknown variables without effect: %s", ", ".join(_with_suggestion(name, known) for name in unknown)
        )


def _with_suggestion(name: str, known: set[str]) -> str:
    # Compared without the prefix, which would make every name resemble every other.
    candidates = [other.removeprefix(_PREFIX) for other in known if other.startswith(_PREFIX)]
    close = difflib.get_close_matches(name.removeprefix(_PREFIX), candidates, n=1)
    return f"{name} (did you mean {_PREFIX}{close[0]}?)" if close else name

"""Environment variables that begin like Tokenmill's but are none, most of them misspelt, and those of vLLM that mean
nothing here."""

import difflib
import logging
import re
from collections.abc import Mapping

from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.unsupported import UNSUPPORTED
from tokenmill_server.flags.vllm_variables import IGNORED, sentences

logger = logging.getLogger(__name__)

_PREFIX, _VLLM_PREFIX = "TOKENMILL_", "VLLM_"
_OTHER_VARIABLES = frozenset({"TOKENMILL_CACHE_DIR", "TOKENMILL_TEST_GGUF"})
"""Not of flags: where built kernels are kept; a file for tests/gpu."""
_SERVICE_LINK = re.compile(r"\w+_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP|SCTP))(_\w+)?")
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def is_service_link(name: str, value: str) -> bool:
    """Whether Kubernetes set this variable, as it does in every pod for each service, also for one named "tokenmill"
    or "tokenmill-something"."""
    return _SERVICE_LINK.fullmatch(name) is not None or _SERVICE_ADDRESS.match(value) is not None


def warn_of_variables(environment: Mapping[str, str]) -> None:
    """Lines in the log for all variables that have no effect although their names say that they should."""
    known = {flag.environment_variable for flag in FLAGS.values()} | _OTHER_VARIABLES
    known |= {alias.name for flag in FLAGS.values() for alias in flag.env}
    accepted = known | {row.environment_variable for row in UNSUPPORTED.values()}
    others = {
        name: value.strip()
        for name, value in sorted(environment.items())
        if name not in accepted and value.strip() and not is_service_link(name, value)
    }
    for sentence in sentences(others):
        logger.warning("%s", sentence)
    if foreign := [name for name in others if name.startswith(_VLLM_PREFIX) and name not in IGNORED]:
        logger.warning("variables of vLLM without effect: %s", ", ".join(foreign))
    unknown = [name for name in others if name.startswith(_PREFIX)]
    if unknown:
        logger.warning(
            "unknown variables without effect: %s", ", ".join(_with_suggestion(name, known) for name in unknown)
        )


def _with_suggestion(name: str, known: set[str]) -> str:
    # Compared without the prefix, which would make every name resemble every other.
    candidates = [other.removeprefix(_PREFIX) for other in known if other.startswith(_PREFIX)]
    close = difflib.get_close_matches(name.removeprefix(_PREFIX), candidates, n=1)
    return f"{name} (did you mean {_PREFIX}{close[0]}?)" if close else name

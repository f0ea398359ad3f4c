"""The rows of the table of flags about connections, what the log says of requests, and routes for operators."""

from typing import get_args

from tokenmill_server.config import FingerprintMode
from tokenmill_server.flags.flag import Arity, Flag, Group
from tokenmill_server.flags.parsers import boolean, integer, one_of, text, text_list

_MAX_HEADERS = 2**16
_MAX_HEAD_BYTES = 2**26


def _paths(value: object) -> tuple[str, ...]:
    """Paths with commas between them, as vLLM has it, or a list."""
    if isinstance(value, str):
        value = [path.strip() for path in value.split(",")]
    paths = text_list(value)
    if not all(path.startswith("/") for path in paths):
        raise ValueError("paths that begin with /, with commas between them")
    return paths


def _import_path(value: object) -> tuple[str, ...]:
    paths = text_list(value)
    if not all("." in path.strip(".") for path in paths):
        raise ValueError("the import path of a class or function, such as package.module.Name")
    return paths


SERVING = (
    Flag(
        "enable-log-outputs",
        Group.FRONTEND,
        boolean,
        False,
        "With --enable-log-requests: the lines also say what was generated, all of it or up to --max-log-len",
        "server.log_outputs",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "max-log-len",
        Group.FRONTEND,
        integer(0, 2**31 - 1),
        None,
        "With --enable-log-requests: the lines also quote prompts, so many characters of each (token ids where it has "
        "no text). Default: nothing of prompts is logged",
        "server.max_log_len",
        metavar="N",
        offline=False,
    ),
    Flag(
        "disable-access-log-for-endpoints",
        Group.FRONTEND,
        _paths,
        (),
        "Paths whose requests --enable-log-requests leaves out, with commas between them; those of probes it always "
        "does",
        "server.unlogged_paths",
        metavar="PATH,...",
        offline=False,
    ),
    Flag(
        "h11-max-header-count",
        Group.FRONTEND,
        integer(1, _MAX_HEADERS),
        256,
        "Most headers of a request; more are refused with 431",
        "server.max_headers",
        metavar="N",
        offline=False,
    ),
    Flag(
        "h11-max-incomplete-event-size",
        Group.FRONTEND,
        integer(1024, _MAX_HEAD_BYTES),
        256 * 1024,
        "Most bytes of a request's first line and headers together; more are refused with 431",
        "server.max_head_bytes",
        metavar="BYTES",
        offline=False,
    ),
    Flag(
        "enable-ssl-refresh",
        Group.FRONTEND,
        boolean,
        False,
        "Read certificate and key again when their files change; connections that are open keep theirs",
        "server.ssl_refresh",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "middleware",
        Group.FRONTEND,
        _import_path,
        (),
        "ASGI middleware of your own as an import path: a class, made with the application, or a function of a request "
        "and the next step. May be repeated; the last one is the outermost. It sees requests whose API key is right, "
        "or that need none",
        "server.middleware",
        metavar="IMPORT.PATH",
        arity=Arity.REPEATED,
        offline=False,
    ),
    Flag(
        "enable-server-load-tracking",
        Group.FRONTEND,
        boolean,
        False,
        "Serve GET /load: the sequences that wait or run, of all API servers together",
        "server.load_tracking",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "enable-tokenizer-info-endpoint",
        Group.FRONTEND,
        boolean,
        False,
        "Serve GET /tokenizer_info: the tokenizer's configuration with its chat template",
        "server.tokenizer_info",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "fingerprint-mode",
        Group.FRONTEND,
        one_of(*get_args(FingerprintMode)),
        "full",
        "What system_fingerprint of answers says: full (version, parallel sizes and a hash of what decides answers), "
        "hash (that alone), custom (--fingerprint-value) or none (null)",
        "server.fingerprint_mode",
        metavar="MODE",
        offline=False,
    ),
    Flag(
        "fingerprint-value",
        Group.FRONTEND,
        text,
        None,
        "The system_fingerprint of --fingerprint-mode custom",
        "server.fingerprint_value",
        metavar="TEXT",
        offline=False,
    ),
)

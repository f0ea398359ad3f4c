"""The rows of the table of flags that say which requests are taken, and what their answers tell."""

from tokenmill_server.flags.flag import Arity, Flag, Group
from tokenmill_server.flags.parsers import boolean, integer

_MANY = 2**31 - 1

HTTP = (
    Flag(
        "max-num-queued-reqs",
        Group.FRONTEND,
        integer(1, _MANY),
        None,
        "Most sequences that wait or run at once, of all engine cores together; a request beyond them is refused with "
        "503 before any work is done for it. Default: no limit",
        "server.max_num_queued_reqs",
        metavar="N",
        offline=False,
    ),
    Flag(
        "max-num-queued-tokens",
        Group.FRONTEND,
        integer(1, _MANY),
        None,
        "Most prompt tokens of requests that have no token of their answer yet; a request beyond them is refused with "
        "503, unless there are none. Default: no limit",
        "server.max_num_queued_tokens",
        metavar="TOKENS",
        offline=False,
    ),
    Flag(
        "strict-fields",
        Group.FRONTEND,
        boolean,
        False,
        "Refuse requests with fields that have no effect here. Default: answer them and list the fields in "
        "x-ignored-fields",
        "server.strict_fields",
        arity=Arity.SWITCH,
        offline=False,
    ),
)

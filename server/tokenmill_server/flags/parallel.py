"""The rows of the table of flags that say how many processes there are, and where they run."""

from tokenmill_server.flags.flag import Flag, Group
from tokenmill_server.flags.parsers import integer

PARALLEL = (
    Flag(
        "api-server-count",
        Group.PARALLEL,
        integer(1, 256),
        None,
        "HTTP processes that share the port. Default on a GPU: one for every four CPUs, at most four per engine core; "
        "1 on the CPU",
        "server.api_server_count",
        metavar="N",
        short=("-asc",),
        offline=False,
    ),
    Flag(
        "data-parallel-size",
        Group.PARALLEL,
        integer(1, 256),
        1,
        "Engine cores, each with a copy of the model; requests go to the least loaded one",
        "engine.data_parallel_size",
        metavar="N",
        short=("-dp",),
    ),
)

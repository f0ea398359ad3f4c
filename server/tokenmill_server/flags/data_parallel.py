"""Which data-parallel ranks a launcher runs, and who balances over them: from the flags, before anything starts."""

import logging

from tokenmill_engine.errors import ConfigError
from tokenmill_server.config import DataParallelConfig, LoadBalancing
from tokenmill_server.flags.flag import Group
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.values import FlagValues

logger = logging.getLogger(__name__)

_OF_REQUESTS = frozenset({"generation_config", "max_logprobs"})
"""Flags outside the frontend's group that mean something to API servers alone."""
_OF_SEVERAL_LAUNCHERS = ("data_parallel_address", "data_parallel_rpc_port", "data_parallel_token")


def resolve_data_parallel(values: FlagValues) -> DataParallelConfig:
    """Raises ConfigError if flags contradict each other, or a rank is out of range."""
    balancing = _load_balancing(values)
    size: int = values["data_parallel_size"]
    start_rank = _start_rank(values, balancing)
    if start_rank >= size:
        key = "data_parallel_rank" if values.is_given("data_parallel_rank") else "data_parallel_start_rank"
        raise ConfigError(
            f"{values.stated(key)} is out of range: ranks are 0 to {size - 1}; choose one of them, or a larger "
            f"--data-parallel-size than {size}"
        )
    return DataParallelConfig(
        size=size,
        size_local=_size_local(values, balancing, start_rank),
        start_rank=start_rank,
        load_balancing=balancing,
        headless=values["headless"],
        address=values["data_parallel_address"],
        rpc_port=values["data_parallel_rpc_port"],
        token=values["data_parallel_token"],
    )


def _load_balancing(values: FlagValues) -> LoadBalancing:
    external = [key for key in ("data_parallel_rank", "data_parallel_external_lb") if _is_asked_for(values, key)]
    hybrid = ["data_parallel_hybrid_lb"] if values["data_parallel_hybrid_lb"] else []
    if external and hybrid:
        raise ConfigError(
            f"{values.written(external[0])} contradicts {values.written(hybrid[0])}: a server has one rank or several; "
            "leave one out"
        )
    if values["headless"] and (external or hybrid):
        raise ConfigError(
            f"{values.written('headless')} contradicts {values.written((external + hybrid)[0])}: a headless launcher "
            "has no API servers, its ranks are balanced by the head; leave one out"
        )
    if external:
        return LoadBalancing.EXTERNAL
    return LoadBalancing.HYBRID if hybrid or _means_hybrid(values) else LoadBalancing.INTERNAL


def _is_asked_for(values: FlagValues, key: str) -> bool:
    return values[key] is not None and values[key] is not False


def _means_hybrid(values: FlagValues) -> bool:
    """A server whose ranks do not begin with 0, but which has API servers."""
    return bool(values["data_parallel_start_rank"]) and not values["headless"]


def _start_rank(values: FlagValues, balancing: LoadBalancing) -> int:
    start, rank = values["data_parallel_start_rank"], values["data_parallel_rank"]
    if balancing is not LoadBalancing.EXTERNAL:
        return start or 0
    if rank is not None and start is not None and rank != start:
        raise ConfigError(
            f"{values.stated('data_parallel_rank')} contradicts {values.stated('data_parallel_start_rank')}: a server "
            "with one rank begins with it; leave one out"
        )
    chosen: int | None = rank if rank is not None else start
    if chosen is None:
        raise ConfigError(
            f"{values.written('data_parallel_external_lb')} needs to know which rank this server is; add "
            f"--data-parallel-rank with one of 0 to {values['data_parallel_size'] - 1}"
        )
    return chosen


def _size_local(values: FlagValues, balancing: LoadBalancing, start_rank: int) -> int:
    size: int = values["data_parallel_size"]
    given: int | None = values["data_parallel_size_local"]
    if balancing is LoadBalancing.EXTERNAL:
        if given not in (None, 1):
            raise ConfigError(
                f"{values.stated('data_parallel_size_local')} contradicts external balancing, where a server has one "
                f"rank; use --data-parallel-hybrid-lb with --data-parallel-start-rank {start_rank} instead"
            )
        return 1
    if given is None:
        if balancing is LoadBalancing.HYBRID:
            raise ConfigError(
                "hybrid balancing needs to know how many ranks this server runs; add --data-parallel-size-local with "
                f"1 to {size - start_rank}"
            )
        return size - start_rank
    if start_rank + given > size:
        raise ConfigError(
            f"{values.stated('data_parallel_size_local')} from rank {start_rank} on is more than the {size} of "
            f"--data-parallel-size; use at most --data-parallel-size-local {size - start_rank}"
        )
    if given == 0 and (values["headless"] or balancing is LoadBalancing.HYBRID):
        raise ConfigError(
            f"{values.stated('data_parallel_size_local')} leaves this launcher without engine cores; use at least 1"
        )
    return given


def tell_what_has_no_effect(values: FlagValues, config: DataParallelConfig) -> None:
    """Names in the log the flags that somebody gave and that this launcher has no use for."""
    if not config.headless and not config.is_head:
        given = [values.written(key) for key in _OF_SEVERAL_LAUNCHERS if values.is_given(key)]
        if given:
            logger.info("without effect, because this server needs no other launcher: %s", ", ".join(given))
    if config.headless:
        given = [
            values.written(key)
            for key, flag in FLAGS.items()
            if values.is_given(key)
            and (flag.group is Group.FRONTEND or key in _OF_REQUESTS or key == "api_server_count")
            and key not in ("served_model_name", "shutdown_timeout")
        ]
        if given:
            logger.info("without effect, because a headless launcher has no API servers: %s", ", ".join(given))

"""The command line of `tokenmill bench compare`."""

import argparse
import json
import shlex
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench.compare import PEER_DRIVER, PEER_SERVER, Compare, Peer
from tokenmill_server.bench.compare_groups import GROUPS
from tokenmill_server.bench.values import positive, positive_number

_PLACES = "{python} {driver} {model} {name} {dtype} {max_model_len} {port}"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `bench compare`."""
    add = parser.add_argument
    add("--group", choices=list(GROUPS), required=True, help="which loads")
    add("--model-8b", type=Path, metavar="PATH", help="folder with config.json and tokenizer, or .gguf; random weights")
    add("--model-1b", type=Path, metavar="PATH", help="the same")
    add("--model-70b", type=Path, metavar="PATH", help="the same. Default of all with --shrink: SmolLM2-135M-Instruct")
    add("--model-vl7b", type=Path, metavar="PATH", help="one that looks at images; `python -m benchmarks.media_shapes`")
    add("--rounds", type=positive, default=3, metavar="N", help="runs of each load; the table has their median")
    add("--time-limit", type=positive_number, default=520.0, metavar="S", help="fewer rounds where they do not fit")
    add("--select", action="append", default=[], metavar="TEXT", help="only loads with this in their name; repeatable")
    add("--shrink", type=positive, default=1, metavar="N", help="divide every size by N, to try this on small machines")
    add("--dtype", default="bfloat16")
    add("--max-model-len", type=positive, default=8192, metavar="TOKENS", help="at most the positions of the model")
    add(
        "--memory-bandwidth",
        type=positive_number,
        metavar="GB/S",
        help="of one device: adds what share of it decode steps used for weights and KV cache",
    )
    add("--prompt-format", choices=["ids", "text"], default="ids", help="of the prompts for servers")
    add("--seed", type=int, default=0, help="of the prompts; each load and round has prompts of its own")
    add(
        "--args",
        type=shlex.split,
        default=[],
        metavar="WORDS",
        help="more flags of `tokenmill serve` for our processes",
    )
    add("--client-args", type=shlex.split, default=[], metavar="WORDS", help="more flags for `bench serve`")
    add("--output", type=Path, metavar="FOLDER", help="for raw results and logs. Default: compare-GROUP-TIME")
    peer = parser.add_argument_group("peer")
    add = peer.add_argument
    add("--peer", default="vLLM", metavar="NAME", help="its name in the table; none: measure us alone")
    add("--peer-python", default="python3", metavar="PROGRAM", help="interpreter that has it")
    add("--peer-env", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="environment for it alone")
    add("--peer-env-file", type=Path, metavar="FILE", help="lines of NAME=VALUE; empty ones and # comments are skipped")
    add("--peer-args", type=shlex.split, default=[], metavar="WORDS", help="more flags for its processes")
    add("--peer-command", default=PEER_SERVER, metavar="TEMPLATE", help=f"starts its server; knows {_PLACES}")
    add("--peer-driver", default=PEER_DRIVER, metavar="TEMPLATE", help="starts its offline driver; knows the same")


def compare_of(options: argparse.Namespace) -> Compare:
    """Raises: ConfigError."""
    folder = Path(f"compare-{options.group}-{datetime.now():%Y%m%d-%H%M%S}")
    models = {"8b": options.model_8b, "1b": options.model_1b, "70b": options.model_70b, "vl7b": options.model_vl7b}
    return Compare(
        group=options.group,
        models={key: path for key, path in models.items() if path is not None},
        peer=None if options.peer == "none" else _peer(options),
        output=options.output or folder,
        rounds=options.rounds,
        time_limit_s=options.time_limit,
        dtype=options.dtype,
        max_model_len=options.max_model_len,
        flags=tuple(options.args),
        load_options=tuple(options.client_args),
        bandwidth_gb_s=options.memory_bandwidth,
        prompt_format=options.prompt_format,
        selected=tuple(options.select),
        divisor=options.shrink,
        seed=options.seed,
    )


def _peer(options: argparse.Namespace) -> Peer:
    environment: dict[str, str] = {}
    if options.peer_env_file is not None:
        try:
            lines = options.peer_env_file.read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read --peer-env-file {options.peer_env_file}: {error}") from None
        environment |= _variables([line for line in map(str.strip, lines) if line and not line.startswith("#")])
    environment |= _variables(options.peer_env)
    for template in (options.peer_command, options.peer_driver):
        _check_template(template)
    return Peer(
        name=options.peer,
        python=options.peer_python,
        environment=environment,
        server=options.peer_command,
        driver=options.peer_driver,
        flags=tuple(options.peer_args),
    )


def _variables(lines: list[str]) -> Mapping[str, str]:
    """Raises: ConfigError."""
    pairs = [line.partition("=") for line in lines]
    for (name, equals, _), line in zip(pairs, lines, strict=True):
        if not equals or not name.isidentifier():
            raise ConfigError(f"{json.dumps(line)} is not NAME=VALUE; see --peer-env and --peer-env-file")
    return {name: value for name, _, value in pairs}


def _check_template(template: str) -> None:
    """Raises: ConfigError."""
    known = dict.fromkeys(_PLACES.translate({ord("{"): None, ord("}"): None}).split(), "")
    try:
        words = [word.format_map(known) for word in shlex.split(template)]
    except (KeyError, ValueError, IndexError) as error:
        raise ConfigError(f"the template {template!r} is wrong ({error}); it may use {_PLACES}") from None
    if not words:
        raise ConfigError("a template for the peer's command is empty")

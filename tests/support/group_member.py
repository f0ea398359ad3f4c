"""A process that is one member of a gloo group: `group_member RANK SIZE STORE_PATH`.

It writes one line of JSON for each thing it does, and does the next one when a line comes in.
"""

import json
import sys
from pathlib import Path

import torch

from tokenmill_engine.distributed.group import Group
from tokenmill_engine.distributed.torch_group import join
from tokenmill_engine.errors import TokenmillError


def do(group: Group, call: str) -> object:
    seeded = torch.Generator().manual_seed(group.rank)
    match call:
        case "sum":
            return group.all_reduce(torch.randn(1000, generator=seeded)).tolist()
        case "min":
            return group.agree_min(100 - group.rank)
        case _:
            raise ValueError(call)


def main() -> None:
    rank, size, store_path = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    group = join(rank, size, store_path)
    say("joined")
    for line in sys.stdin:
        try:
            say(do(group, line.strip()))
        except TokenmillError as error:
            say({"error": type(error).__name__, "message": str(error)})
    group.close()
    say("closed")


def say(value: object) -> None:
    print(json.dumps(value), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()

"""What the groups of `bench compare` measure.

offline    both shapes through each side's `LLM` class: throughput, prefill, time of a decode step
online8b   an 8B server: full load, a single client, seconds from the command to the first answer
online1b   a 1B server, where the front end is the limit: default flags, one and several API servers
tp2, tp4   8B through `LLM`, each layer over 2 or 4 devices
tp4-70b    70B, which needs 4 devices, in the same way
pp2        an 8B server under long prompts: one device, layers over 2 devices, each layer over 2 devices
media7b    a 7B server that looks at an image with each prompt: default flags, one and several API servers
dp2, dp4   8B servers with a copy on each of 2 or 4 devices and as much more load, against one device
"""

from collections.abc import Sequence

from tokenmill_server.bench.compare_plan import DEFAULT, Load, ModelPlan, Pairing

ONE_SERVER = "--api-server-count 1"
FOUR_SERVERS = "--api-server-count 4"

_DECODE_OUTPUT_LEN = 136


def _decodes(model: str, *sizes: tuple[int, float]) -> tuple[Load, ...]:
    """Loads of (batch, expected seconds). The largest comes first: its prompts are in the prefix cache for the rest."""
    return tuple(
        Load(f"{model} decode {batch}", "decode", batch, 1024, _DECODE_OUTPUT_LEN, expected_s=expected_s)
        for batch, expected_s in sizes
    )


_OFFLINE_8B = (
    Load("8b 256 x 1024/128", "throughput", 256, 1024, 128, expected_s=9.0),
    Load("8b 512 x 128/128", "throughput", 512, 128, 128, expected_s=4.0),
    *_decodes("8b", (256, 9.0), (128, 2.5), (32, 1.4), (8, 1.2), (1, 1.0)),
)
_OFFLINE_1B = (
    Load("1b 512 x 128/128", "throughput", 512, 128, 128, expected_s=2.0),
    *_decodes("1b", (256, 2.5), (128, 1.2), (32, 0.6), (8, 0.5), (1, 0.4)),
)
_CLIENTS_8B = Load("8b 256 clients 1024/128", "serve", 768, 1024, 128, 256, expected_s=29.0)
_ONLINE_8B = (_CLIENTS_8B, Load("8b 1 client 1024/128", "serve", 8, 1024, 128, 1, expected_s=8.0))
_ONLINE_1B = (Load("1b 256 clients 128/256", "serve", 2048, 128, 256, 256, expected_s=30.0),)
_IMAGES_7B = (
    Load(
        "vl7b 64 clients 64/128 and an image",
        "serve",
        *(256, 64, 128, 64),
        expected_s=40.0,
        image_sizes="256x256..2048x2048",
    ),
)


def _tensor_parallel(size: int, model: str, throughput_s: float, decode_s: float) -> tuple[ModelPlan, ...]:
    """The seconds are those of the throughput load and of the largest decode load."""
    loads = (
        Load(f"{model} 256 x 1024/128", "throughput", 256, 1024, 128, expected_s=throughput_s),
        *_decodes(model, (256, decode_s), (32, decode_s / 4), (1, decode_s / 6)),
    )
    flags = f"--tensor-parallel-size {size}"
    return (ModelPlan(model, (Pairing(loads, flags, flags, f"TP {size}", num_devices=size),)),)


def _pipeline_parallel(size: int) -> tuple[ModelPlan, ...]:
    loads = (Load("8b 256 clients 2048/16", "serve", 256, 2048, 16, 256, expected_s=15.0, warms_up=False),)
    stages, parts = f"--pipeline-parallel-size {size}", f"--tensor-parallel-size {size}"
    pairings = (
        Pairing(loads, DEFAULT, None, "one device", shows_idle=True),
        Pairing(loads, stages, stages, f"PP {size}", num_devices=size, shows_idle=True, times_first=1),
        Pairing(loads, parts, None, f"TP {size}", num_devices=size, shows_idle=True, times_first=1),
    )
    return (ModelPlan("8b", pairings),)


def _data_parallel(size: int) -> tuple[ModelPlan, ...]:
    flags = f"--data-parallel-size {size} --api-server-count {size}"
    concurrency, num_prompts = size * _CLIENTS_8B.concurrency, size * _CLIENTS_8B.num_prompts
    load = Load(f"8b {concurrency} clients 1024/128", "serve", num_prompts, 1024, 128, concurrency, expected_s=29.0)
    pairings = (
        Pairing((_CLIENTS_8B,), label="one device"),
        Pairing((load,), flags, flags, f"DP {size}", times_first=size),
    )
    return (ModelPlan("8b", pairings),)


GROUPS: dict[str, tuple[ModelPlan, ...]] = {
    "offline": (ModelPlan("8b", (Pairing(_OFFLINE_8B),)), ModelPlan("1b", (Pairing(_OFFLINE_1B),))),
    "online8b": (ModelPlan("8b", (Pairing(_ONLINE_8B),), compares_starts=True),),
    "online1b": (
        ModelPlan(
            "1b",
            (
                Pairing(_ONLINE_1B),
                Pairing(_ONLINE_1B, ours=ONE_SERVER, label="ours with 1 API server"),
                Pairing(_ONLINE_1B, peer=FOUR_SERVERS, label="peer with 4 API servers"),
            ),
        ),
    ),
    "media7b": (
        ModelPlan(
            "vl7b",
            (
                Pairing(_IMAGES_7B),
                Pairing(_IMAGES_7B, ours=FOUR_SERVERS, label="ours with 4 API servers"),
                Pairing(_IMAGES_7B, peer=FOUR_SERVERS, label="peer with 4 API servers"),
            ),
        ),
    ),
    "tp2": _tensor_parallel(2, "8b", 6.0, 6.0),
    "tp4": _tensor_parallel(4, "8b", 4.0, 4.0),
    "tp4-70b": _tensor_parallel(4, "70b", 25.0, 22.0),
    "pp2": _pipeline_parallel(2),
    "dp2": _data_parallel(2),
    "dp4": _data_parallel(4),
}


def plans_of(group: str, selected: Sequence[str] = (), divisor: int = 1) -> tuple[ModelPlan, ...]:
    """By model, without what is not `selected` by texts in the loads' names, with a `divisor`-th of every size."""
    plans = (plan.chosen(selected, divisor) for plan in GROUPS[group])
    return tuple(plan for plan in plans if plan.pairings)

"""What docs/tuning.md says against preemptions lowers their number under the same load over HTTP."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import pytest

from benchmarks.preemption import SETTINGS, Outcome, measure, read_model
from tests.support.tiny_models import cached_tiny_model
from tokenmill_server.bench.compare_sides import Model

pytestmark = pytest.mark.slow

SETTING = SETTINGS["cpu"]
SMALL = dataclasses.replace(SETTING.load, num_prompts=64, concurrency=11)
"""Six waves of the benchmark's requests: enough for a server without a remedy to preempt. The clients are so few that
of two caches each has room for more than its half of them, since halves are not always equal."""
VARIANTS = dict(SETTING.variants())


@pytest.fixture(scope="module")
def model() -> Model:
    """With the heads of the embedded model, so that the benchmark's flags fit, and a fifth of its layers."""
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 64}
    return read_model(Path(cached_tiny_model("llama", **heads, intermediate_size=192, num_hidden_layers=6)))


def run(model: Model, flags: Mapping[str, str]) -> Outcome:
    """With a fifth of the cache, which holds as many tokens."""
    kilobytes = int(flags["kv-cache-memory-bytes"].removesuffix("M")) * 1024 // 5
    return measure(model, {**flags, "kv-cache-memory-bytes": f"{kilobytes}K", "dtype": "bfloat16"}, SMALL)


@pytest.fixture(scope="module")
def as_it_is(model: Model) -> Outcome:
    return run(model, VARIANTS["as it is"])


def test_a_cache_that_is_too_small_costs_preemptions_and_work(as_it_is: Outcome) -> None:
    assert as_it_is.preemptions >= 4
    assert as_it_is.recomputed_tokens > 0
    assert as_it_is.figures["completed"] == SMALL.num_prompts


@pytest.mark.parametrize("name", SETTING.remedies)
def test_each_remedy_lowers_the_counter(model: Model, as_it_is: Outcome, name: str) -> None:
    with_remedy = run(model, VARIANTS[name])
    assert with_remedy.figures["completed"] == SMALL.num_prompts
    assert with_remedy.preemptions < as_it_is.preemptions
    assert with_remedy.recomputed_tokens < as_it_is.recomputed_tokens
    more_cache = "fewer" not in name
    assert (with_remedy.cache_tokens > 1.9 * as_it_is.cache_tokens) is more_cache

"""Which numbers of workers a model can be shared among."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.model_loading import model_config
from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.config.architecture import ArchitectureConfig
from tokenmill_engine.config.parallel import ParallelConfig, check_tensor_parallel
from tokenmill_engine.errors import ConfigError


def architecture(**changes: Any) -> ArchitectureConfig:
    """12 heads, 4 key-value heads, width 96, 512 entries."""
    shape = {"num_heads": 12, "num_kv_heads": 4, "intermediate_size": 96, "vocab_size": 512}
    return replace(model_config(cached_tiny_model("llama")).architecture, **(shape | changes))


@pytest.mark.parametrize(
    ("changes", "valid"),
    [
        ({}, {1, 2, 4, 12}),
        ({"num_kv_heads": 12}, {1, 2, 3, 4, 6, 12}),
        ({"num_kv_heads": 1}, {1, 2, 3, 4, 6, 12}),
        ({"num_kv_heads": 2}, {1, 2, 4, 6, 12}),
        ({"num_kv_heads": 3}, {1, 3, 6, 12}),
        ({"intermediate_size": 98}, {1, 2}),
        ({"num_heads": 9, "num_kv_heads": 3, "intermediate_size": 1536}, {1, 3}),
        ({"vocab_size": 5}, {1, 2}),
        ({"vocab_size": 513}, {1, 2, 4, 12}),
    ],
)
def test_valid_sizes(changes: dict[str, Any], valid: set[int]) -> None:
    shape = architecture(**changes)
    for size in range(1, 25):
        if size in valid:
            check_tensor_parallel(shape, size)
        else:
            with pytest.raises(ConfigError) as failure:
                check_tensor_parallel(shape, size)
            listed = ", ".join(map(str, sorted(valid)))
            assert str(failure.value).startswith(f"--tensor-parallel-size {size} does not fit LlamaForCausalLM with ")
            assert str(failure.value).endswith(f"; sizes that do: {listed}")


@pytest.mark.parametrize(
    ("changes", "size", "obstacles"),
    [
        ({}, 5, "12 attention heads, 4 key-value heads, a feed-forward width of 96"),
        ({}, 3, "4 key-value heads"),
        ({"num_kv_heads": 1}, 5, "12 attention heads, a feed-forward width of 96"),
        ({"intermediate_size": 98}, 4, "a feed-forward width of 98"),
        ({"vocab_size": 5}, 4, "a vocabulary of 5"),
        ({}, 0, "12 attention heads"),
        ({}, -2, "12 attention heads"),
    ],
)
def test_what_is_in_the_way_is_named(changes: dict[str, Any], size: int, obstacles: str) -> None:
    with pytest.raises(
        ConfigError,
        match=f"^--tensor-parallel-size {size} does not fit LlamaForCausalLM with {obstacles}; sizes that do: 1",
    ):
        check_tensor_parallel(architecture(**changes), size)


def test_workers_of_both_kinds_multiply() -> None:
    assert ParallelConfig().world_size == 1
    assert ParallelConfig(tensor_parallel_size=4, pipeline_parallel_size=2).world_size == 8

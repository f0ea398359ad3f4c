"""How layers are shared out to the stages of a pipeline, and what is refused."""

import pytest

from tokenmill_engine.config.stages import share_layers, whole_model
from tokenmill_engine.errors import ConfigError


def counts(*arguments: object) -> list[int]:
    return [len(stage.layers) for stage in share_layers(*arguments)]  # type: ignore[arg-type]


def test_layers_that_are_left_over_go_to_the_middle_then_to_the_first_stage_and_never_to_the_last() -> None:
    assert counts(32, 4) == [8, 8, 8, 8]
    assert counts(10, 4) == [2, 3, 3, 2]
    assert counts(11, 4) == [3, 3, 3, 2]
    assert counts(9, 4) == [2, 2, 3, 2]
    assert counts(3, 2) == [2, 1]
    assert counts(5, 1) == [5]


@pytest.mark.parametrize("num_layers", range(1, 12))
def test_every_layer_is_in_one_stage_in_order(num_layers: int) -> None:
    for num_stages in range(1, num_layers + 1):
        stages = share_layers(num_layers, num_stages)
        assert [layer for stage in stages for layer in stage.layers] == list(range(num_layers))
        assert [stage.is_first for stage in stages] == [True] + [False] * (num_stages - 1)
        assert [stage.is_last for stage in stages] == [False] * (num_stages - 1) + [True]
        assert max(counts(num_layers, num_stages)) - min(counts(num_layers, num_stages)) <= 1


def test_a_partition_is_followed() -> None:
    assert counts(10, 3, (5, 2, 3)) == [5, 2, 3]
    assert [stage.layers for stage in share_layers(10, 2, (1, 9))] == [range(1), range(1, 10)]
    assert whole_model(7).is_whole


@pytest.mark.parametrize("partition", [(5, 5), (4, 3, 2), (10, 0, 0), (5, 6, -1), ()])
def test_a_partition_that_does_not_fit_is_refused_with_one_that_does(partition: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"^VLLM_PP_LAYER_PARTITION .*-pp 3 .* for example 3,4,3"):
        share_layers(10, 3, partition, "VLLM_PP_LAYER_PARTITION", "-pp 3")


def test_more_stages_than_layers_are_refused_with_the_most_that_work() -> None:
    with pytest.raises(ConfigError, match=r"--pipeline-parallel-size 4 is more than the 3 layers.*up to 3 work"):
        share_layers(3, 4)

"""Steps as a GPU runs them, by two processes that have a model between them and add up through memory that both map:
the tokens of one that has all of it. Kernels are interpreted; `tests/gpu/test_parallel.py` has the rest."""

from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.peer_processes import PeerProcesses
from tests.support.tiny_models import cached_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

DEADLINE_S = 420.0
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"num_key_value_heads": 1, "vocab_size": 509, "tie_word_embeddings": True},
}


def answers(folder: Path, size: int, family: Any, mode: str) -> list[dict[str, Any]]:
    """Of each process."""
    model = cached_tiny_model(family, **SHAPES[family])
    found: dict[int, dict[str, Any]] = {}
    with closing(PeerProcesses("tests.support.shared_steps", size, folder, str(model), mode)) as processes:
        processes.run(found.__setitem__, DEADLINE_S)
    return [found[rank] for rank in range(size)]


@cache
def alone(folder: Path, family: str) -> list[list[int]]:
    tokens: list[list[int]] = answers(folder, 1, family, "exact")[0]["tokens"]
    return tokens


@pytest.mark.parametrize(("family", "mode"), [("llama", "exact"), ("llama", "padded"), ("qwen2", "exact")])
def test_two_processes_choose_the_tokens_of_one(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, family: str, mode: str
) -> None:
    """Greedy and sampled ones; both processes know them, though neither tells the other. Small sums and large ones go
    different ways."""
    both = answers(tmp_path, 2, family, mode)
    expected = alone(tmp_path_factory.getbasetemp(), family)
    for answer in both:
        assert answer["tokens"] == expected
        assert answer["large"] > 0


@pytest.mark.parametrize(("family", "mode"), [("qwen2_5_vl", "weights"), ("qwen3_vl", "data"), ("llava", "weights")])
def test_two_processes_that_share_an_encoder_answer_as_transformers_do(tmp_path: Path, family: str, mode: str) -> None:
    found: dict[int, dict[str, Any]] = {}
    with closing(PeerProcesses("tests.support.shared_images", 2, tmp_path, family, mode)) as processes:
        processes.run(found.__setitem__, DEADLINE_S)
    assert all(answer["is_right"] for answer in found.values())
    assert all(answer["large"] > 0 for answer in found.values())
    assert found[0]["kept"] == found[1]["elsewhere"]
    assert found[1]["kept"] == found[0]["elsewhere"]

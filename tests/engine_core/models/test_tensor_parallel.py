"""A model that several workers have between them against the same model in one piece, in float32 on the CPU."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model_loading import CPU, load_op_by_op, model_config
from tests.support.paged_forward import PagedForward
from tests.support.thread_group import ThreadGroup, on_every_rank, thread_groups
from tests.support.tiny_models import Family, cached_tiny_model, make_tiny_model
from tokenmill_engine.config.engine import ModelConfig
from tokenmill_engine.config.parallel import check_tensor_parallel
from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_engine.models.loader import build_model, load_weights

TOLERANCE = 1e-4

QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
WIDE = {"num_attention_heads": 12, "head_dim": 8, "intermediate_size": 96}
KV_HEADS = {2: 4, 3: 3, 4: 4}
"""For each size, a number of key-value heads that divides."""

FAMILIES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama-untied": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2-biased-qkv": ("qwen2", {}),
    "qwen2-some-windows": ("qwen2", QWEN_WINDOW),
    "qwen3-head-norms": ("qwen3", {}),
    "qwen3-tied-windows": ("qwen3", {"tie_word_embeddings": True, **QWEN_WINDOW}),
}
CASES = [(name, size) for name in FAMILIES for size in (2, 3, 4)]
SHARED_HEADS = [(1, 2), (1, 3), (1, 4), (2, 4), (2, 2), (4, 4)]
"""(key-value heads, workers)"""

STEPS = [
    [("a", [7, 300, 12, 511, 0, 41, 170, 171, 255, 256, 9, 77, 5]), ("b", [3, 4])],
    [("a", [100]), ("b", [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16]), ("c", [508, 3, 2])],
    [("a", [1]), ("b", [2]), ("c", [3])],
]
"""Prompts, chunks beside decodes, decodes; with the first and the last entry of every worker's vocabulary."""


def load_part(config: ModelConfig, group: ThreadGroup) -> DenseDecoder:
    model = build_model(config, CPU, group=group)
    load_weights(model, config)
    model.finalize()
    return model


def run_steps(model: DenseDecoder) -> list[dict[str, torch.Tensor]]:
    forward = PagedForward(model, block_size=4)
    return [forward.step(work) for work in STEPS]


def check_equal(folder: Path, size: int) -> None:
    """Logits on every worker are the same to the last bit, and nearly those of the whole model."""
    config = model_config(folder)
    check_tensor_parallel(config.architecture, size)
    expected = run_steps(load_op_by_op(folder))
    outputs = on_every_rank(thread_groups(size), lambda group: run_steps(load_part(config, group)))
    for output in outputs:
        for whole, step, first in zip(expected, output, outputs[0], strict=True):
            assert step.keys() == whole.keys()
            for name, logits in step.items():
                assert torch.equal(logits, first[name])
                torch.testing.assert_close(logits, whole[name], atol=TOLERANCE, rtol=TOLERANCE)
                assert logits.argmax(dim=-1).tolist() == whole[name].argmax(dim=-1).tolist()


@pytest.mark.parametrize(("name", "size"), CASES)
def test_every_family_equals_the_whole_model(name: str, size: int) -> None:
    family, overrides = FAMILIES[name]
    check_equal(cached_tiny_model(family, **WIDE, num_key_value_heads=KV_HEADS[size], **overrides), size)


@pytest.mark.parametrize(("num_kv_heads", "size"), SHARED_HEADS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_workers_share_key_value_heads_that_are_too_few(family: Family, num_kv_heads: int, size: int) -> None:
    check_equal(cached_tiny_model(family, **WIDE, num_key_value_heads=num_kv_heads), size)


@pytest.mark.parametrize("vocab_size", [512, 513, 514, 515])
@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_need_not_divide(vocab_size: int, size: int, tied: bool) -> None:
    overrides = {"num_key_value_heads": KV_HEADS[size], "vocab_size": vocab_size, "tie_word_embeddings": tied}
    check_equal(cached_tiny_model("llama", **WIDE, **overrides), size)


def test_each_worker_has_its_part_of_heads_caches_and_matrices() -> None:
    config = model_config(cached_tiny_model("llama", **WIDE, num_key_value_heads=2))
    for group in thread_groups(4):
        model = build_model(config, CPU, group=group)
        assert {spec.num_kv_heads for spec in model.kv_specs} == {1}
        assert model.architecture.num_heads == 12
        assert [shape for _, *shape in model.linear_shapes()] == [
            [(3 + 2 * 1) * 8, 64], [64, 3 * 8], [2 * 24, 64], [64, 24], [128, 64], [128, 64],
        ]  # fmt: skip


def test_two_sums_a_layer_one_for_the_tokens_and_nothing_else_is_said() -> None:
    config = model_config(cached_tiny_model("llama", **WIDE, num_key_value_heads=4))
    groups = thread_groups(2)

    def run(group: ThreadGroup) -> None:
        paged = PagedForward(load_part(config, group))
        hidden = paged.model.forward(paged.prepare([("a", [1, 2, 3])]), paged.kv_caches)
        paged.model.argmax_token(hidden)
        paged.model.compute_logits(hidden)

    on_every_rank(groups, run)
    for group in groups:
        assert group.calls == ["all_reduce"] * (1 + 2 * 3) + ["all_gather"] * 2


def test_a_worker_alone_says_nothing() -> None:
    """Not even to itself: its steps, which may be captured in a graph, have no operator more than without a group."""
    (group,) = thread_groups(1)
    config = model_config(cached_tiny_model("qwen3"))
    model = build_model(config, CPU, group=group)
    load_weights(model, config)
    model.finalize(allow_fused=False)
    expected = run_steps(load_op_by_op(config.path))
    for step, whole in zip(run_steps(model), expected, strict=True):
        assert all(torch.equal(logits, whole[name]) for name, logits in step.items())
    assert load_part(config, group).is_fused
    assert group.calls == []


def test_only_the_wanted_rows_are_computed() -> None:
    folder = cached_tiny_model("qwen3", **WIDE, num_key_value_heads=4)
    work = [("a", list(range(3, 30))), ("b", list(range(40, 50)))]
    rows = torch.tensor([0, 26, 36], dtype=torch.int32)
    config = model_config(folder)

    def run(group: ThreadGroup) -> tuple[torch.Tensor, torch.Tensor]:
        every, some = PagedForward(load_part(config, group)), PagedForward(load_part(config, group))
        nothing = some.model.forward(some.prepare([("c", [3])]), some.kv_caches, output_rows=rows[:0])
        assert nothing.shape == (0, 64)
        hidden = every.model.forward(every.prepare(work), every.kv_caches)
        return hidden[rows], some.model.forward(some.prepare(work), some.kv_caches, output_rows=rows)

    for expected, chosen in on_every_rank(thread_groups(2), run):
        torch.testing.assert_close(chosen, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_stays_near_float32(dtype: str) -> None:
    folder = cached_tiny_model("qwen3", **WIDE, num_key_value_heads=4)
    exact = run_steps(load_op_by_op(folder))
    config = model_config(folder, dtype=dtype)
    for output in on_every_rank(thread_groups(2), lambda group: run_steps(load_part(config, group))):
        for whole, step in zip(exact, output, strict=True):
            for name, logits in step.items():
                assert logits.dtype == torch.float32
                assert (logits.log_softmax(-1) - whole[name].log_softmax(-1)).abs().mean() < 0.06


@pytest.mark.parametrize("size", [2, 3, 4])
def test_layers_of_a_part_are_not_fused(size: int) -> None:
    config = model_config(cached_tiny_model("llama", **WIDE, num_key_value_heads=KV_HEADS[size]))
    for group in thread_groups(size):
        assert not load_part(config, group).is_fused


@pytest.mark.parametrize("size", [2, 3, 4])
def test_random_weights_answer_the_same_for_any_number_of_workers(tmp_path: Path, size: int) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen2", **WIDE, num_key_value_heads=KV_HEADS[size])
    (folder / "model.safetensors").unlink()
    changes: dict[str, Any] = {"load_format": "dummy", "seed": 5}
    config = model_config(folder, **changes)
    expected = run_steps(load_op_by_op(folder, **changes))
    for output in on_every_rank(thread_groups(size), lambda group: run_steps(load_part(config, group))):
        for whole, step in zip(expected, output, strict=True):
            for name, logits in step.items():
                torch.testing.assert_close(logits, whole[name], atol=TOLERANCE, rtol=TOLERANCE)
    assert expected[0]["a"].std() > 1e-3

"""Models on a CUDA device: loading, logits against the CPU in float32, bfloat16 fidelity, graph capture."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from tests.support.model_loading import CPU, load_on_cpu, loaded_weights, model_config
from tests.support.paged_forward import PagedForward
from tests.support.tiny_gguf import write_tiny_gguf
from tests.support.tiny_models import VOCAB_SIZE, Family, cached_tiny_model, make_tiny_model, tiny_config, tiny_weights
from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_engine.models.loader import load_model

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("exact_float32")]

CUDA = torch.device("cuda", 0)

CASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama": ("llama", {"tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen3-wide-heads": ("qwen3", {"head_dim": 128}),
}


def load_on_cuda(name: Path, **changes: Any) -> DenseDecoder:
    return load_model(model_config(name, **changes), CUDA)


def prompt(length: int, seed: int) -> list[int]:
    tokens: list[int] = torch.randint(VOCAB_SIZE, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return tokens


@pytest.mark.parametrize("case", CASES)
def test_chunks_and_decodes_equal_the_cpu_in_float32(case: str) -> None:
    family, overrides = CASES[case]
    folder = cached_tiny_model(family, **overrides)
    on_cpu, on_cuda = PagedForward(load_on_cpu(folder)), PagedForward(load_on_cuda(folder))
    texts = {"a": prompt(200, seed=1), "b": prompt(41, seed=2)}
    for first, last in ((0, 37), (37, 38), (38, 41)):
        work = [(name, tokens[first:last]) for name, tokens in texts.items()]
        expected, ours = on_cpu.step(work), on_cuda.step(work)
        for name in texts:
            torch.testing.assert_close(ours[name].cpu(), expected[name], atol=5e-3, rtol=5e-3)
    rest = texts["a"][41:]
    torch.testing.assert_close(
        on_cuda.step([("a", rest)])["a"].cpu(), on_cpu.step([("a", rest)])["a"], atol=5e-3, rtol=5e-3
    )


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_agrees_with_float32_on_the_most_likely_token(case: str) -> None:
    """At least 99 % of the positions whose float32 margin is not within rounding."""
    family, overrides = CASES[case]
    folder = cached_tiny_model(family, **overrides)
    tokens = prompt(500, seed=3)
    exact = PagedForward(load_on_cpu(folder)).step([("a", tokens)])["a"]
    rounded = PagedForward(load_on_cuda(folder, dtype="bfloat16")).step([("a", tokens)])["a"].cpu()
    top = exact.topk(2, dim=-1)
    clear = top.values[:, 0] - top.values[:, 1] > 0.1
    assert clear.float().mean() > 0.7
    assert (rounded.argmax(dim=-1) == top.indices[:, 0])[clear].float().mean() >= 0.99


def test_large_matrices_arrive_whole_in_several_runs(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "llama", vocab_size=200_000)
    expected, ours = loaded_weights(folder, CPU), loaded_weights(folder, CUDA)
    assert expected["lm_head.weight"].numel() > 1 << 23
    for name, values in expected.items():
        assert ours[name].is_cuda
        assert torch.equal(ours[name].cpu(), values), name


def test_other_types_are_converted_on_the_way(tmp_path: Path) -> None:
    folder = cached_tiny_model("llama")
    expected = loaded_weights(folder, CPU, dtype="bfloat16")
    for name, values in loaded_weights(folder, CUDA, dtype="bfloat16").items():
        assert torch.equal(values.cpu(), expected[name]), name


def test_a_gguf_file_loads_as_on_the_cpu(tmp_path: Path) -> None:
    config = tiny_config("llama")
    write_tiny_gguf(tmp_path / "model.gguf", config, tiny_weights(config), lambda _: gguf.GGMLQuantizationType.Q8_0)
    expected = loaded_weights(tmp_path / "model.gguf", CPU)
    for name, values in loaded_weights(tmp_path / "model.gguf", CUDA).items():
        assert torch.equal(values.cpu(), expected[name]), name


def test_dummy_weights_follow_the_seed() -> None:
    folder = cached_tiny_model("llama")
    first, again, other = (loaded_weights(folder, CUDA, load_format="dummy", seed=seed) for seed in (1, 1, 2))
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])


def test_a_forward_pass_can_be_captured_and_replayed() -> None:
    model = load_on_cuda(cached_tiny_model("qwen3"), dtype="bfloat16")
    forward = PagedForward(model)
    forward.step([("a", prompt(50, seed=4)), ("b", prompt(20, seed=5))])
    batch = forward.prepare([("a", [7]), ("b", [9])])
    warm_up = torch.cuda.Stream()
    warm_up.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm_up):
        expected = model.forward(batch, forward.kv_caches).clone()
    torch.cuda.current_stream().wait_stream(warm_up)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden = model.forward(batch, forward.kv_caches)
    hidden.zero_()
    graph.replay()
    torch.testing.assert_close(hidden, expected, atol=0, rtol=0)
    batch.input_ids.copy_(torch.tensor([70, 90]))
    graph.replay()
    assert not torch.equal(hidden, expected)

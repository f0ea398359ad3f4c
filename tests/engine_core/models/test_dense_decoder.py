"""Logits of every family against transformers, in float32 on CPU: whole prompts, chunks, decodes, mixed batches."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model_loading import load_on_cpu, load_op_by_op
from tests.support.paged_forward import PagedForward
from tests.support.tiny_models import VOCAB_SIZE, Family, cached_tiny_model
from tokenmill_engine.models.dense_decoder import DenseDecoder

TOLERANCE = 1e-4

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
QWEN_WINDOW = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}

CASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "llama-untied": ("llama", {}),
    "llama-tied": ("llama", {"tie_word_embeddings": True}),
    "llama-one-kv-head": ("llama", {"num_key_value_heads": 1, "num_hidden_layers": 1}),
    "llama-wide-heads": ("llama", {"head_dim": 32}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-linear-rope": ("llama", {"rope_scaling": {"type": "linear", "factor": 4.0}}),
    "llama-llama3-rope": ("llama", {"rope_scaling": LLAMA3, "rope_theta": 500000.0}),
    "llama-yarn-rope": ("llama", {"rope_scaling": YARN}),
    "llama-yarn-mscale": ("llama", {"rope_scaling": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False}}),
    "llama-new-spelling": ("llama", {"rope_parameters": {"rope_theta": 1234.0} | LLAMA3}),
    "mistral": ("mistral", {}),
    "mistral-window": ("mistral", {"sliding_window": 9}),
    "qwen2": ("qwen2", {}),
    "qwen2-window": ("qwen2", QWEN_WINDOW),
    "qwen3": ("qwen3", {}),
    "qwen3-tied-window": ("qwen3", {"tie_word_embeddings": True, **QWEN_WINDOW}),
}


Load = Callable[..., DenseDecoder]


@pytest.fixture(params=CASES)
def folder(request: pytest.FixtureRequest) -> Path:
    family, overrides = CASES[request.param]
    return cached_tiny_model(family, **overrides)


@pytest.fixture(params=[load_on_cpu, load_op_by_op], ids=["fused", "op-by-op"])
def load(request: pytest.FixtureRequest) -> Load:
    """Both ways to run the layers."""
    loader: Load = request.param
    return loader


@pytest.fixture(scope="module")
def reference_logits() -> Callable[[Path, list[int]], torch.Tensor]:
    """Logits [num_tokens, vocab_size] of a whole prompt by transformers."""
    import transformers

    models: dict[Path, Any] = {}

    def compute(folder: Path, token_ids: list[int]) -> torch.Tensor:
        if folder not in models:
            models[folder] = transformers.AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation="eager"
            )
        with torch.no_grad():
            logits: torch.Tensor = models[folder](torch.tensor([token_ids])).logits[0]
        return logits

    return compute


def prompt(length: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = torch.randint(VOCAB_SIZE, (length,), generator=generator).tolist()
    return tokens


def assert_close(ours: torch.Tensor, reference: torch.Tensor) -> None:
    torch.testing.assert_close(ours, reference, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_whole_prompt_equals_transformers(
    folder: Path, load: Load, reference_logits: Callable[..., torch.Tensor]
) -> None:
    tokens = prompt(77, seed=1)
    logits = PagedForward(load(folder)).step([("a", tokens)])["a"]
    reference = reference_logits(folder, tokens)
    assert reference.std() > 0.5
    assert_close(logits, reference)


def test_chunks_and_decodes_in_mixed_batches_equal_whole_prompts(
    folder: Path, load: Load, reference_logits: Callable[..., torch.Tensor]
) -> None:
    texts = {"a": prompt(61, seed=2), "b": prompt(37, seed=3), "c": prompt(5, seed=4)}
    chunks = {"a": [17, 16, 1, 1, 20, 6], "b": [1, 30, 1, 1, 1, 3], "c": [1, 1, 1, 1, 1]}
    forward = PagedForward(load(folder), block_size=4)
    pieces: dict[str, list[torch.Tensor]] = {name: [] for name in texts}
    done = dict.fromkeys(texts, 0)
    for step in range(6):
        work = []
        for name, tokens in texts.items():
            if step < len(chunks[name]):
                count = chunks[name][step]
                work.append((name, tokens[done[name] : done[name] + count]))
                done[name] += count
        for name, logits in forward.step(work).items():
            pieces[name].append(logits)
    for name, tokens in texts.items():
        assert done[name] == len(tokens)
        assert_close(torch.cat(pieces[name]), reference_logits(folder, tokens))


def test_the_window_changes_logits_only_past_its_length(reference_logits: Callable[..., torch.Tensor]) -> None:
    tokens = prompt(40, seed=5)
    full = PagedForward(load_on_cpu(cached_tiny_model("mistral"))).step([("a", tokens)])["a"]
    windowed = PagedForward(load_on_cpu(cached_tiny_model("mistral", sliding_window=9))).step([("a", tokens)])["a"]
    assert_close(windowed[:9], full[:9])
    assert (windowed[9:] - full[9:]).abs().max(dim=-1).values.min() > 10 * TOLERANCE


def test_only_the_wanted_rows_are_computed(load: Load) -> None:
    folder, work = cached_tiny_model("qwen3"), [("a", prompt(30, seed=8)), ("b", prompt(12, seed=9))]
    everything, some = PagedForward(load(folder)), PagedForward(load(folder))
    rows = torch.tensor([0, 29, 41], dtype=torch.int32)
    hidden = everything.model.forward(everything.prepare(work), everything.kv_caches)
    chosen = some.model.forward(some.prepare(work), some.kv_caches, output_rows=rows)
    torch.testing.assert_close(chosen, hidden[rows], atol=1e-5, rtol=1e-5)
    next_tokens = [("a", [1]), ("b", [2])]
    ours = some.step(next_tokens)
    for name, logits in everything.step(next_tokens).items():
        assert_close(ours[name], logits)


def test_the_result_goes_where_it_is_asked_to(load: Load) -> None:
    paged, work = PagedForward(load(cached_tiny_model("llama"))), [("a", prompt(9, seed=8)), ("b", prompt(4, seed=9))]
    batch = paged.prepare(work)
    hidden = paged.model.forward(batch, paged.kv_caches)
    everything, some = torch.full((2, 13, 64), float("nan")).unbind()
    assert paged.model.forward(batch, paged.kv_caches, out=everything) is everything
    assert torch.equal(everything, hidden)
    rows = torch.tensor([8, 12], dtype=torch.int32)
    paged.model.forward(batch, paged.kv_caches, rows, some[:2])
    torch.testing.assert_close(some[:2], hidden[rows], atol=1e-5, rtol=1e-5)
    assert some[2:].isnan().all()


def test_the_layers_run_as_one_native_call_unless_told_otherwise() -> None:
    folder = cached_tiny_model("llama")
    assert load_on_cpu(folder).is_fused
    assert load_on_cpu(folder, dtype="bfloat16").is_fused
    assert not load_op_by_op(folder).is_fused


def test_types_that_the_library_lacks_run_op_by_op(reference_logits: Callable[..., torch.Tensor]) -> None:
    folder, tokens = cached_tiny_model("llama"), prompt(20, seed=10)
    model = load_on_cpu(folder, dtype="float16")
    assert not model.is_fused
    logits = PagedForward(model).step([("a", tokens)])["a"]
    torch.testing.assert_close(logits, reference_logits(folder, tokens), atol=0.05, rtol=0.05)


def test_a_second_set_of_caches_is_refused() -> None:
    model = load_on_cpu(cached_tiny_model("llama"))
    PagedForward(model).step([("a", [1, 2, 3])])
    with pytest.raises(ValueError, match="once"):
        PagedForward(model).step([("a", [1, 2, 3])])


def test_kv_specs_declare_heads_windows_and_dtype() -> None:
    model = load_on_cpu(cached_tiny_model("qwen2", **QWEN_WINDOW), dtype="bfloat16")
    assert [spec.window for spec in model.kv_specs] == [None, 7, 7]
    assert {(spec.num_kv_heads, spec.head_dim, spec.dtype) for spec in model.kv_specs} == {(2, 16, "bfloat16")}


def test_the_most_likely_token_is_that_of_the_logits() -> None:
    model = load_on_cpu(cached_tiny_model("llama"))
    hidden = torch.randn(11, 64, generator=torch.Generator().manual_seed(0))
    assert model.argmax_token(hidden).tolist() == model.compute_logits(hidden).argmax(dim=-1).tolist()


def test_linear_shapes_are_those_of_the_weights() -> None:
    model = load_op_by_op(cached_tiny_model("qwen2", **QWEN_WINDOW))
    shape, hidden = model.architecture, model.architecture.hidden_size
    heads = shape.num_heads + 2 * shape.num_kv_heads
    assert model.linear_shapes() == [
        ("linear", heads * shape.head_dim, hidden),
        ("linear", hidden, shape.num_heads * shape.head_dim),
        ("gated", 2 * shape.intermediate_size, hidden),
        ("linear", hidden, shape.intermediate_size),
        ("linear", shape.vocab_size, hidden),
        ("argmax", shape.vocab_size, hidden),
    ]


def test_logits_are_float32_whatever_the_weights_are() -> None:
    model = load_on_cpu(cached_tiny_model("llama"), dtype="bfloat16")
    assert model.compute_logits(torch.zeros(2, 64, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_bfloat16_stays_near_float32(family: Family) -> None:
    folder = cached_tiny_model(family)
    tokens = prompt(50, seed=6)
    exact = PagedForward(load_on_cpu(folder)).step([("a", tokens)])["a"].log_softmax(dim=-1)
    rounded = PagedForward(load_on_cpu(folder, dtype="bfloat16")).step([("a", tokens)])["a"].log_softmax(dim=-1)
    assert (exact - rounded).abs().mean() < 0.05
    assert exact.gather(-1, rounded.argmax(-1, keepdim=True)).sub(exact.max(-1, keepdim=True).values).min() > -0.3


def test_positions_up_to_the_longest_request_and_a_little_more_can_be_computed() -> None:
    model = load_on_cpu(cached_tiny_model("llama"), max_model_len=20)
    logits = PagedForward(model, block_size=4).step([("a", prompt(22, seed=7))])["a"]
    assert torch.isfinite(logits).all()

"""Attention backends behind a model: planned once a step, and each of them with the same answers."""

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.model_loading import CPU, load_op_by_op, model_config
from tests.support.paged_forward import PagedForward
from tests.support.tiny_models import VOCAB_SIZE, cached_tiny_model
from tokenmill_engine.attention.backend import BuiltInAttention, LayerInputs
from tokenmill_engine.attention.batch import AttentionShape, ForwardBatch
from tokenmill_engine.attention.flash_attention import FlashAttention4
from tokenmill_engine.attention.selection import attention_backend, built_in
from tokenmill_engine.errors import StartupError
from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_engine.models.loader import load_weights
from tokenmill_kernels import ops
from tokenmill_kernels.cpu import library

QWEN_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
FLASH_ATTENTION = '''
import torch
from tokenmill_kernels import reference

calls = []

def flash_attn_varlen_func(q, k, v, *, cu_seqlens_q, seqused_k, page_table, max_seqlen_q, max_seqlen_k, softmax_scale,
                           causal, window_size):
    """With the signature and the meaning of the package's own."""
    assert causal and window_size[1] in (None, 0)
    calls.append(cu_seqlens_q.tolist())
    out = torch.full_like(q, float("nan"))
    window = None if window_size[0] is None else window_size[0] + 1
    attended = reference.paged_attention(
        q, k, v, query_start_loc=cu_seqlens_q, seq_lens=seqused_k, block_tables=page_table, num_decodes=0,
        max_query_len=max_seqlen_q, max_seq_len=max_seqlen_k, scale=softmax_scale, window=window,
    )
    out[cu_seqlens_q[0] : cu_seqlens_q[-1]] = attended[cu_seqlens_q[0] : cu_seqlens_q[-1]]
    return out, None
'''


class Recorder:
    """The built-in kernels, and what they were asked."""

    name = "recorder"

    def __init__(self) -> None:
        self.planned: list[AttentionShape] = []
        self.attended: list[AttentionShape] = []

    def plan(self, batch: ForwardBatch, shape: AttentionShape, dtype: torch.dtype) -> ops.AttentionPlan | None:
        assert (batch.num_tokens, dtype) == (12, torch.float32)
        self.planned.append(shape)
        return None

    def attend(self, layer: LayerInputs, batch: ForwardBatch) -> torch.Tensor:
        assert layer.shape in batch.plans
        self.attended.append(layer.shape)
        return built_in(CPU, torch.float32).attend(layer, batch)


def load(folder: Path, backend: Any) -> DenseDecoder:
    """The model in `folder`, float32 on the CPU, layer by layer over `backend`."""
    config = model_config(folder)
    model = DenseDecoder(config, CPU, backend)
    load_weights(model, config)
    model.finalize(allow_fused=False)
    return model


def tokens(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()
    return token_ids


@pytest.fixture
def flash_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The package flash-attn-4 as far as it is used, for a CPU; first tokens of the requests of each call."""
    package = tmp_path / "flash_attn_on_cpu"
    package.mkdir()
    (package / "__init__.py").write_text(FLASH_ATTENTION)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("tokenmill_engine.attention.flash_attention._MODULE", package.name)
    calls: list[list[int]] = importlib.import_module(package.name).calls
    calls.clear()
    return calls


def test_a_step_is_planned_once_for_each_shape() -> None:
    recorder = Recorder()
    model = load(cached_tiny_model("qwen2", **QWEN_WINDOW), recorder)
    PagedForward(model).step([("a", tokens(12, seed=1))])
    assert [shape.window for shape in recorder.planned] == [None, 7]
    assert [shape.window for shape in recorder.attended] == [None, 7, 7]


def test_selection_by_name() -> None:
    native = BuiltInAttention("native")
    for dtype in (torch.float32, torch.bfloat16):
        assert attention_backend("auto", CPU, dtype) == attention_backend("native", CPU, dtype) == native
        assert built_in(CPU, dtype) == native
    cuda, triton = torch.device("cuda"), BuiltInAttention("triton")
    assert built_in(cuda, torch.float16) == attention_backend("triton", cuda, torch.float16) == triton


def test_torch_serves_where_the_library_cannot_unless_the_library_is_asked_for() -> None:
    assert attention_backend("auto", CPU, torch.float16) == built_in(CPU, torch.float16) == BuiltInAttention("torch")
    with pytest.raises(StartupError, match=r"native needs .*, not in float16; with --attention-backend auto"):
        attention_backend("native", CPU, torch.float16)


def test_a_library_that_is_asked_for_and_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    for cached in (library._open, library.load):
        cached.cache_clear()
        request.addfinalizer(cached.cache_clear)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("TOKENMILL_CACHE_DIR", str(tmp_path))
    with pytest.raises(StartupError, match=r"native needs .*: no C\+\+ compiler found .*--attention-backend auto"):
        attention_backend("native", CPU, torch.float32)
    assert attention_backend("auto", CPU, torch.float32) == BuiltInAttention("torch")


def test_a_missing_package_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenmill_engine.attention.flash_attention._MODULE", "flash_attn_that_is_nowhere")
    with pytest.raises(StartupError, match=r"flash-attn-4 cannot be imported .*use --attention-backend triton"):
        attention_backend("flash-attn-4", CPU, torch.float32)


@pytest.mark.parametrize("window", [None, 9])
def test_flash_attention_computes_chunks(flash_attention: list[list[int]], window: int | None) -> None:
    """Prompts, decodes beside them, continued prompts, and decodes alone, against the built-in kernels."""
    folder = cached_tiny_model("mistral", sliding_window=window)
    flash, plain = (PagedForward(model) for model in (load(folder, FlashAttention4()), load_op_by_op(folder)))
    steps = [
        [("a", tokens(20, seed=1)), ("b", tokens(5, seed=2))],
        [("a", tokens(1, seed=3)), ("b", tokens(1, seed=4)), ("c", tokens(40, seed=5)), ("d", tokens(33, seed=6))],
        [("c", tokens(60, seed=7))],
        [(name, tokens(1, seed=8)) for name in "abcd"],
    ]
    for work in steps:
        ours, expected = flash.step(work), plain.step(work)
        for name, logits in expected.items():
            torch.testing.assert_close(ours[name], logits, atol=1e-4, rtol=1e-4)
    layers = range(len(flash.kv_caches))
    assert flash_attention == [starts for starts in ([0, 20, 25], [2, 42, 75], [0, 60]) for _ in layers]


def test_flash_attention_leaves_captured_steps_alone(flash_attention: list[list[int]]) -> None:
    """Their launches must not depend on which requests are decodes."""
    paged = PagedForward(load(cached_tiny_model("llama"), FlashAttention4()))
    batch = paged.prepare([("a", tokens(20, seed=1)), ("b", tokens(5, seed=2))])
    paged.model.forward(replace(batch, num_decodes=1, any_mix=True), paged.kv_caches)
    assert flash_attention == []

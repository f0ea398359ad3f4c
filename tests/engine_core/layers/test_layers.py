"""The building blocks: where checkpoint rows go, and what each block computes."""

import pytest
import torch
from torch.nn import functional as F

from tokenmill_engine.layers.embedding import LMHead, TokenEmbedding
from tokenmill_engine.layers.linear import Linear
from tokenmill_engine.layers.mlp import GatedMLP
from tokenmill_engine.layers.norm import RMSNorm
from tokenmill_engine.layers.placement import Placement, Target, whole

FLOAT32 = Placement(torch.float32, torch.device("cpu"))


def fill(targets: dict[str, Target]) -> dict[str, torch.Tensor]:
    """Random values in every target; returns copies by name."""
    generator = torch.Generator().manual_seed(0)
    for target in targets.values():
        target.view.copy_(torch.randn(target.shape, generator=generator))
    return {name: target.view.clone() for name, target in targets.items()}


@pytest.mark.parametrize("has_bias", [True, False])
def test_stacked_projections_equal_separate_ones(has_bias: bool) -> None:
    linear = Linear(whole(24), {"q": whole(16), "k": whole(8), "v": whole(5)}, has_bias, FLOAT32)
    weights = fill(dict(linear.targets("attn.")))
    linear.finalize()
    names = {f"attn.{part}.{kind}" for part in "qkv" for kind in (["weight", "bias"] if has_bias else ["weight"])}
    assert set(weights) == names
    x = torch.randn(7, 24)
    expected = [F.linear(x, weights[f"attn.{part}.weight"], weights.get(f"attn.{part}.bias")) for part in "qkv"]
    torch.testing.assert_close(linear(x), torch.cat(expected, dim=-1), atol=1e-5, rtol=1e-5)


def test_the_gated_block_is_swiglu() -> None:
    mlp = GatedMLP(12, 20, False, FLOAT32)
    weights = fill(dict(mlp.targets("")))
    mlp.gate_up_proj.finalize()
    mlp.down_proj.finalize()
    x = torch.randn(3, 12)
    gate, up = F.linear(x, weights["gate_proj.weight"]), F.linear(x, weights["up_proj.weight"])
    expected = F.linear(F.silu(gate) * up, weights["down_proj.weight"])
    torch.testing.assert_close(mlp(x), expected, atol=1e-4, rtol=1e-4)


def test_the_norm_adds_the_residual_first() -> None:
    norm = RMSNorm(16, 1e-5, FLOAT32)
    weight = fill(dict(norm.targets("norm")))["norm.weight"]
    x, residual = torch.randn(4, 16), torch.randn(4, 16)
    total = x + residual
    normed, stream = norm(x, residual.clone())
    torch.testing.assert_close(stream, total)
    torch.testing.assert_close(normed, F.rms_norm(total, (16,), weight, 1e-5), atol=1e-5, rtol=1e-5)
    out = torch.empty(4, 16)
    assert norm(x, residual.clone(), out)[0] is out
    torch.testing.assert_close(out, normed)


@pytest.mark.parametrize("packed", [True, False])
def test_the_first_norm_looks_up_the_embeddings(packed: bool) -> None:
    norm, table = RMSNorm(16, 1e-5, FLOAT32), TokenEmbedding(9, 16, FLOAT32)
    weight = fill(dict(norm.targets("norm")))["norm.weight"]
    rows = fill(dict(table.targets("table")))["table.weight"][[3, 8, 3]]
    if packed:
        table.finalize()
    normed, stream = norm.embed(torch.tensor([3, 8, 3], dtype=torch.int32), table)
    assert torch.equal(stream, rows)
    torch.testing.assert_close(normed, F.rms_norm(rows, (16,), weight, 1e-5), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_the_head_scores_every_entry_in_float32(tied: bool) -> None:
    placement = Placement(torch.bfloat16, torch.device("cpu"))
    embedding = TokenEmbedding(50, 32, placement)
    rows = embedding if tied else TokenEmbedding(50, 32, placement)
    weights = fill(dict(embedding.targets("embed")) | dict(rows.targets("embed" if tied else "head")))
    embedding.finalize()
    rows.finalize()
    head = LMHead(rows)
    torch.testing.assert_close(embedding(torch.tensor([3, 49], dtype=torch.int32)), weights["embed.weight"][[3, 49]])
    hidden = torch.randn(5, 32, dtype=torch.bfloat16)
    logits = head(hidden)
    assert logits.dtype == torch.float32
    expected = F.linear(hidden.float(), weights["embed.weight" if tied else "head.weight"].float())
    torch.testing.assert_close(logits, expected, atol=0.1, rtol=0.01)
    assert logits.gather(1, head.argmax(hidden).long()[:, None]).squeeze(1).tolist() == pytest.approx(
        logits.max(dim=-1).values.tolist(), abs=0.1
    )

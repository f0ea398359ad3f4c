"""Every shipped choice of this card gives the product that the library gives, at the shape that it is for."""

import json
from functools import partial
from importlib.resources import files

import pytest
import torch

from tests.support.kernel_inputs import assert_near
from tokenmill_kernels import ops, reference
from tokenmill_kernels.gpu.compilation import compile_ahead

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


def shipped_shapes() -> dict[tuple[str, int, int], list[int]]:
    """(use, N, K) -> numbers of tokens, of the family that this card belongs to."""
    families = json.loads(files("tokenmill_kernels.gpu").joinpath("linear_table.json").read_text())
    card = torch.cuda.get_device_name(CUDA)
    entries = next((family for name, family in families.items() if name in card), {"shapes": {}})["shapes"]
    shapes: dict[tuple[str, int, int], list[int]] = {}
    for key in entries:
        kind, size, num_tokens = key.split()
        num_rows, k_size = map(int, size.split("x"))
        shapes.setdefault((kind, num_rows, k_size), []).append(int(num_tokens))
    return shapes


PRODUCTS = {"linear": ops.linear, "gated": ops.gated_linear, "argmax": ops.linear_argmax}


def test_shipped_choices() -> None:
    shapes = shipped_shapes()
    assert shapes, "no choice is shipped for this card: nothing to test"
    torch.manual_seed(0)
    cases = []
    for (kind, num_rows, k_size), counts in shapes.items():
        weight = torch.randn(num_rows, k_size, device=CUDA, dtype=torch.bfloat16) * k_size**-0.5
        for count in counts:
            # Full and partly filled blocks of tokens.
            for num_tokens in {count, max(1, count - 3)}:
                x = torch.randn(num_tokens, k_size, device=CUDA, dtype=torch.bfloat16)
                cases.append((kind, x, weight))
    compile_ahead([partial(PRODUCTS[kind], x, weight) for kind, x, weight in cases], CUDA)
    for kind, x, weight in cases:
        result = PRODUCTS[kind](x, weight)
        if kind == "argmax":
            logits = reference.linear(x, weight, out_dtype=torch.float32)
            best = logits.gather(1, result[:, None].long()).squeeze(1)
            torch.testing.assert_close(best, logits.amax(1), atol=2e-3, rtol=2e-3)
        elif kind == "gated":
            assert_near(result, reference.gated_linear(x, weight))
        else:
            assert_near(result, reference.linear(x, weight))

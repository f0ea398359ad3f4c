"""The kernel of masks in the interpreter."""

import pytest
import torch

from tokenmill_kernels.gpu.sampling_masks import MaskBuffers, allocate_masks, apply_masks


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 2047, 2049, 5003])
def test_only_what_the_bits_allow_is_left(vocab_size: int) -> None:
    entries = [2, -1, 0, -1, 5]
    buffers = allocate_masks(6, vocab_size, torch.device("cpu"))
    assert buffers.entries.tolist() == [-1] * 6
    buffers.bits.random_(-(2**31), 2**31 - 1)
    buffers.entries[: len(entries)] = torch.tensor(entries, dtype=torch.int32)
    logits = torch.randn(len(entries), vocab_size + 3)[:, :vocab_size]
    expected = logits.clone()
    for row, entry in enumerate(entries):
        if entry >= 0:
            bits = (buffers.bits[entry][:, None] >> torch.arange(32)) & 1
            expected[row, bits.view(-1)[:vocab_size] == 0] = float("-inf")
    apply_masks(logits, buffers)
    assert torch.equal(logits, expected)


def test_rows_past_the_entries_stay_as_they_are() -> None:
    """A graph may have more rows than a step can have requests. What lies behind the entries is not theirs."""
    memory = torch.tensor([0, -1, 1, 1, 1], dtype=torch.int32)
    buffers = MaskBuffers(entries=memory[:2], bits=torch.zeros((2, 1), dtype=torch.int32))
    logits = torch.randn(5, 20)
    expected = logits.clone()
    expected[0] = float("-inf")
    apply_masks(logits, buffers)
    assert torch.equal(logits, expected)

"""Rotary position embedding tables (arXiv:2104.09864) with the context extensions of the supported models.

Frequencies are computed in float32 by the formulas of the papers, in the order that Hugging Face models were trained
and are evaluated with, so that tables agree to the last bits at large positions too.
"""

import math

import torch

from tokenmill_engine.config.architecture import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, num_positions: int, device: torch.device) -> torch.Tensor:
    """float32 [num_positions, rotary_dim]: cosines of every frequency in the first half of a row, sines in the
    second, both times the attention factor."""
    rotary_dim = rope.rotary_dim or head_dim
    frequencies = _frequencies(rope, rotary_dim).to(device)
    positions = torch.arange(num_positions, dtype=torch.float32, device=device)
    table = torch.empty(num_positions, rotary_dim, dtype=torch.float32, device=device)
    # Tables of long contexts have hundreds of megabytes: angles are where the sines will be, and nowhere else.
    cosines, sines = table.chunk(2, dim=1)
    torch.mul(positions[:, None], frequencies[None, :], out=sines)
    torch.cos(sines, out=cosines)
    sines.sin_()
    factor = attention_factor(rope)
    return table if factor == 1.0 else table.mul_(factor)


def attention_factor(rope: RopeConfig) -> float:
    """What YaRN multiplies cosines and sines by (its equation 22 unless the model states its own); 1 otherwise."""
    if rope.kind != "yarn":
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    return 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0


def _frequencies(rope: RopeConfig, rotary_dim: int) -> torch.Tensor:
    """Angle per position of each pair of dimensions, float32 [rotary_dim / 2]."""
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.freq_factors:
        return frequencies / torch.tensor(rope.freq_factors, dtype=torch.float32)
    match rope.kind:
        case "default":
            return frequencies
        case "linear":
            return frequencies / rope.factor
        case "llama3":
            return _llama3(rope, frequencies)
        case "yarn":
            return _yarn(rope, frequencies, rotary_dim)


def _llama3(rope: RopeConfig, frequencies: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are stretched by `factor`, short ones kept, those between blended."""
    wavelengths = 2 * math.pi / frequencies
    turns = rope.original_max_position / wavelengths
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = keep.clamp(0.0, 1.0)
    return (1 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(rope: RopeConfig, frequencies: torch.Tensor, rotary_dim: int) -> torch.Tensor:
    """Dimensions that turn often within the original context are kept, those that turn seldom are stretched by
    `factor`, with a linear ramp between the two borders (section 3.2 of the paper)."""

    def dimension_turning(turns: float) -> float:
        wavelength = rope.original_max_position / (turns * 2 * math.pi)
        return rotary_dim * math.log(wavelength) / (2 * math.log(rope.theta))

    low, high = dimension_turning(rope.beta_fast), dimension_turning(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    indices = torch.arange(rotary_dim // 2, dtype=torch.float32)
    stretch = ((indices - low) / (high - low)).clamp(0.0, 1.0)
    return frequencies / rope.factor * stretch + frequencies * (1 - stretch)

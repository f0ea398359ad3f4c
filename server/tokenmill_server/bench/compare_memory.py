"""What a decode step has to read from the devices' memory, and how much of their bandwidth it used by that."""

from dataclasses import dataclass

from tokenmill_engine.config.architecture import ArchitectureConfig

_DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(slots=True, frozen=True)
class StepBytes:
    """Bytes that all devices of a copy of the model read together: each weight once, and keys and values of each token
    of context. Reads of what several devices hold a copy of count once."""

    weights: int
    per_token: int

    def bandwidth_share(self, num_tokens: float, step_s: float, num_devices: int, bandwidth_gb_s: float) -> float:
        """The bytes of a step with `num_tokens` of context in all, by what `num_devices` read in its time at
        `bandwidth_gb_s` (1e9 bytes per second) each."""
        return (self.weights + num_tokens * self.per_token) / (step_s * num_devices * bandwidth_gb_s * 1e9)


def step_bytes(architecture: ArchitectureConfig, dtype: str) -> StepBytes | None:
    """Of the embedding no more than a few rows are read, unless it is the output matrix as well. None for dtypes whose
    size is not known."""
    size = _DTYPE_BYTES.get(dtype)
    if size is None:
        return None
    lookup = 0 if architecture.tie_word_embeddings else architecture.vocab_size * architecture.hidden_size
    keys_values = 2 * architecture.num_layers * architecture.num_kv_heads * architecture.head_dim
    return StepBytes((architecture.num_parameters - lookup) * size, keys_values * size)

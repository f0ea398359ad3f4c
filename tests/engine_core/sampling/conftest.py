"""A sampler over small tables, filled with requests."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.outputs import SlotStart
from tokenmill_engine.sampling.sampler import Sampled, Sampler
from tokenmill_engine.sampling.table import SamplingTable
from tokenmill_engine.sampling.tokens import TokenTable
from tokenmill_kernels.cpu import sampling as native

CPU = torch.device("cpu")
NUM_SLOTS = 16
MAX_LEN = 64


@dataclass
class Request:
    """One request of a test batch."""

    params: SamplingParams
    prompt: Sequence[int] = (1, 2, 3)
    output: Sequence[int] = ()
    stop_token_ids: tuple[int, ...] = ()


@dataclass
class SamplerHarness:
    """Puts requests into slots and samples them."""

    vocab_size: int
    num_slots: int = NUM_SLOTS
    device: torch.device = CPU
    table: SamplingTable = field(init=False)
    tokens: TokenTable = field(init=False)
    sampler: Sampler = field(init=False)

    def __post_init__(self) -> None:
        self.table = SamplingTable(self.num_slots, self.vocab_size, self.device)
        self.tokens = TokenTable(
            token_ids=torch.randint(0, self.vocab_size, (self.num_slots, MAX_LEN)).to(self.device, torch.int32),
            num_tokens=torch.ones(self.num_slots, dtype=torch.int32, device=self.device),
            num_prompt=torch.ones(self.num_slots, dtype=torch.int32, device=self.device),
        )
        self.sampler = Sampler(self.table, self.tokens)

    def start(self, slot: int, request: Request) -> None:
        known = [*request.prompt, *request.output]
        self.tokens.token_ids[slot, : len(known)] = torch.tensor(known, dtype=torch.int32)
        self.tokens.num_tokens[slot] = len(known)
        self.tokens.num_prompt[slot] = len(request.prompt)
        ids = np.array(known, np.int32)
        self.table.start(
            [
                SlotStart(
                    slot=slot,
                    request_id=slot,
                    token_ids=ids,
                    num_prompt_tokens=len(request.prompt),
                    num_computed_tokens=0,
                    block_ids=([],),
                    sampling=request.params,
                    stop_token_ids=request.stop_token_ids,
                )
            ]
        )

    def sample(self, logits: torch.Tensor, slots: Sequence[int]) -> Sampled:
        """Sample a copy of `logits`, row i for slot i of `slots`."""
        max_tokens = int(self.tokens.num_tokens[list(slots)].max())
        return self.sampler.sample(logits.clone(), np.array(slots, np.int32), max_tokens)


@pytest.fixture(params=["library", "tensor operators"])
def make_harness(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., SamplerHarness]:
    """Both ways in which random tokens are drawn; a GPU, or a machine without a compiler, has the second."""
    if request.param == "library":
        assert native.is_available()
    else:
        monkeypatch.setattr(native, "is_available", lambda: False)
    return SamplerHarness

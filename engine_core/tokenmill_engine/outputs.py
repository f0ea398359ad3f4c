"""What the scheduler tells a worker to do in one step, and what the worker answers. Torch-free.

Requests live in slots: rows of the worker's persistent device-resident tables. A plan carries only what changed.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tokenmill_engine.kv_cache.spec import KVGroup
from tokenmill_engine.messages import MediaTensor, SamplingParams, SharedObject


@dataclass(slots=True, frozen=True)
class MediaPlace:
    """Where an image or a video is in a prompt."""

    offset: int
    """First placeholder."""
    num_tokens: int
    grid: tuple[int, int, int] | None
    seconds_per_step: float | None = None
    """Both as in `messages.MediaItem`."""


@dataclass(slots=True, frozen=True)
class EncoderInput:
    """An image or a video to encode. Its `num_tokens` rows of output are kept as `entry` until a plan frees it."""

    entry: int
    """Used once since the engine started."""
    kind: str
    num_tokens: int
    grid: tuple[int, int, int] | None
    tensors: dict[str, MediaTensor]
    key: bytes = b""
    """As in `messages.MediaItem`."""
    shared: SharedObject | None = None
    """Where the bytes of the tensors are; None: in them."""


@dataclass(slots=True, frozen=True)
class PlaceholderRows:
    """In row `row` of the plan, tokens `start` .. `start` + `count` - 1 of those scheduled are placeholders: rows
    `first` .. `first` + `count` - 1 of `entry` stand in for their embeddings."""

    row: int
    start: int
    count: int
    entry: int
    first: int


@dataclass(slots=True, frozen=True)
class StepMedia:
    """What a step has to do with images: first free, then encode, then compute."""

    free: list[int]
    """Entries that no row needs any more, of this step or a later one."""
    encode: list[EncoderInput]
    rows: list[PlaceholderRows]
    """Ascending by row and start."""


@dataclass(slots=True, frozen=True)
class SlotStart:
    """A request takes `slot`: admitted for the first time or resumed after a preemption."""

    slot: int
    request_id: int
    token_ids: NDArray[np.int32]
    """[num_tokens] all known tokens, prompt first, then what was generated before a preemption."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose keys and values are already in the blocks (prefix hit)."""
    block_ids: tuple[list[int], ...]
    """Per KV group, the blocks held now."""
    sampling: SamplingParams
    """`seed` is always set; `max_tokens` is always a number; all token ids are in the vocabulary."""
    stop_token_ids: tuple[int, ...]
    """Every id that may end the request (model's end tokens and the request's own): masked until `min_tokens`."""
    media: tuple[MediaPlace, ...] = ()
    """Images of the prompt, ascending by offset."""
    second_text: int = 0
    """As in `AddRequest`."""


@dataclass(slots=True, frozen=True)
class BlockAppend:
    """`block_ids` follow the `start` blocks that `slot` already holds in KV group `group`."""

    slot: int
    group: int
    start: int
    block_ids: list[int]


@dataclass(slots=True, frozen=True)
class TokenAppend:
    """`token_ids` follow the `start` tokens that `slot` holds once the steps before are done."""

    slot: int
    start: int
    token_ids: list[int]


@dataclass(slots=True, frozen=True)
class SampledTokens:
    """`token_ids[i]` is the token at `positions[i]` of the request in slot `slots[i]`; all int32 [num_tokens]."""

    slots: NDArray[np.int32]
    positions: NDArray[np.int32]
    token_ids: NDArray[np.int32]


@dataclass(slots=True, frozen=True)
class TokenMasks:
    """Which tokens some rows of a plan may sample."""

    rows: NDArray[np.int32]
    """[n] of the plan, ascending; each of them samples."""
    bits: NDArray[np.int32]
    """[n, ceil(vocab_size / 32)]: bit `i % 32` of word `i // 32` is set if token `i` may follow; one at least is."""


@dataclass(slots=True, frozen=True)
class StepPlan:
    """One step: rows are the scheduled requests, those that decode exactly one token first.

    `num_computed` is the host's optimistic view; with tokens still in flight the device holds the true one.
    """

    step: int
    slots: NDArray[np.int32]
    """[num_reqs]"""
    num_scheduled: NDArray[np.int32]
    """[num_reqs] tokens to compute for each request, at least 1."""
    num_computed: NDArray[np.int32]
    """[num_reqs] tokens computed before this step."""
    samples: NDArray[np.bool_]
    """[num_reqs] whether the row reaches its last known token and so yields a new one."""
    num_decodes: int
    """The first `num_decodes` rows have `num_scheduled == 1` and sample."""
    starts: list[SlotStart] = field(default_factory=list)
    """Applied before anything else in the step. A slot may be started again without notice of its end."""
    appends: list[BlockAppend] = field(default_factory=list)
    known: list[TokenAppend] = field(default_factory=list)
    """Tokens that nobody samples, since nothing else may stand there; at most one entry for each slot, of rows that do
    not start."""
    sampled: SampledTokens | None = None
    """Of earlier steps, for a worker that does not sample; written before anything else, starts too."""
    media: StepMedia | None = None
    """None: no row has a placeholder."""
    masks: TokenMasks | None = None
    """None: every row may sample every token, unless they follow."""
    masks_follow: bool = False
    """Masks depend on tokens of steps in flight: they come once the step is under way, before the next plan."""

    @property
    def num_reqs(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return int(self.num_scheduled.sum())


@dataclass(slots=True, frozen=True)
class LogprobRows:
    """Raw log-probabilities of n positions. Column 0 is the token itself; `token_ids`, `logprobs` are [n, 1 + k]."""

    token_ids: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    ranks: NDArray[np.int32]
    """[n]"""


@dataclass(slots=True, frozen=True)
class StepResult:
    """Answer to the plan of the same `step`. `row` below is an index into the plan's rows."""

    step: int
    token_ids: NDArray[np.int32]
    """[num_reqs, max_new] new tokens of each row, padded with -1."""
    num_new: NDArray[np.int32]
    """[num_reqs] how many of them count; 0 for rows that do not sample."""
    logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    """row -> its new tokens' log-probabilities."""
    prompt_logprobs: dict[int, LogprobRows] = field(default_factory=dict)
    """row -> prompt tokens num_computed+1 .. num_computed+num_scheduled (cut at the prompt's end)."""
    errors: dict[int, str] = field(default_factory=dict)
    """row -> why this request alone failed (for example logits that are not numbers)."""
    elapsed_s: float = 0.0
    """Seconds of the step: on a GPU from when its enqueueing began, or the step before ended if that was later, to its
    end; of a model in stages, in the slowest one. 0 if it was not measured."""
    encoder_s: float = 0.0
    """Seconds that the worker of this result encoded media in, or that of the first stage whose part it has; part of
    `elapsed_s`. 0 if it was not measured."""
    vectors: dict[int, NDArray[np.float32]] = field(default_factory=dict)
    """row -> [size] what the prompt became, if the model makes vectors. Such a row has one new token, of no meaning."""
    lost_entries: tuple[int, ...] = ()
    """Entries of `StepMedia` that are not there although they should be: their images could not be encoded."""


@dataclass(slots=True, frozen=True)
class MissingImages:
    """What is wrong with the results of a step because a worker, of which there are others, could not encode images."""

    step: int
    rows: tuple[int, ...]
    """Of the plan: what they give is of no use."""
    entries: tuple[int, ...]
    """As in `StepResult.lost_entries`."""


NO_TOKEN_LEFT = "the model gave no usable probabilities for a token (not a number, or every token excluded)"
MISSING_IMAGE = "an image of this request could not be encoded"


def without_images(result: StepResult, missing: Sequence[MissingImages]) -> StepResult:
    """`result`, in which the rows that should have looked at images in `missing` have failed."""
    num_new = result.num_new.copy()
    rows = sorted({row for each in missing for row in each.rows})
    num_new[rows] = 0
    return replace(
        result,
        num_new=num_new,
        logprobs={row: scores for row, scores in result.logprobs.items() if row not in rows},
        prompt_logprobs={row: scores for row, scores in result.prompt_logprobs.items() if row not in rows},
        errors=result.errors | dict.fromkeys(rows, MISSING_IMAGE),
        lost_entries=tuple(sorted({*result.lost_entries, *(entry for each in missing for entry in each.entries)})),
    )


class StepHandle(Protocol):
    """A step that was handed to the executor."""

    def result(self) -> StepResult:
        """Wait for the step.

        Raises:
            EngineError: it failed as a whole; the executor can go on.
            EngineDeadError: it cannot: the device is lost.
        """


@dataclass(slots=True, frozen=True)
class KVCapacity:
    """What an initialized worker offers."""

    num_blocks: int
    block_size: int
    max_model_len: int
    """Longest request (prompt + output) that the pool holds with nothing else in it; at most the configured one."""
    kv_cache_bytes: int
    """Of one worker, as are the heads in `groups`."""
    groups: tuple[KVGroup, ...]
    attention_backend: str
    phases: dict[str, float]
    """Seconds that each phase of the start took."""
    prefill_costs: tuple[tuple[int, float], ...] = ()
    """(tokens, seconds) of pure prefill steps of several sizes, ascending, as measured at the start."""

"""Beam search: the most likely continuations of a prompt, found by requests of one token each.

Every step asks for the next token's log-probabilities behind each beam, which the prefix cache makes cheap. Pure
bookkeeping, with the rules of transformers' `generate`: a sequence that ends counts only if it is among the `width`
best of its step, and the final order is by log-probability / length ** `length_penalty`.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from tokenmill_engine.messages import FinishReason, SamplingParams
from tokenmill_server.processing.detokenizer import Detokenizer
from tokenmill_server.processing.generation import CompletionOutput, GenerationRequest, RequestOutput
from tokenmill_server.processing.logprobs import LOGPROB_FLOOR
from tokenmill_server.processing.tokenizer import Tokenizer

_MAX_ENDS = 7
"""More end tokens than that are not expected among the best continuations of a step."""
_PROMPT_TAIL = 8


@dataclass(slots=True, frozen=True)
class BeamOptions:
    """`length_penalty` above 0 favours long sequences, below 0 short ones. With `early_stopping` the first sequences
    that end are the answer; else the search goes on until no beam can become better than they are."""

    length_penalty: float = 1.0
    early_stopping: bool = False


@dataclass(slots=True, frozen=True)
class _Beam:
    """Generated tokens and their summed log-probability."""

    token_ids: tuple[int, ...] = ()
    logprob: float = 0.0
    reason: FinishReason | None = None
    """None while it may grow."""


class BeamSearch:
    """The beams of one prompt: as many as its request wants choices."""

    def __init__(
        self, request: GenerationRequest, options: BeamOptions, eos_token_ids: Sequence[int], vocab_size: int
    ) -> None:
        sampling = request.sampling
        self._request = request
        self._options = options
        self._prompt = array("i", request.prompt_token_ids)
        """Which copies in a hundredth of the time of a list."""
        self._width = sampling.n
        self._max_tokens = sampling.max_tokens or 0
        self._own_ends = frozenset(sampling.stop_token_ids)
        self._ends = self._own_ends | (frozenset() if sampling.ignore_eos else frozenset(eos_token_ids))
        self._num_kept = max(2, 1 + min(len(self._ends), _MAX_ENDS)) * self._width
        """Continuations looked at per step, over all beams: enough for `width` that do not end."""
        num_top = min(self._num_kept, vocab_size)
        self._sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, logprobs=num_top)
        self._live = [_Beam()]
        self._finished: list[_Beam] = []
        self._num_cached_tokens: int | None = None

    @property
    def is_done(self) -> bool:
        return not self._live

    def requests(self) -> list[GenerationRequest]:
        """One for each beam that grows."""
        return [
            replace(self._request, prompt_token_ids=self._prompt + array("i", beam.token_ids), sampling=self._sampling)
            for beam in self._live
        ]

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """The answers to `requests`, in their order."""
        if self._num_cached_tokens is None:
            self._num_cached_tokens = outputs[0].num_cached_tokens
        live: list[_Beam] = []
        for rank, beam in enumerate(self._continuations(outputs)):
            if beam.token_ids[-1] not in self._ends:
                live.append(beam)
            elif rank < self._width:
                self._finished.append(replace(beam, reason=FinishReason.STOP))
        self._live = live[: self._width]
        if self._live and len(self._live[0].token_ids) >= self._max_tokens:
            self._finished += [replace(beam, reason=FinishReason.LENGTH) for beam in self._live]
            self._live = []
        self._finished.sort(key=self._score, reverse=True)
        del self._finished[self._width :]
        if self._cannot_improve():
            self._live = []

    def result(self, tokenizer: Tokenizer) -> RequestOutput:
        """The best sequences, best first."""
        request = self._request
        return RequestOutput(
            label=request.label,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[self._output(index, beam, tokenizer) for index, beam in enumerate(self._finished)],
            num_cached_tokens=self._num_cached_tokens or 0,
        )

    def _continuations(self, outputs: Sequence[RequestOutput]) -> list[_Beam]:
        """The best over all beams, best first."""
        grown = [
            (beam.logprob + logprob, beam, token_id)
            for beam, output in zip(self._live, outputs, strict=True)
            for entry in output.outputs[0].logprobs or ()
            for token_id, logprob in entry.top
            if logprob > LOGPROB_FLOOR
        ]
        grown.sort(key=itemgetter(0), reverse=True)
        return [_Beam((*beam.token_ids, token_id), logprob) for logprob, beam, token_id in grown[: self._num_kept]]

    def _score(self, beam: _Beam) -> float:
        return self._score_at(beam.logprob, len(beam.token_ids))

    def _score_at(self, logprob: float, length: int) -> float:
        return float(logprob / length**self._options.length_penalty)

    def _cannot_improve(self) -> bool:
        """Whether the answer is certain. Log-probabilities only fall, so the best that a beam can come to is its
        present one at the length that suits the penalty best."""
        if not self._live or len(self._finished) < self._width:
            return False
        if self._options.early_stopping:
            return True
        best = self._live[0]
        length = self._max_tokens if self._options.length_penalty > 0 else len(best.token_ids) + 1
        return self._score_at(best.logprob, length) <= self._score(self._finished[-1])

    def _output(self, index: int, beam: _Beam, tokenizer: Tokenizer) -> CompletionOutput:
        sampling, prompt = self._request.sampling, self._request.prompt_token_ids
        ended = beam.reason is FinishReason.STOP
        visible = beam.token_ids[:-1] if ended and not sampling.include_stop_str_in_output else beam.token_ids
        detokenizer = Detokenizer(tokenizer, sampling.skip_special_tokens, prompt[-_PROMPT_TAIL:])
        last = beam.token_ids[-1]
        return CompletionOutput(
            index=index,
            text=detokenizer.push(visible) if visible else "",
            token_ids=list(beam.token_ids),
            finish_reason=beam.reason,
            stop_reason=last if ended and last in self._own_ends else None,
        )

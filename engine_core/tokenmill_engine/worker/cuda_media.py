"""Images in steps on a GPU. Their encoder runs in front of the step, on its stream; a step that computes tokens of a
prompt up to the end of its last image runs without a graph, since its embeddings are not those of its token ids and
its positions may have three dimensions. All others are what they would be without images: the position of a token is
its index plus a number of its slot, which is on the device.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.attention.batch import ForwardBatch, MediaRows
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.models.dense_decoder import DenseDecoder
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.outputs import EncoderInput, StepPlan
from tokenmill_engine.sampling.transfer import to_device
from tokenmill_engine.worker.encoder import EncoderOutputs
from tokenmill_engine.worker.encoder_shares import EncoderShare
from tokenmill_engine.worker.inputs import StepRows
from tokenmill_engine.worker.media_links import MediaLinks
from tokenmill_engine.worker.slot_positions import SlotPositions
from tokenmill_engine.worker.slots import SlotTables, Write


@dataclass(slots=True)
class MediaParts:
    """What a step's batch gets beside the inputs that all steps have."""

    rows: MediaRows | None
    known: tuple[torch.Tensor, torch.Tensor] | None
    """Tokens int64 [num_known] and their positions int32 [3, num_known]."""

    def complete(self, batch: ForwardBatch) -> None:
        """Enqueue: add them to a batch that was expanded."""
        batch.media = self.rows
        if self.known is not None:
            tokens, positions = self.known
            batch.positions = batch.positions.repeat(3, 1).index_copy_(1, tokens, positions)


class CudaMedia:
    """Of one worker: outputs of the encoder, and where the tokens of the requests in slots are."""

    def __init__(
        self,
        model: MediaDecoder,
        config: EngineConfig,
        tables: SlotTables,
        share: EncoderShare,
        links: MediaLinks,
    ) -> None:
        media = config.model.media
        assert media is not None
        self.outputs = EncoderOutputs(model, share, links) if model.stage.is_first else None
        self._tables, self._device, self._links = tables, model.device, links
        row_bytes = model.row_size * model.dtype.itemsize
        self.max_bytes = 0 if self.outputs is None else config.scheduler.encoder_cache_tokens * row_bytes
        """Of all outputs that are kept between steps."""
        num_slots, merge_size, rate = tables.shape.num_slots, media.vision.spatial_merge_size, media.tokens_per_second
        has_positions = tables.position_deltas is not None
        self._positions = SlotPositions(num_slots, merge_size, rate) if has_positions else None

    def rehearse(self, batches: Sequence[Sequence[EncoderInput]]) -> None:
        """Enqueue: encode images that nobody asked for, those of a batch together, and forget them and all others."""
        if self.outputs is None:
            return
        for batch in batches:
            self.outputs.rehearse(batch)
        self.outputs.clear()

    def forget(self) -> None:
        """Free all outputs."""
        if self.outputs is not None:
            self.outputs.clear()

    def changes(self, plan: StepPlan) -> list[Write]:
        """What the requests that `plan` starts bring for the tables, beside `SlotTables.changes`."""
        if self._positions is None:
            return []
        self._positions.start(plan.starts)
        return self._tables.delta_changes({start.slot: self._positions.delta(start.slot) for start in plan.starts})

    def prepare(self, plan: StepPlan, rows: StepRows) -> MediaParts | None:
        """Enqueue: encode what the plan brings. Says in `rows` what is missing. None for a step that needs nothing
        else, which a graph may do: that follows from the plan alone, so that all workers of a stage do the same."""
        if plan.media is None:
            return None
        media_rows = None
        if self.outputs is not None:
            rows.encoder_time = self.outputs.apply(plan.media)
            media_rows, missing = self.outputs.gather(plan.media.rows, rows.query_start)
            if missing.rows:
                rows.missing = missing
                self._links.tell_missing(missing.told(plan.step))
            if not plan.media.rows:
                media_rows = None
        known = self._known(plan, rows.query_start)
        return None if media_rows is None and known is None else MediaParts(media_rows, known)

    def _known(self, plan: StepPlan, query_start: NDArray[np.int32]) -> tuple[torch.Tensor, torch.Tensor] | None:
        if self._positions is None:
            return None
        # Of a prompt the host's count is the true one.
        known = self._positions.known(plan.slots, plan.num_computed, query_start)
        if known is None:
            return None
        tokens, positions = known
        return to_device(tokens, self._device), to_device(positions, self._device)


def media_of(
    model: DenseDecoder,
    config: EngineConfig,
    tables: SlotTables,
    share: EncoderShare | None = None,
    links: MediaLinks | None = None,
) -> CudaMedia | None:
    """What steps of `model` need for images; None for a model of text alone."""
    if config.model.media is None or not isinstance(model, MediaDecoder):
        return None
    return CudaMedia(model, config, tables, share or EncoderShare(), links or MediaLinks())

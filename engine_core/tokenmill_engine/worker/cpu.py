"""The CPU as a worker's device."""

import time
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from tokenmill_engine.attention.backend import AttentionBackend
from tokenmill_engine.attention.selection import attention_backend
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.distributed.chain import ONE_STAGE, Chain
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.kv_cache.spec import KVGroup
from tokenmill_engine.models.dense_decoder import TORCH_DTYPES, DenseDecoder, KVCaches, Stream
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.sampling.masks import SampleMasks
from tokenmill_engine.sampling.sampler import Sampled
from tokenmill_engine.worker import memory
from tokenmill_engine.worker.encoder import MediaInputs
from tokenmill_engine.worker.encoder_shares import EncoderShare
from tokenmill_engine.worker.inputs import CpuPreparer
from tokenmill_engine.worker.media_links import MediaLinks
from tokenmill_engine.worker.media_rehearsal import MediaRehearsal
from tokenmill_engine.worker.model_runner import Hidden, ModelRunner
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan
from tokenmill_engine.worker.results import StepTimes
from tokenmill_engine.worker.runner import Runner
from tokenmill_engine.worker.slots import SlotShape, SlotTables
from tokenmill_engine.worker.stages import Inlet, RelayRunner, inlet_of
from tokenmill_engine.worker.token_choice import TokenChooser
from tokenmill_kernels.cpu import library

_WARM_UP_PROMPT = 32


class CpuBackend:
    """Runs steps where they are called."""

    loads_beside = False

    def __init__(
        self,
        config: EngineConfig,
        group: Group = ALONE,
        chain: Chain = ONE_STAGE,
        media_links: MediaLinks | None = None,
    ) -> None:
        """`group` and `chain`: as in `Worker`.

        Raises:
            StartupError: the attention backend that is asked for by name cannot serve.
        """
        self.group = group
        self.chain = chain
        self.device = torch.device("cpu")
        self._config = config
        self._media_links = media_links or MediaLinks()
        dtype = TORCH_DTYPES[config.model.dtype]
        self.attention: AttentionBackend = attention_backend(config.device.attention_backend, self.device, dtype)
        native = self.attention.name == "native"
        if native:
            library.set_num_threads(config.device.num_threads)
        # Beside the library's threads torch's own would only get in the way: they spin while they wait for work.
        torch.set_num_threads(1 if native else config.device.num_threads)

    @property
    def prefill_costs(self) -> tuple[tuple[int, float], ...]:
        return ()

    def make_tables(self, shape: SlotShape) -> SlotTables:
        return SlotTables(shape, self.device)

    def attach(self, model: DenseDecoder, tables: SlotTables, groups: Sequence[KVGroup]) -> None:
        self._model, self._tables, self._num_groups = model, tables, len(groups)

    def kv_bytes(self, block_bytes: int) -> int:
        return memory.cpu_kv_bytes(self._config, block_bytes)

    def start(self, kv_caches: KVCaches) -> Runner:
        config, block_size = self._config, self._config.cache.block_size
        media = self._media_inputs()
        runner = self._make_runner(kv_caches, block_size, media)
        longest = min(_WARM_UP_PROMPT, config.model.max_model_len, config.scheduler.max_num_batched_tokens)
        plans = [rehearsal_plan(1, count, self._num_groups, block_size, GREEDY) for count in (longest, 1)]
        if config.model.media is not None:
            plans.append(MediaRehearsal(config, config.model.media, self._num_groups, self.group.rank).step())
        for plan in plans:
            runner.execute(plan).wait()
        if media is not None:
            media.forget()
        return runner

    def _make_runner(self, kv_caches: KVCaches, block_size: int, media: MediaInputs | None) -> Runner:
        model, tables, chain = self._model, self._tables, self.chain
        if not model.stage.is_last:
            return RelayRunner(model, kv_caches, tables, block_size, chain, media)
        steps = CpuSteps(model, kv_caches, tables, block_size, inlet_of(model, chain))
        steps.media = media
        return ModelRunner(model, tables, steps)

    def _media_inputs(self) -> MediaInputs | None:
        model, media = self._model, self._config.model.media
        if media is None or not isinstance(model, MediaDecoder):
            return None
        share = EncoderShare.of(self.group, self._config.model)
        return MediaInputs(model, media, self._tables.shape.num_slots, share, self._media_links)


class CpuSteps:
    """Steps that are done when their calls return."""

    def __init__(
        self,
        model: DenseDecoder,
        kv_caches: KVCaches,
        tables: SlotTables,
        block_size: int,
        inlet: Inlet | None = None,
    ) -> None:
        self.model, self.kv_caches, self.tables, self.inlet = model, kv_caches, tables, inlet
        self.preparer = CpuPreparer(tables, block_size)
        self.chooser = TokenChooser(model, tables)
        self.media: MediaInputs | None = None

    def begin(self, plan: StepPlan) -> "_CpuStep":
        return _CpuStep(self, plan)


class _CpuStep:
    def __init__(self, steps: CpuSteps, plan: StepPlan) -> None:
        self._started = time.perf_counter()
        self._before = StepTimes()
        """What other stages took."""
        self._steps, self._plan = steps, plan
        steps.tables.apply(plan)
        self._inputs = steps.preparer.prepare(plan)
        if steps.media is not None:
            steps.media.complete(plan, self._inputs)
        self.rows = self._inputs.rows

    def forward(self, every_token: bool) -> Hidden:
        steps, index = self._steps, self._inputs.logit_index
        incoming = self._receive(steps.inlet) if steps.inlet is not None else None
        if not every_token:
            return Hidden(steps.model.forward(self._inputs.batch, steps.kv_caches, index, incoming=incoming))
        every = steps.model.forward(self._inputs.batch, steps.kv_caches, incoming=incoming)
        return Hidden(every if index is None else every.index_select(0, index), every)

    def _receive(self, inlet: Inlet) -> Stream:
        stream, self._before = inlet.receive(self._plan)
        # The other stages' time does not come on top: all of them work at once, on different steps.
        self._started = time.perf_counter()
        return stream

    def sample(self, hidden: Hidden, masks: SampleMasks | None) -> Sampled:
        sampled = self._steps.chooser.choose(hidden.chosen, self.rows, masks)
        self._steps.preparer.advance(self._plan, self.rows, sampled.token_ids)
        return sampled

    def finish(self, sampled: Sampled) -> "_Finished":
        elapsed_s = max(self._before.elapsed_s, time.perf_counter() - self._started)
        return _Finished(sampled.token_ids.numpy(), StepTimes(elapsed_s, self._before.encoder_s))


class _Finished:
    def __init__(self, token_ids: NDArray[np.int32], times: StepTimes) -> None:
        self._result = token_ids, times

    def wait(self) -> tuple[NDArray[np.int32], StepTimes]:
        return self._result

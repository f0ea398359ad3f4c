"""A GPU as a worker's device."""

from collections.abc import Sequence

import torch

from tokenmill_engine.attention.batch import ForwardBatch
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.kv_cache.spec import KVGroup
from tokenmill_engine.models.dense_decoder import TORCH_DTYPES, DenseDecoder, KVCaches
from tokenmill_engine.outputs import StepPlan
from tokenmill_engine.worker import memory
from tokenmill_engine.worker.cuda_graphs import GraphedForward, decode_sizes
from tokenmill_engine.worker.cuda_inputs import CudaPreparer
from tokenmill_engine.worker.memory import DeviceMemory, MeasuredUse
from tokenmill_engine.worker.model_runner import Forward, ModelRunner
from tokenmill_engine.worker.rehearsal import GREEDY, MOST_MEMORY, rehearsal_plan
from tokenmill_engine.worker.slots import SlotTables


class CudaBackend:
    """Steps are enqueued on the current stream of the calling thread."""

    def __init__(self, config: EngineConfig, device_index: int) -> None:
        self.device = torch.device("cuda", device_index)
        torch.cuda.set_device(self.device)
        torch.set_num_threads(1)
        self._config = config
        self._at_start = DeviceMemory.of(self.device)
        self._sizes = [] if config.device.enforce_eager else decode_sizes(config.scheduler.max_num_seqs)
        if config.cache.num_gpu_blocks_override is None and config.cache.kv_cache_memory_bytes is None:
            memory.check_free_share(self._at_start, config.cache)

    @property
    def attention_backend(self) -> str:
        return "triton"

    def attach(self, model: DenseDecoder, tables: SlotTables, groups: Sequence[KVGroup]) -> None:
        self._model, self._tables, self._groups = model, tables, groups
        config = self._config
        self._preparer = CudaPreparer(
            tables, config.cache.block_size, config.scheduler.max_num_batched_tokens, self._sizes
        )

    def kv_bytes(self, block_bytes: int) -> int:
        stated = memory.explicit_bytes(self._config.cache, block_bytes)
        if stated is not None:
            return stated
        return memory.cuda_kv_bytes(self._at_start, self._measure(), self._config.cache, block_bytes)

    def _measure(self) -> MeasuredUse:
        """Run the largest step there can be, over a cache of one block, and see what it takes."""
        scheduler = self._config.scheduler
        num_reqs = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens)
        tokens_each = min(scheduler.max_num_batched_tokens // num_reqs, self._config.model.max_model_len)
        dtype = TORCH_DTYPES[self._config.model.dtype]
        kv_caches = memory.allocate_kv_caches(self._groups, 1, self._config.cache.block_size, dtype, self.device)
        runner = ModelRunner(self._model, self._eager(kv_caches), self._tables, self._preparer)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        runner.execute(self._plan(num_reqs, tokens_each, most_memory=True)).wait()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device) - allocated
        del runner, kv_caches
        torch.cuda.empty_cache()
        # Kernels, libraries' work spaces and whatever else does not come from torch's allocator.
        taken = self._at_start.free - DeviceMemory.of(self.device).free
        outside = max(0, taken - torch.cuda.memory_reserved(self.device))
        largest = self._sizes[-1] if self._sizes else 0
        return MeasuredUse(
            weights=allocated + outside,
            peak=peak,
            graphs=memory.graph_bytes(len(self._sizes), largest, scheduler.max_num_batched_tokens, peak),
        )

    def start(self, kv_caches: KVCaches) -> ModelRunner:
        forward = GraphedForward(self._eager(kv_caches))
        runner = ModelRunner(self._model, forward, self._tables, self._preparer)
        longest = min(self._config.scheduler.max_num_batched_tokens, self._config.model.max_model_len)
        runner.execute(self._plan(1, longest)).wait()
        runner.execute(self._plan(1, 1)).wait()
        if self._sizes:
            forward.capture(self._sizes, self._decode_batch)
        return runner

    def _eager(self, kv_caches: KVCaches) -> Forward:
        model = self._model
        return lambda batch, output_rows: model.forward(batch, kv_caches, output_rows)

    def _decode_batch(self, num_reqs: int) -> ForwardBatch:
        plan = self._plan(num_reqs, 1)
        self._tables.apply(plan)
        return self._preparer.prepare(plan).batch

    def _plan(self, num_reqs: int, tokens_each: int, *, most_memory: bool = False) -> StepPlan:
        sampling = MOST_MEMORY if most_memory else GREEDY
        return rehearsal_plan(num_reqs, tokens_each, len(self._groups), self._config.cache.block_size, sampling)

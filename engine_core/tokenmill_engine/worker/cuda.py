"""A GPU as a worker's device."""

import logging
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from tokenmill_engine.attention.selection import attention_backend
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.distributed import nccl_chain, nccl_group
from tokenmill_engine.distributed.chain import ONE_STAGE, Chain
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.errors import StartupError
from tokenmill_engine.kv_cache.spec import KVGroup
from tokenmill_engine.models.dense_decoder import TORCH_DTYPES, DenseDecoder, KVCaches
from tokenmill_engine.progress import log_progress_bar
from tokenmill_engine.worker import memory
from tokenmill_engine.worker.cuda_graphs import GraphStore
from tokenmill_engine.worker.cuda_inputs import CudaInputs
from tokenmill_engine.worker.cuda_media import media_of
from tokenmill_engine.worker.cuda_rehearsal import CudaRehearsal
from tokenmill_engine.worker.cuda_steps import steps_of
from tokenmill_engine.worker.cuda_together import RunnerTogether
from tokenmill_engine.worker.encoder_shares import EncoderShare
from tokenmill_engine.worker.media_links import MediaLinks
from tokenmill_engine.worker.media_rehearsal import MediaRehearsal
from tokenmill_engine.worker.memory import DeviceMemory, MeasuredUse
from tokenmill_engine.worker.rehearsal import RehearsalPlans
from tokenmill_engine.worker.runner import Runner
from tokenmill_engine.worker.shapes import Ladder
from tokenmill_engine.worker.slots import SlotShape, SlotTables
from tokenmill_kernels import ops
from tokenmill_kernels.gpu.compilation import CompileError, compile_ahead, keep_compiled_kernels

logger = logging.getLogger(__name__)

_NUM_TIMINGS, _NUM_LONG_TIMINGS = 3, 2
"""Steps that are timed at the start for each size, and for those of more than so many tokens:"""
_LONG_TIMING = 2048


class CudaBackend:
    """Steps are enqueued on the current stream of the calling thread."""

    loads_beside = True

    def __init__(
        self,
        config: EngineConfig,
        device_index: int,
        group: Group = ALONE,
        chain: Chain = ONE_STAGE,
        media_links: MediaLinks | None = None,
    ) -> None:
        """`group` and `chain`: as in `Worker`. All members of the group make the same calls in the same order from here
        on: whatever enqueues steps, what is measured must not decide what is enqueued next."""
        keep_compiled_kernels()
        self.device = torch.device("cuda", device_index)
        # Before anything is allocated: threads and libraries take the first GPU if they are not told of another.
        torch.cuda.set_device(self.device)
        self.attention = attention_backend(
            config.device.attention_backend, self.device, TORCH_DTYPES[config.model.dtype]
        )
        torch.set_num_threads(1)
        self._config, self._media_links = config, media_links or MediaLinks()
        self._at_start = DeviceMemory.of(self.device)
        self._prefill_costs: tuple[tuple[int, float], ...] = ()
        self._silence: Callable[[], AbstractContextManager[None]] = nullcontext
        """In which nothing is said to other workers."""
        if config.cache.num_gpu_blocks_override is None and config.cache.kv_cache_memory_bytes is None:
            memory.check_free_share(self._at_start, config.cache)
        self.chain = chain if chain.size == 1 else nccl_chain.connect(chain, self.device)
        self.group = self._connect(group)

    @property
    def prefill_costs(self) -> tuple[tuple[int, float], ...]:
        return self._prefill_costs

    def make_tables(self, shape: SlotShape) -> SlotTables:
        return SlotTables(shape, self.device, shared=False)

    def attach(self, model: DenseDecoder, tables: SlotTables, groups: Sequence[KVGroup]) -> None:
        self._model, self._tables, self._groups = model, tables, groups
        config = self._config
        max_tokens = config.scheduler.max_num_batched_tokens
        self._ladder = Ladder(config.scheduler.max_num_seqs, max_tokens)
        self._graphs = GraphStore(self.device)
        self._inputs = CudaInputs(tables, config.cache.block_size, self._ladder.num_rows, max_tokens)
        ladder = None if config.device.enforce_eager else self._ladder
        self._steps = steps_of(model, self._inputs, self._graphs, ladder, self.chain.size)
        self._steps.media = media_of(
            model, config, tables, EncoderShare.of(self.group, config.model), self._media_links
        )
        media = config.model.media
        self._media = MediaRehearsal(config, media, len(groups), self.group.rank) if media is not None else None
        self._runner: Runner = self._steps.runner()
        self._plans = RehearsalPlans(
            config.scheduler.max_num_seqs,
            max_tokens,
            config.model.max_model_len,
            len(groups),
            config.cache.block_size,
        )

    def kv_bytes(self, block_bytes: int) -> int:
        use = self._profile()
        stated = memory.explicit_bytes(self._config.cache, block_bytes)
        if stated is not None:
            return stated
        return memory.cuda_kv_bytes(self._at_start, use, self._config.cache, block_bytes)

    def start(self, kv_caches: KVCaches) -> Runner:
        self._steps.kv_caches = kv_caches
        self._inputs.ring.clear()
        started = time.monotonic()
        calls = self._steps.graph_calls()
        for shape, call in log_progress_bar(logger, calls, desc="capturing CUDA graphs"):
            self._graphs.capture(shape, call)
        if calls:
            torch.cuda.synchronize(self.device)
            logger.info("captured %d CUDA graphs: %.2f s", len(calls), time.monotonic() - started)
        # What was rehearsed until now is each stage's own affair.
        self._steps.connect(self.chain)
        return self._runner if self.group.size == 1 else RunnerTogether(self._runner, self._inputs.ring)

    def _connect(self, group: Group) -> Group:
        """The same workers, on their GPUs."""
        if group.size == 1:
            return group
        started = time.monotonic()
        use_peer_memory = not self._config.parallel.disable_custom_all_reduce
        connected = nccl_group.connect(group, self.device, use_peer_memory=use_peer_memory)
        self._silence = connected.silence
        logger.info("connected %d GPUs: %.2f s", group.size, time.monotonic() - started)
        return connected

    def _profile(self) -> MeasuredUse:
        """Over a cache of one block: let every kernel run once, run the largest step there can be and see what it
        takes, time prompts of several lengths, and see what graphs take."""
        dtype = TORCH_DTYPES[self._config.model.dtype]
        self._steps.kv_caches = memory.allocate_kv_caches(
            self._groups, 1, self._config.cache.block_size, dtype, self.device
        )
        self._rehearse()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        allocated = torch.cuda.memory_allocated(self.device)
        self._runner.execute(self._plans.largest()).wait()
        kept = self._look_at_the_largest_image()
        peak = torch.cuda.max_memory_allocated(self.device) - allocated
        graphs = self._graph_bytes()
        self._prefill_costs = self._time_prefills()
        self._graphs.clear()
        self._steps.kv_caches = []
        torch.cuda.empty_cache()
        # Kernels, libraries' work spaces and whatever else does not come from torch's allocator.
        taken = self._at_start.free - DeviceMemory.of(self.device).free
        outside = max(0, taken - torch.cuda.memory_reserved(self.device))
        return MeasuredUse(weights=allocated + outside, peak=peak, graphs=graphs, images=kept)

    def _look_at_the_largest_image(self) -> int:
        """Run the step with an image that takes the most memory. Returns the bytes of encoder outputs that later steps
        keep; 0 if nobody wants to know."""
        if self._media is None or self._steps.media is None or self._config.cache.skip_mm_profiling:
            return 0
        plan = self._media.largest()
        result = self._runner.execute(plan).wait()
        self._steps.media.forget()
        if result.lost_entries:
            raise StartupError(
                f"the encoder runs out of device memory on the largest image, of {plan.starts[0].media[0].num_tokens} "
                "tokens; lower --max-num-encoder-input-tokens, or pass --skip-mm-profiling and send smaller images"
            )
        return self._steps.media.max_bytes

    def _rehearse(self) -> None:
        """Run every kernel that steps of any kind will need, on few layers and no requests: so they are compiled and
        loaded, and libraries have their work space on the streams that run and capture."""
        self._inputs.ring.clear()
        ops.prepare_linears(self._model.linear_shapes(), self._model.dtype, self.device)
        rehearsal = CudaRehearsal(self._steps, self._ladder, self._plans, self._media)
        self._compile(rehearsal.to_compile())
        self._inputs.ring.clear()
        self._graphs.rehearse(rehearsal.to_run())
        self._inputs.ring.clear()
        rehearsal.run_unusual()

    @torch.inference_mode()
    def _compile(self, calls: Sequence[Callable[[], object]]) -> None:
        started = time.monotonic()
        try:
            with self._silence():
                num_kernels = compile_ahead(calls, self.device)
        except CompileError as error:
            raise StartupError(
                f"a kernel cannot be prepared for {torch.cuda.get_device_name(self.device)}: {error}"
            ) from error
        logger.info("prepared %d kernels: %.2f s", num_kernels, time.monotonic() - started)

    def _time_prefills(self) -> tuple[tuple[int, float], ...]:
        """As `KVCapacity.prefill_costs`: with graphs where steps of that size have them, and of each size the quickest
        of several steps, since one may wait for the host, which loads weights meanwhile. Largest first, so that the
        device is busy while the others are launched."""
        plans = self._plans.prefills()
        calls = dict(self._steps.graph_calls())
        for shape in filter(None, map(self._ladder.padded, plans)):
            if shape in calls:
                self._graphs.capture(shape, calls[shape])
        pending = [
            (plan.num_tokens, self._runner.execute(plan))
            for turn in range(max(_NUM_TIMINGS, _NUM_LONG_TIMINGS))
            for plan in plans
            if turn < (_NUM_TIMINGS if plan.num_tokens <= _LONG_TIMING else _NUM_LONG_TIMINGS)
        ]
        costs = dict.fromkeys(sorted(plan.num_tokens for plan in plans), math.inf)
        for num_tokens, result in pending:
            costs[num_tokens] = min(costs[num_tokens], result.wait().elapsed_s)
        return tuple(costs.items())

    def _graph_bytes(self) -> int:
        """Device memory that all graphs will take: their common pool, measured by capturing the largest of each kind,
        and what each graph needs beside it."""
        calls = self._steps.graph_calls()
        if not calls:
            return 0
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        before = DeviceMemory.of(self.device).free
        self._inputs.ring.clear()
        largest = self._steps.largest_graph_calls()
        for shape, call in largest:
            self._graphs.capture(shape, call)
        taken = before - DeviceMemory.of(self.device).free
        return taken + (len(calls) - len(largest)) * memory.GRAPH_BYTES

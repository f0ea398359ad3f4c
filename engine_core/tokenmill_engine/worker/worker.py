"""The worker: owns a device with the model, the KV caches and the slots on it, and runs step plans there."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.config.stages import Stage, share_layers
from tokenmill_engine.distributed.chain import ONE_STAGE, Chain
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.errors import StartupError
from tokenmill_engine.ipc.shared_objects import NOTHING_SHARED, SharedObjects
from tokenmill_engine.kv_cache.spec import group_layers
from tokenmill_engine.models.bert import BertEncoder
from tokenmill_engine.models.dense_decoder import TORCH_DTYPES
from tokenmill_engine.models.loader import WeightLoading, build_model
from tokenmill_engine.outputs import KVCapacity, MissingImages, StepPlan
from tokenmill_engine.worker import memory
from tokenmill_engine.worker.backend import Backend
from tokenmill_engine.worker.cpu import CpuBackend
from tokenmill_engine.worker.media_links import MediaLinks
from tokenmill_engine.worker.runner import LaunchedStep, PendingStep, Runner
from tokenmill_engine.worker.slots import SlotShape
from tokenmill_engine.worker.text_encoder import TextEncoderRunner, claim_device

logger = logging.getLogger(__name__)

_SPARE_TOKENS = 16
"""Columns of the token table past the longest request: steps in flight may append a few tokens after its end."""


class Worker:
    """One device. `initialize` once, then `execute` plans in order, from one thread at a time."""

    def __init__(
        self,
        config: EngineConfig,
        device_index: int = 0,
        group: Group = ALONE,
        chain: Chain = ONE_STAGE,
        shared: SharedObjects = NOTHING_SHARED,
    ) -> None:
        """`group`: the workers that this one computes each layer with; `chain`: those that have the other stages of the
        model. They stay the caller's to close. `shared`: where API servers may have put media."""
        self._config = config
        self._device_index = device_index
        self._group = group
        self._chain = chain
        self._phases: dict[str, float] = {}
        self._runner: Runner | None = None
        self._media_links = MediaLinks(shared)

    def initialize(self) -> KVCapacity:
        """Load the model, size and allocate the KV cache, warm up.

        Raises:
            ConfigError: the checkpoint does not fit the configuration.
            StartupError: the machine cannot give what the configuration asks for.
        """
        config = self._config
        if config.model.architecture.text_encoder is not None:
            return self._initialize_text_encoder(config)
        with self._phase("device"):
            backend = self._open_backend()
            self._device, self._chain = backend.device, backend.chain
        with self._phase("model"):
            model = build_model(config.model, backend.device, backend.attention, backend.group, self._stage())
            groups = group_layers(model.kv_specs)
            tables = backend.make_tables(self._slot_shape(len(groups)))
        with WeightLoading(model, config.model) as loading:
            if not backend.loads_beside:
                self._finish_loading(loading)
            with self._phase("profile"):
                backend.attach(model, tables, groups)
                # All groups take their blocks from one pool.
                block_bytes = max(group.block_bytes(config.cache.block_size) for group in groups)
                # One plan is for all workers: each has the same blocks, of its own heads.
                num_blocks = self._agree(memory.blocks_in(backend.kv_bytes(block_bytes), block_bytes))
                max_model_len = memory.fit_model_len(config.model, num_blocks, config.cache.block_size, groups)
            with self._phase("allocate"):
                dtype = TORCH_DTYPES[config.model.dtype]
                kv_caches = memory.allocate_kv_caches(
                    groups, num_blocks, config.cache.block_size, dtype, backend.device
                )
            if backend.loads_beside:
                self._finish_loading(loading)
        with self._phase("warmup"):
            self._runner = backend.start(kv_caches)
        capacity = KVCapacity(
            num_blocks=num_blocks,
            block_size=config.cache.block_size,
            max_model_len=max_model_len,
            kv_cache_bytes=num_blocks * block_bytes,
            groups=groups,
            attention_backend=backend.attention.name,
            phases=dict(self._phases),
            prefill_costs=backend.prefill_costs,
        )
        self._report(capacity)
        return capacity

    def _initialize_text_encoder(self, config: EngineConfig) -> KVCapacity:
        """Blocks are counted, so that as many texts are under way as there are slots, but none has memory."""
        if config.model.pooling is None:
            raise ValueError(f"{config.model.architecture.name} generates no text")
        with self._phase("device"):
            self._device = claim_device(config, self._device_index)
        with self._phase("model"):
            model = BertEncoder(config.model, self._device)
        with WeightLoading(model, config.model) as loading:
            self._finish_loading(loading)
        with self._phase("warmup"):
            runner = TextEncoderRunner(model, config.model.pooling.kind)
            runner.warm_up()
            self._runner = runner
        block_size, max_model_len = config.cache.block_size, config.model.max_model_len
        capacity = KVCapacity(
            num_blocks=config.scheduler.max_num_seqs * (-(-max_model_len // block_size) + 1),
            block_size=block_size,
            max_model_len=max_model_len,
            kv_cache_bytes=0,
            groups=group_layers(()),
            attention_backend="torch",
            phases=dict(self._phases),
        )
        logger.info("text encoder ready: %s, no KV cache", model.architecture.name)
        return capacity

    @property
    def runs_ahead(self) -> bool:
        """As in `StepWorker`."""
        return self._config.device.kind != "cpu"

    @property
    def received_step(self) -> int | None:
        """As in `StepWorker`."""
        return self._chain.received_tag

    def tell_missing(self, tell: Callable[[MissingImages], None]) -> None:
        """As in `StepWorker`."""
        self._media_links.tell_missing = tell

    def enter_thread(self) -> None:
        """As in `StepWorker`: a thread that has not named a GPU would take the first one."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)

    def execute(self, plan: StepPlan) -> PendingStep:
        """Enqueue one step on the device."""
        return self._ready_runner().execute(plan)

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """As in `Runner`."""
        return self._ready_runner().launch(plan)

    def close(self) -> None:
        """Let go of the device's memory."""
        self._runner = None

    def _ready_runner(self) -> Runner:
        if self._runner is None:
            raise RuntimeError("the worker is not initialized")
        return self._runner

    def _agree(self, num_blocks: int) -> int:
        """What all workers have: the least of each stage, and then of all stages."""
        for workers in (self._group, self._chain):
            num_blocks = num_blocks if workers.size == 1 else workers.agree_min(num_blocks)
        return num_blocks

    def _stage(self) -> Stage:
        num_layers = self._config.model.architecture.num_layers
        return share_layers(num_layers, self._chain.size, self._config.parallel.pipeline_layers)[self._chain.rank]

    def _open_backend(self) -> Backend:
        if self._config.device.kind == "cpu":
            return CpuBackend(self._config, self._group, self._chain, self._media_links)
        # Importing it imports Triton, which only GPUs need.
        from tokenmill_engine.worker.cuda import CudaBackend

        return CudaBackend(self._config, self._device_index, self._group, self._chain, self._media_links)

    def _finish_loading(self, loading: WeightLoading) -> None:
        with self._phase("load"):
            loading.finish(allow_fused=not self._config.device.enforce_eager)

    def _slot_shape(self, num_groups: int) -> SlotShape:
        config, media = self._config, self._config.model.media
        max_len = config.model.max_model_len + _SPARE_TOKENS
        return SlotShape(
            num_slots=config.scheduler.max_num_seqs,
            max_len=max_len,
            max_blocks=-(-max_len // config.cache.block_size),
            num_groups=num_groups,
            vocab_size=config.model.architecture.vocab_size,
            has_position_deltas=media is not None and media.mrope_section is not None,
        )

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise StartupError(
                f"out of device memory in the start phase {name!r}: {str(error).splitlines()[0]} Use a smaller model, "
                "or lower --gpu-memory-utilization, --max-num-batched-tokens or --max-num-seqs"
            ) from error
        self._phases[name] = time.monotonic() - started

    def _report(self, capacity: KVCapacity) -> None:
        num_tokens = capacity.num_blocks // len(capacity.groups) * capacity.block_size
        logger.info("attention backend: %s", capacity.attention_backend)
        logger.info(
            "KV cache: %d tokens in %d blocks (%s%s); maximum concurrency for %d tokens per request: %.2fx",
            num_tokens,
            capacity.num_blocks,
            memory.gib(capacity.kv_cache_bytes),
            " per worker" if self._group.size * self._chain.size > 1 else "",
            capacity.max_model_len,
            num_tokens / capacity.max_model_len,
        )
        phases = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self._phases.items())
        logger.info("worker ready: %s", phases)

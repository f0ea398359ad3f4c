"""The CPU as a worker's device."""

from collections.abc import Sequence

import torch

from tokenmill_engine.attention.batch import ForwardBatch
from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.kv_cache.spec import KVGroup
from tokenmill_engine.models.dense_decoder import TORCH_DTYPES, DenseDecoder, KVCaches
from tokenmill_engine.worker import memory
from tokenmill_engine.worker.inputs import CpuPreparer
from tokenmill_engine.worker.model_runner import ModelRunner
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan
from tokenmill_engine.worker.slots import SlotTables
from tokenmill_kernels.cpu import library

_WARM_UP_PROMPT = 32


class CpuBackend:
    """Runs steps where they are called."""

    def __init__(self, config: EngineConfig) -> None:
        self.device = torch.device("cpu")
        self._config = config
        dtype = TORCH_DTYPES[config.model.dtype]
        self._native = library.load() is not None and dtype in library.DTYPE_CODES
        if self._native:
            library.set_num_threads(config.device.num_threads)
        # Beside the library's threads torch's own would only get in the way: they spin while they wait for work.
        torch.set_num_threads(1 if self._native else config.device.num_threads)

    @property
    def attention_backend(self) -> str:
        return "native" if self._native else "torch"

    def attach(self, model: DenseDecoder, tables: SlotTables, groups: Sequence[KVGroup]) -> None:
        self._model, self._tables, self._num_groups = model, tables, len(groups)

    def kv_bytes(self, block_bytes: int) -> int:
        return memory.cpu_kv_bytes(self._config, block_bytes)

    def start(self, kv_caches: KVCaches) -> ModelRunner:
        model, block_size = self._model, self._config.cache.block_size
        preparer = CpuPreparer(self._tables, block_size)

        def forward(batch: ForwardBatch, output_rows: torch.Tensor | None) -> torch.Tensor:
            return model.forward(batch, kv_caches, output_rows)

        runner = ModelRunner(model, forward, self._tables, preparer)
        longest = min(_WARM_UP_PROMPT, self._config.model.max_model_len, self._config.scheduler.max_num_batched_tokens)
        for tokens_each in (longest, 1):
            runner.execute(rehearsal_plan(1, tokens_each, self._num_groups, block_size, GREEDY)).wait()
        return runner

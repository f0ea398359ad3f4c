"""An engine core over the fake executor, without sockets or processes."""

import dataclasses
from collections import defaultdict

import numpy as np

from tests.support.fake_executor import EOS, VOCAB_SIZE, FakeExecutor
from tokenmill_engine.config.architecture import ArchitectureConfig, RopeConfig
from tokenmill_engine.config.engine import CacheConfig, EngineConfig, ModelConfig, ObservabilityConfig, SchedulerConfig
from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.engine import EngineCore
from tokenmill_engine.ipc.ids import make_request_id
from tokenmill_engine.kv_cache.spec import KVSpec, group_layers
from tokenmill_engine.messages import (
    AddRequest,
    BlockEvents,
    EngineLoad,
    Finish,
    LoadReport,
    MediaItem,
    MediaMissing,
    SamplingParams,
    StepOutput,
)
from tokenmill_engine.outputs import KVCapacity
from tokenmill_engine.reports import Output

_SPEC = KVSpec("full", 1, 8, "float32")


def engine_config(
    max_model_len: int, scheduler: SchedulerConfig, num_engines: int = 1, caching: bool = True
) -> EngineConfig:
    architecture = ArchitectureConfig(
        name="LlamaForCausalLM",
        vocab_size=VOCAB_SIZE,
        hidden_size=8,
        intermediate_size=8,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        rms_norm_eps=1e-5,
        max_position_embeddings=max_model_len,
        rope=RopeConfig(),
        layer_windows=(None,),
        tie_word_embeddings=True,
    )
    model = ModelConfig(
        name="fake",
        path="",
        tokenizer_path="",
        architecture=architecture,
        load_format="dummy",
        dtype="float32",
        seed=0,
        max_model_len=max_model_len,
        max_model_len_explicit=False,
        eos_token_ids=(EOS,),
    )
    return EngineConfig(
        model,
        CacheConfig(enable_prefix_caching=caching),
        scheduler,
        observability=ObservabilityConfig("fake"),
        data_parallel_size=num_engines,
    )


class Bench:
    """An engine core, and what its clients were told."""

    def __init__(
        self,
        num_blocks: int = 64,
        depth: int = 2,
        max_num_seqs: int = 8,
        num_engines: int = 1,
        caching: bool = True,
        began: float | None = None,
        media: MediaConfig | None = None,
        media_store_bytes: int = 0,
    ) -> None:
        self.executor = FakeExecutor(num_blocks, 4)
        capacity = KVCapacity(num_blocks, 4, min(200, num_blocks * 4), 0, group_layers([_SPEC]), "fake", {})
        scheduler = SchedulerConfig(max_num_seqs, 64, explicit_budget=True, async_scheduling=depth > 1)
        config = engine_config(200, scheduler, num_engines, caching)
        model = dataclasses.replace(config.model, media=media)
        config = dataclasses.replace(config, model=model, media_store_bytes=media_store_bytes)
        self.core = EngineCore(config, self.executor, capacity, engine=3, began=began)
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finishes: dict[int, list[Finish]] = defaultdict(list)
        self.cached: dict[int, int] = {}
        self.reports: dict[int, list[EngineLoad]] = defaultdict(list)
        self.load: dict[int, EngineLoad] = {}
        self.block_events: list[tuple[int, BlockEvents]] = []
        self.missing: list[tuple[int, list[int]]] = []
        """Requests that an API server is to send again."""
        self._counter = 0

    def add(
        self,
        client: int,
        prompt: list[int],
        sampling: SamplingParams,
        request_id: int | None = None,
        media: tuple[MediaItem, ...] = (),
    ) -> int:
        self._counter += 1
        request_id = make_request_id(client, 0, self._counter) if request_id is None else request_id
        packed = np.array(prompt, dtype="<i4").tobytes()
        self.core.handle(AddRequest(request_id, "label", packed, sampling, float(self._counter), media=media))
        return request_id

    def step(self) -> list[Output]:
        outputs = self.core.step()
        self.core.scheduler.check_invariants()
        self.core.media.check_invariants()
        for client, message in outputs:
            assert message.engine == 3
            if isinstance(message, BlockEvents):
                self.block_events.append((client, message))
                continue
            if isinstance(message, MediaMissing):
                self.missing.append((client, message.request_ids))
                continue
            self.load[client] = message.load
            if isinstance(message, LoadReport):
                self.reports[client].append(message.load)
            elif isinstance(message, StepOutput):
                self._take(client, message)
        return outputs

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def _take(self, client: int, message: StepOutput) -> None:
        request_ids = np.frombuffer(message.request_ids, "<i8").tolist()
        tokens = np.frombuffer(message.token_ids, "<i4").tolist()
        assert request_ids
        for request_id, count in zip(request_ids, np.frombuffer(message.num_tokens, "<i4").tolist(), strict=True):
            assert request_id >> 48 == client
            self.tokens[request_id].extend(tokens[:count])
            tokens = tokens[count:]
        for finish in message.finishes:
            self.finishes[request_ids[finish.index]].append(finish)
        for index, num_cached in message.cached_tokens:
            assert request_ids[index] not in self.cached
            self.cached[request_ids[index]] = num_cached

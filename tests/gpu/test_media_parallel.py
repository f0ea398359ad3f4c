"""Images on two GPUs: the answers of transformers whether the encoder is in parts or whole on each of them, with
stages, with NCCL alone; rows of the encoder near those of one GPU; failures."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine_core.engine.test_images import subject_of
from tests.support.encoder_member import EncoderMembers, Encoding
from tests.support.image_engine import ImageEngine
from tests.support.model_loading import model_config
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tokenmill_engine.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from tokenmill_engine.config.media import EncoderMode
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.executor import worker_pool
from tokenmill_engine.executor.multiproc import MultiprocExecutor
from tokenmill_engine.executor.worker_pool import WorkerPool

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.timeout(300),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

FAMILIES: tuple[MediaFamily, ...] = ("llava", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
MODES: tuple[EncoderMode, ...] = ("weights", "data")
ANSWERING: tuple[tuple[MediaFamily, EncoderMode], ...] = (
    ("llava", "weights"),
    ("llava_onevision", "data"),
    ("qwen2_5_vl", "weights"),
    ("qwen3_vl", "data"),
)
"""Workers take long to start, so each family starts them once; rows are compared for all families and modes."""
BLOCK_SIZE, NUM_BLOCKS, BUDGET = 16, 200, 24
CUDA = torch.device("cuda", 0)
GRIDS = ((1, 4, 6), (1, 10, 2), (1, 20, 34), (1, 2, 2))


def config_of(family: MediaFamily, parallel: ParallelConfig, mode: EncoderMode, eager: bool = False) -> EngineConfig:
    """Prompts and images are computed in chunks, beside streams."""
    return EngineConfig(
        model=model_config(cached_tiny_media_model(family), encoder_mode=mode),
        cache=CacheConfig(BLOCK_SIZE, num_gpu_blocks_override=NUM_BLOCKS),
        scheduler=SchedulerConfig(max_num_seqs=4, explicit_budget=True, max_num_batched_tokens=BUDGET),
        device=DeviceConfig(kind="cuda", enforce_eager=eager),
        parallel=parallel,
    )


@contextlib.contextmanager
def workers(folder: Path, config: EngineConfig) -> Iterator[ImageEngine]:
    pool = WorkerPool(config.parallel.world_size, may_use_gpus=True)
    executor = MultiprocExecutor(config, pool, 0, str(folder / "store"), lambda error: None)
    try:
        yield ImageEngine(config, executor, executor.initialize())
    finally:
        executor.shutdown()


def check_answers(family: MediaFamily, config: EngineConfig, folder: Path) -> None:
    """Those of transformers in float32; the second time from the prefix cache."""
    subject = subject_of(family)
    with workers(folder, config) as engine:
        for _ in range(2):
            assert engine.ask(subject.prompts) == [list(answer) for answer in subject.answers]
        assert any(engine.cached.values())
        assert engine.errors == {}


@pytest.mark.parametrize(("family", "mode"), ANSWERING)
def test_answers_of_two_gpus(family: MediaFamily, mode: EncoderMode, tmp_path: Path) -> None:
    check_answers(family, config_of(family, ParallelConfig(2, executor="mp"), mode), tmp_path)


def test_answers_without_graphs_and_peer_memory(tmp_path: Path) -> None:
    parallel = ParallelConfig(2, executor="mp", disable_custom_all_reduce=True)
    check_answers("qwen2_5_vl", config_of("qwen2_5_vl", parallel, "weights", eager=True), tmp_path)


def test_answers_in_two_stages(tmp_path: Path) -> None:
    """Of a model whose first layers get something of the images too."""
    check_answers("qwen3_vl", config_of("qwen3_vl", ParallelConfig(1, 2, executor="mp"), "weights"), tmp_path)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four GPUs")
@pytest.mark.parametrize("mode", MODES)
def test_answers_in_two_stages_of_two(mode: EncoderMode, tmp_path: Path) -> None:
    check_answers("qwen2_5_vl", config_of("qwen2_5_vl", ParallelConfig(2, 2, executor="mp"), mode), tmp_path)


@pytest.fixture(scope="module")
def members() -> Iterator[EncoderMembers]:
    with EncoderMembers(2) as members:
        yield members


@pytest.mark.parametrize(("mode", "use_peer_memory"), [("weights", True), ("weights", False), ("data", True)])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_those_of_one_gpu(
    family: MediaFamily, mode: EncoderMode, use_peer_memory: bool, members: EncoderMembers
) -> None:
    """In float32 nearly, the same on both to the last bit."""
    encoding = Encoding(cached_tiny_media_model(family), GRIDS, mode=mode, use_peer_memory=use_peer_memory)
    expected, (first, second) = encoding.rows(CUDA), members.rows(encoding)
    for ours, other, wanted in zip(first, second, expected, strict=True):
        assert torch.equal(ours, other)
        torch.testing.assert_close(ours, wanted, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("mode", MODES)
def test_rows_in_bfloat16_are_about_as_near_to_float32_as_those_of_one_gpu(
    mode: EncoderMode, members: EncoderMembers
) -> None:
    exact = Encoding(cached_tiny_media_model("qwen2_5_vl"), GRIDS)
    rounded = dataclasses.replace(exact, dtype="bfloat16", mode=mode)
    expected = exact.rows(CUDA)

    def distance(rows: list[torch.Tensor]) -> float:
        pairs = zip(rows, expected, strict=True)
        return float(torch.cat([(ours - wanted).abs().flatten() for ours, wanted in pairs]).mean())

    ours, alone = distance(members.rows(rounded)[-1]), distance(rounded.rows(CUDA))
    assert ours < 1.75 * alone + 1e-4, f"two GPUs: {ours:.5f}, one: {alone:.5f}"


@pytest.fixture
def fault(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Gives the next workers a fault."""

    def prepare(text: str) -> None:
        monkeypatch.setattr(worker_pool, "_MODULE", "tests.support.faulty_worker")
        monkeypatch.setenv("WORKER_FAULT", text)
        monkeypatch.setenv("WORKER_NOTES", str(tmp_path / "notes"))

    return prepare


@pytest.mark.parametrize("use_peer_memory", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_an_encoder_that_fails_on_one_gpu_fails_its_request_alone(
    mode: EncoderMode, use_peer_memory: bool, fault: Callable[[str], Any], tmp_path: Path
) -> None:
    """In parts the other one waits for it inside of a kernel, until it has made up for what it left. Whole it has one
    image of two: of several the second attempt, one by one, would succeed."""
    fault("1 encode starve")
    subject = subject_of("qwen2_5_vl")
    parallel = ParallelConfig(2, executor="mp", disable_custom_all_reduce=not use_peer_memory)
    with workers(tmp_path, config_of("qwen2_5_vl", parallel, mode)) as engine:
        request = engine.add(subject.prompts[3 if mode == "data" else 0])
        engine.run()
        assert engine.errors == {request: "an image of this request could not be encoded"}
        assert engine.ask(subject.prompts) == [list(answer) for answer in subject.answers]

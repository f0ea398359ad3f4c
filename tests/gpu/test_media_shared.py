"""Images whose bytes a worker on a GPU finds in shared memory."""

import pytest

from tests.engine_core.executor.test_shared_media import add, prompts
from tests.support.image_engine import ImageEngine
from tests.support.model_loading import model_config
from tests.support.shared_media import segment
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tokenmill_engine.config.engine import CacheConfig, DeviceConfig, EngineConfig, SchedulerConfig
from tokenmill_engine.executor.uniproc import UniprocExecutor
from tokenmill_engine.ipc.object_store import ObjectStore
from tokenmill_engine.ipc.shared_objects import SharedObjects

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llava", "qwen2_vl"])
def test_answers_are_those_of_images_that_come_along(family: MediaFamily) -> None:
    config = EngineConfig(
        model=model_config(cached_tiny_media_model(family), dtype="float32"),
        cache=CacheConfig(16, num_gpu_blocks_override=200, enable_prefix_caching=False),
        scheduler=SchedulerConfig(max_num_seqs=8, explicit_budget=True, max_num_batched_tokens=256),
        device=DeviceConfig(kind="cuda", enforce_eager=True),
    )
    answers = []
    with segment(64) as memory:
        store = ObjectStore(memory, 0, 1 << 30)
        for is_shared in (True, False):
            executor = UniprocExecutor(config, shared=SharedObjects((memory,)))
            engine = ImageEngine(config, executor, executor.initialize())
            asked = prompts(engine)
            ids = [add(engine, store, each)[0] if is_shared else engine.add(each) for each in asked]
            engine.run()
            assert engine.errors == {}
            answers.append([engine.tokens[each] for each in ids])
            engine.core.shutdown()
    assert answers[0] == answers[1]
    assert store.num_objects == 2

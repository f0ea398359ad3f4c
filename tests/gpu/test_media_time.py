"""How long a step encodes, told by the device."""

from dataclasses import replace

import pytest
import torch

from tests.engine_core.engine.test_images import subject_of
from tests.engine_core.worker.conftest import BLOCK_SIZE, tiny_engine_config
from tests.gpu.test_media import make_engine
from tests.support.local_stages import LocalStages
from tests.support.tiny_media_models import cached_tiny_media_model
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.worker.encoder_time import EncoderTime
from tokenmill_engine.worker.media_rehearsal import MediaRehearsal
from tokenmill_engine.worker.rehearsal import GREEDY, rehearsal_plan

pytestmark = pytest.mark.gpu


def test_work_between_the_events_counts() -> None:
    device = torch.device("cuda", 0)
    matrix = torch.ones(4096, 4096, device=device)
    for _ in range(2):  # the first product loads the library
        duration = EncoderTime(device)
        for _ in range(20):
            matrix = matrix @ matrix * 1e-4
        duration.end()
        empty = EncoderTime(device)
        empty.end()
        torch.cuda.synchronize()
    assert duration.seconds() > 10 * empty.seconds() >= 0.0


def test_results_of_steps_that_encode_tell_it() -> None:
    subject = subject_of("qwen2_5_vl")
    engine, watched = make_engine("qwen2_5_vl")
    budget = engine.core.scheduler._encoder
    assert budget.costs.seconds(1) == 0.0
    engine.ask([subject.prompts[0]])
    assert any(plan.media is not None for plan in watched.plans)
    assert 0.0 < budget.costs.seconds(1) < 1.0


@pytest.mark.parametrize("with_graphs", [False, True])
def test_the_last_stage_tells_how_long_the_first_one_encoded(with_graphs: bool) -> None:
    config = tiny_engine_config(folder=cached_tiny_media_model("qwen2_vl", text_config={"num_hidden_layers": 3}))
    config = replace(config, parallel=ParallelConfig(pipeline_parallel_size=3))
    assert config.model.media is not None
    stages = LocalStages(config, torch.device("cuda", 0), with_graphs=with_graphs)
    text = rehearsal_plan(1, 5, 1, BLOCK_SIZE, GREEDY)
    with_image = MediaRehearsal(config, config.model.media, 1).step()
    results = [stages.submit(plan).result() for plan in (with_image, text, with_image, text)]
    assert [result.encoder_s > 0.0 for result in results] == [True, False, True, False]
    assert all(result.encoder_s < result.elapsed_s < 10.0 for result in results)

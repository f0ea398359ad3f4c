"""How long a step encodes, told by the device."""

import pytest
import torch

from tests.engine_core.engine.test_images import subject_of
from tests.gpu.test_media import make_engine
from tokenmill_engine.worker.encoder_time import EncoderTime

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

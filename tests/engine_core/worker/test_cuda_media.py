"""Steps with images as a GPU runs them, with their kernels interpreted and the model on the CPU: the answers of
transformers, whatever runs beside them."""

import contextlib
from collections.abc import Sequence

import pytest
import torch

from tests.engine_core.engine.test_images import Subject, subject_of
from tests.support.image_engine import ImageEngine, image_config
from tests.support.local_stages import LocalStages
from tests.support.model_loading import CPU
from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.models.vision.encoder import ImageInput
from tokenmill_engine.outputs import SlotStart, StepHandle, StepPlan
from tokenmill_engine.worker.cuda_media import CudaMedia, MediaParts
from tokenmill_engine.worker.inputs import StepRows
from tokenmill_engine.worker.shapes import StepShape

pytestmark = pytest.mark.slow

FAMILIES: tuple[MediaFamily, ...] = ("llava", "llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
NUM_OUTPUT = 8


class Interpreted:
    """An engine over interpreted kernels, and what it was asked to do."""

    def __init__(
        self, subject: Subject, budget: int, *, with_graphs: bool = True, num_blocks: int = 200, num_stages: int = 1
    ) -> None:
        scheduler = SchedulerConfig(explicit_budget=True, max_num_batched_tokens=budget, encoder_cache_tokens=40)
        parallel = ParallelConfig(pipeline_parallel_size=num_stages)
        folder = cached_tiny_media_model(subject.family)
        config = image_config(folder, scheduler, num_blocks=num_blocks, parallel=parallel)
        self.stages = LocalStages(config, CPU, with_graphs=with_graphs)
        self.engine = ImageEngine(config, self.stages, self.stages.capacity)
        self.plans: list[StepPlan] = []
        self.used: list[bool] = []
        """Whether each plan was a graph's."""
        self._graphs, self._submit = self.stages.graphs[-1], self.stages.submit
        self.stages.submit = self._watched  # type: ignore[method-assign]

    def _watched(self, plan: StepPlan) -> StepHandle:
        self._graphs.used.clear()
        handle = self._submit(plan)
        self.plans.append(plan)
        self.used.append(any(isinstance(key, StepShape) for key in self._graphs.used))
        return handle


@pytest.fixture(params=FAMILIES)
def subject(request: pytest.FixtureRequest) -> Subject:
    return subject_of(request.param)


@pytest.mark.parametrize(("budget", "with_graphs"), [(64, True), (11, True), (64, False)])
def test_answers_are_those_of_transformers(subject: Subject, budget: int, with_graphs: bool) -> None:
    interpreted = Interpreted(subject, budget, with_graphs=with_graphs)
    for _ in range(2):  # The second time from the prefix cache.
        assert [tuple(answer) for answer in interpreted.engine.ask(subject.prompts)] == list(subject.answers)
    assert any(interpreted.engine.cached.values())
    assert any(interpreted.used) == with_graphs


def test_only_steps_that_look_at_images_have_no_graph(subject: Subject) -> None:
    interpreted = Interpreted(subject, 64)
    engine = interpreted.engine
    text = engine.add(subject.prompts[2], 12)
    image = engine.add(subject.prompts[3])
    engine.run()
    assert tuple(engine.tokens[text])[:NUM_OUTPUT] == subject.answers[2]
    assert tuple(engine.tokens[image]) == subject.answers[3]
    assert [plan.media is None for plan in interpreted.plans] == interpreted.used
    assert 0 < sum(interpreted.used) < len(interpreted.used)


def test_a_slot_forgets_the_images_of_the_request_before(subject: Subject) -> None:
    interpreted = Interpreted(subject, 64)
    for index in (1, 2, 0, 2, 4):
        assert interpreted.engine.ask([subject.prompts[index]]) == [list(subject.answers[index])]


def test_preempted_requests_are_answered_the_same(subject: Subject) -> None:
    interpreted = Interpreted(subject, 32, num_blocks=17 if subject.media.views is not None else 12)
    order = (0, 5, 2, 0, 5, 2)
    expected = [list(subject.answers[index]) for index in order]
    assert interpreted.engine.ask([subject.prompts[index] for index in order]) == expected
    assert interpreted.engine.core.scheduler.counters.num_preemptions > 0


def test_an_image_that_cannot_be_encoded_fails_its_request_alone(subject: Subject) -> None:
    interpreted = Interpreted(subject, 64)
    engine, media = interpreted.engine, interpreted.stages.steps[0].media
    assert media is not None
    assert media.outputs is not None
    encoder = media.outputs._model.encoder
    assert encoder is not None
    encode, failures = encoder.encode, [RuntimeError("out of memory")]

    def fails_once(images: Sequence[ImageInput]) -> list[torch.Tensor]:
        if failures:
            raise failures.pop()
        return encode(images)

    encoder.encode = fails_once  # type: ignore[method-assign]
    wrong, text = engine.add(subject.prompts[0]), engine.add(subject.prompts[2])
    engine.run()
    assert list(engine.errors) == [wrong]
    assert "could not be encoded" in (engine.errors[wrong] or "")
    assert tuple(engine.tokens[text]) == subject.answers[2]
    # Other workers of the stage, which miss nothing, have no graph for it either.
    assert [plan.media is None or not plan.media.rows for plan in interpreted.plans] == interpreted.used
    assert engine.ask([subject.prompts[0]]) == [list(subject.answers[0])]


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_step_that_fails_at_its_images_leaves_the_next_ones_the_blocks_of_its_requests(
    num_stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They may be under way already. With the blocks of who had the slots before they would write into others'."""
    subject = subject_of("qwen2_vl")
    interpreted = Interpreted(subject, 64, num_stages=num_stages)
    engine, steps = interpreted.engine, interpreted.stages.steps[0]
    assert engine.ask([subject.prompts[2]]) == [list(subject.answers[2])]

    prepare, started = CudaMedia.prepare, list[SlotStart]()

    def fails(media: CudaMedia, plan: StepPlan, rows: StepRows) -> MediaParts | None:
        if plan.starts:
            started.extend(plan.starts)
            raise RuntimeError("out of memory")
        return prepare(media, plan, rows)

    with monkeypatch.context() as patched:
        patched.setattr(CudaMedia, "prepare", fails)
        wrong = engine.add(subject.prompts[0])
        with contextlib.suppress(RuntimeError):
            engine.run()
    (start,) = started
    tables = steps.inputs.tables
    num_blocks = len(start.block_ids[0])
    assert start.request_id == wrong
    assert tables.block_tables[0][start.slot, :num_blocks].tolist() == start.block_ids[0]
    assert tables.tokens.token_ids[start.slot, : len(start.token_ids)].tolist() == start.token_ids.tolist()


@pytest.mark.parametrize("with_graphs", [True, False])
def test_images_go_through_stages(subject: Subject, with_graphs: bool) -> None:
    interpreted = Interpreted(subject, 32, with_graphs=with_graphs, num_stages=2)
    assert [tuple(answer) for answer in interpreted.engine.ask(subject.prompts)] == list(subject.answers)
    assert any(interpreted.used) == with_graphs

"""Generation through step plans: the same tokens however the work is cut, batched or repeated."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.engine_core.worker.conftest import BLOCK_SIZE, NUM_BLOCKS, NUM_SLOTS
from tests.support.generations import NUM_OUTPUT, SAMPLED, prompts
from tests.support.model_loading import load_on_cpu
from tests.support.paged_forward import PagedForward
from tests.support.step_driver import Generation, StepDriver
from tests.support.tiny_models import cached_tiny_model, make_tiny_model, tiny_config, tiny_weights
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.worker.worker import Worker

MakeWorker = Callable[..., Worker]


def driver(worker: Worker, *, budget: int = 512, depth: int = 1) -> StepDriver:
    return StepDriver.of_worker(
        worker, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, num_slots=NUM_SLOTS, budget=budget, depth=depth
    )


@cache
def expected(prompt: tuple[int, ...]) -> list[int]:
    """Greedy tokens by the bare model, alone and with the whole prompt at once."""
    forward = PagedForward(load_on_cpu(cached_tiny_model("llama")))
    step: Sequence[int] = prompt
    output: list[int] = []
    for _ in range(NUM_OUTPUT):
        logits = forward.step([("request", step)])["request"][-1]
        output.append(int(logits.argmax()))
        step = output[-1:]
    return output


@pytest.mark.parametrize(
    ("budget", "depth", "preempt_every"),
    [(512, 1, 0), (512, 2, 0), (7, 1, 0), (16, 2, 0), (33, 3, 0), (512, 1, 5), (20, 1, 3)],
)
def test_greedy_tokens_do_not_depend_on_how_work_is_cut(
    make_worker: MakeWorker, budget: int, depth: int, preempt_every: int
) -> None:
    generations = [Generation(prompt, NUM_OUTPUT) for prompt in prompts()]
    work = driver(make_worker(), budget=budget, depth=depth)
    work.run(generations, preempt_every=preempt_every)
    for generation in generations:
        assert generation.output == expected(tuple(generation.prompt))
    assert max(plan.num_tokens for plan in work.plans) <= budget


def test_slots_and_blocks_are_used_again_without_a_trace(make_worker: MakeWorker) -> None:
    """More requests than slots, twice over the same worker, with parameters that must not leak."""
    worker = make_worker()
    first = [Generation(p, 6, SamplingParams(temperature=1.5, seed=1, logit_bias={9: 5.0})) for p in prompts()]
    driver(worker).run(first)
    second = [Generation(prompt, NUM_OUTPUT) for prompt in prompts() * 2]
    driver(worker, depth=2).run(second)
    for generation in second:
        assert generation.output == expected(tuple(generation.prompt))
        assert not generation.logprobs


def test_a_stop_found_late_costs_nothing_but_the_token(make_worker: MakeWorker) -> None:
    generations = []
    for prompt in prompts():
        stop = expected(tuple(prompt))[7]
        generations.append(Generation(prompt, NUM_OUTPUT, stop_token_ids=(stop,)))
    driver(make_worker(), depth=3).run(generations)
    for generation in generations:
        tokens = expected(tuple(generation.prompt))
        assert generation.output == tokens[: tokens.index(generation.stop_token_ids[0]) + 1]


@pytest.mark.parametrize(("budget", "depth", "preempt_every"), [(512, 2, 0), (9, 1, 0), (24, 3, 0), (64, 1, 4)])
def test_sampled_tokens_do_not_depend_on_how_work_is_cut(
    make_worker: MakeWorker, budget: int, depth: int, preempt_every: int
) -> None:
    worker = make_worker()
    alone = [Generation(prompt, NUM_OUTPUT, params) for prompt, params in zip(prompts(), SAMPLED, strict=True)]
    for generation in alone:
        driver(worker).run([generation])
    together = [Generation(prompt, NUM_OUTPUT, params) for prompt, params in zip(prompts(), SAMPLED, strict=True)]
    driver(worker, budget=budget, depth=depth).run(together, preempt_every=preempt_every)
    assert [generation.output for generation in together] == [generation.output for generation in alone]
    for first, second in zip(alone, together, strict=True):
        for a, b in zip(first.logprobs, second.logprobs, strict=True):
            np.testing.assert_array_equal(a.token_ids, b.token_ids)
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)
    assert len({tuple(generation.output) for generation in together}) == len(together)


def test_reported_logprobs_are_those_of_the_bare_model(make_worker: MakeWorker) -> None:
    generations = [Generation(p, 5, SamplingParams(temperature=0.0, seed=0, logprobs=4)) for p in prompts()[:6]]
    driver(make_worker(), depth=2).run(generations)
    reference = PagedForward(load_on_cpu(cached_tiny_model("llama")))
    for name, generation in enumerate(generations):
        known = [*generation.prompt, *generation.output]
        logits = reference.step([(str(name), known)])[str(name)]
        scores = logits.double().log_softmax(1)[len(generation.prompt) - 1 :]
        assert len(generation.logprobs) == 5
        for position, rows in enumerate(generation.logprobs):
            assert rows.token_ids.shape == rows.logprobs.shape == (1, 5)
            top = scores[position].topk(4)
            assert rows.token_ids[0].tolist() == [generation.output[position], *top.indices.tolist()]
            np.testing.assert_allclose(rows.logprobs[0, 1:], top.values.numpy(), atol=1e-4)
            assert rows.ranks.tolist() == [1]


@pytest.mark.parametrize("budget", [512, 16, 7])
def test_prompt_logprobs_over_chunks(make_worker: MakeWorker, budget: int) -> None:
    params = [SamplingParams(temperature=0.0, seed=0, prompt_logprobs=k) for k in (0, 2, 5)]
    generations = [Generation(p, 2, params[i % 3]) for i, p in enumerate(prompts())]
    generations.append(Generation(prompts()[3], 2))
    driver(make_worker(), budget=budget).run(generations)
    assert not generations.pop().prompt_logprobs
    reference = PagedForward(load_on_cpu(cached_tiny_model("llama")))
    for name, generation in enumerate(generations):
        num_top = generation.sampling.prompt_logprobs
        assert num_top is not None
        prompt = generation.prompt
        scores = reference.step([(str(name), prompt)])[str(name)].double().log_softmax(1)
        pieces = generation.prompt_logprobs
        if len(prompt) == 1:
            assert not pieces
            continue
        ids = np.concatenate([piece.token_ids for piece in pieces])
        values = np.concatenate([piece.logprobs for piece in pieces])
        ranks = np.concatenate([piece.ranks for piece in pieces])
        assert ids.shape == values.shape == (len(prompt) - 1, 1 + num_top)
        assert ids[:, 0].tolist() == list(prompt[1:])
        for position in range(len(prompt) - 1):
            row = scores[position]
            np.testing.assert_allclose(values[position], row[ids[position]].numpy(), atol=1e-4)
            assert ids[position, 1:].tolist() == row.topk(num_top).indices.tolist()
            assert ranks[position] == int((row > row[prompt[position + 1]]).sum()) + 1


def test_logits_that_are_not_numbers_fail_their_request_alone(make_worker: MakeWorker, tmp_path: Path) -> None:
    poisoned_id = 11
    folder = make_tiny_model(tmp_path, "llama")
    weights = tiny_weights(tiny_config("llama"))
    weights["model.embed_tokens.weight"][poisoned_id] = float("nan")
    save_file(weights, folder / "model.safetensors")
    worker = make_worker(folder=folder)
    good = [prompt for prompt in prompts() if poisoned_id not in {*prompt, *expected(tuple(prompt))}]
    assert len(good) > 8
    bad = [[5, poisoned_id, 6], [poisoned_id] * 20]
    generations = [Generation(prompt, NUM_OUTPUT) for prompt in good]
    failing = [
        Generation(bad[0], NUM_OUTPUT),
        Generation(bad[1], NUM_OUTPUT, SamplingParams(temperature=1.0, seed=3, top_p=0.9, logprobs=2)),
        Generation([5] * 30 + bad[1], NUM_OUTPUT, SamplingParams(temperature=0.0, seed=3, prompt_logprobs=2)),
    ]
    driver(worker, depth=2, budget=40).run([generations[0], failing[0], *generations[1:], *failing[1:]])
    for generation in failing:
        assert generation.error is not None
        assert "probabilities" in generation.error
        assert generation.output == []
        assert generation.logprobs == []
        assert not any(np.isnan(piece.logprobs).any() for piece in generation.prompt_logprobs)
    for generation in generations:
        assert generation.output == expected(tuple(generation.prompt))


def test_a_step_without_sampling_rows_yields_nothing(make_worker: MakeWorker) -> None:
    worker = make_worker()
    work = driver(worker, budget=8)
    generation = Generation(list(range(3, 20)), 1)
    work.run([generation])
    assert [plan.samples.tolist() for plan in work.plans] == [[False], [False], [True]]
    assert generation.output == expected(tuple(generation.prompt))[:1]

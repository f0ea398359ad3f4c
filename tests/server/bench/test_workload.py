import math

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tokenmill_server.bench.workload import RandomShape, arrival_times, id_prompts, text_prompts

CORPUS = ["the quick brown fox jumps over the lazy dog, again and again: 1, 2, 3 (naïve café, 東京タワー)"] * 4


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Byte-level BPE: single ids may be halves of characters, and neighbours merge when encoded again."""
    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    built.train_from_iterator(CORPUS, trainer)
    return built


def test_text_prompts_encode_to_exactly_the_wanted_length(tokenizer: Tokenizer) -> None:
    prompts = text_prompts(RandomShape(100, 20), 20, tokenizer, seed=1)
    lengths = [len(tokenizer.encode(prompt.content).ids) for prompt in prompts]
    assert lengths == [100] * 20
    assert [prompt.num_tokens for prompt in prompts] == lengths
    assert {prompt.output_len for prompt in prompts} == {20}
    assert len({prompt.content for prompt in prompts}) == 20


def test_special_tokens_count_towards_the_length(tokenizer: Tokenizer) -> None:
    with_bos = Tokenizer.from_str(tokenizer.to_str())
    with_bos.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    prompts = text_prompts(RandomShape(50, 5), 5, with_bos, seed=1)
    assert [len(with_bos.encode(prompt.content).ids) for prompt in prompts] == [50] * 5


def test_lengths_vary_within_the_ratio(tokenizer: Tokenizer) -> None:
    prompts = text_prompts(RandomShape(40, 10, range_ratio=0.5), 200, tokenizer, seed=3)
    inputs = {prompt.num_tokens for prompt in prompts}
    outputs = {prompt.output_len for prompt in prompts}
    assert min(inputs) >= 20
    assert max(inputs) <= 60
    assert len(inputs) > 30
    assert (min(outputs), max(outputs)) == (5, 15)


def test_prompts_share_the_prefix_and_only_that() -> None:
    prompts = [prompt.content for prompt in id_prompts(RandomShape(30, 4, prefix_len=12), 10, 5000, seed=2)]
    assert all(prompt[:12] == prompts[0][:12] for prompt in prompts)
    assert len({tuple(prompt[12:]) for prompt in prompts}) == 10
    assert {len(prompt) for prompt in prompts} == {42}


def test_seed_decides_everything(tokenizer: Tokenizer) -> None:
    shape = RandomShape(30, 4, 0.3, 5)
    assert text_prompts(shape, 5, tokenizer, seed=7) == text_prompts(shape, 5, tokenizer, seed=7)
    assert text_prompts(shape, 5, tokenizer, seed=7) != text_prompts(shape, 5, tokenizer, seed=8)
    assert id_prompts(shape, 5, 999, seed=7) == id_prompts(shape, 5, 999, seed=7)


def test_ids_stay_inside_the_vocabulary() -> None:
    prompts = id_prompts(RandomShape(2000, 1), 3, vocab_size=100, seed=0)
    used = {token_id for prompt in prompts for token_id in prompt.content}
    assert used == set(range(2, 100))


def test_infinite_rate_sends_at_once() -> None:
    assert arrival_times(5, math.inf, 1.0, seed=0).tolist() == [0.0] * 5


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 100.0])
def test_arrivals_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    times = arrival_times(4000, 20.0, burstiness, seed=5)
    gaps = np.diff(times)
    assert times[-1] == pytest.approx(4000 / 20.0)
    assert (gaps >= 0).all()
    # The coefficient of variation of a gamma distribution is 1 / sqrt(shape).
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)

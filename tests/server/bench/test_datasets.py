import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tokenmill_engine.config.model_files import EMBEDDED_MODEL_NAME
from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench.datasets import (
    Custom,
    Dataset,
    PrefixRepetition,
    PromptMaker,
    Sampling,
    ShareGpt,
    TimedTrace,
    TraceLabels,
)
from tokenmill_server.bench.tokenizer import load_tokenizer

IDS = PromptMaker(None, 500, as_ids=True)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer(EMBEDDED_MODEL_NAME)


@pytest.fixture(scope="module")
def texts(tokenizer: Tokenizer) -> PromptMaker:
    return PromptMaker(tokenizer, None, as_ids=False)


def write(folder: Path, *rows: Any) -> Path:
    path = folder / "data.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    return path


def conversation(*turns: str) -> dict[str, Any]:
    return {"id": "x", "conversations": [{"from": "human", "value": turn} for turn in turns]}


def test_sharegpt(tmp_path: Path, texts: PromptMaker, tokenizer: Tokenizer) -> None:
    good = [conversation(f"Tell me of the number {index}, please.", "word " * (5 + index)) for index in range(9)]
    bad = [
        conversation("A question without an answer"),
        conversation("Short", "an answer that is long enough"),
        conversation("A question that is long enough", "no"),
        conversation("word " * 1100, "an answer that is long enough"),
        conversation("word " * 900, "word " * 1200),
        {"other": 1},
    ]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([*bad, *good]))
    prompts = ShareGpt(Sampling(path, shuffles=False)).prompts(9, texts, seed=1)
    assert [prompt.content for prompt in prompts] == [row["conversations"][0]["value"] for row in good]
    assert [prompt.num_tokens for prompt in prompts] == [
        len(tokenizer.encode(str(each.content)).ids) for each in prompts
    ]
    answers = [row["conversations"][1]["value"] for row in good]
    assert [prompt.output_len for prompt in prompts] == [len(tokenizer.encode(text).ids) for text in answers]

    shuffled = ShareGpt(Sampling(path)).prompts(20, texts, seed=1)
    assert len(shuffled) == 20
    assert shuffled[:9] == shuffled[9:18]
    assert sorted(str(each.content) for each in shuffled[:9]) == sorted(str(each.content) for each in prompts)
    assert shuffled != ShareGpt(Sampling(path)).prompts(20, texts, seed=2)
    assert shuffled == ShareGpt(Sampling(path)).prompts(20, texts, seed=1)

    fixed = ShareGpt(Sampling(path, oversamples=False), output_len=7).prompts(99, texts, seed=1)
    assert {prompt.output_len for prompt in fixed} == {7}
    assert len(fixed) == 11, "of how long an answer was nothing is left out"


def test_custom(tmp_path: Path, texts: PromptMaker, tokenizer: Tokenizer) -> None:
    path = write(tmp_path, {"prompt": "One two"}, "", {"prompt": "Three é", "output_tokens": 5})
    fixed = Custom(Sampling(path, shuffles=False)).prompts(5, texts, seed=0)
    assert [prompt.content for prompt in fixed] == ["One two", "Three é", "One two", "Three é", "One two"]
    assert {prompt.output_len for prompt in fixed} == {256}
    with pytest.raises(ConfigError, match=r"line 1 of .* has no whole number as output_tokens"):
        Custom(Sampling(path), None).prompts(2, texts, seed=0)
    path = write(tmp_path, {"prompt": "Three é", "output_tokens": 5})
    as_ids = PromptMaker(tokenizer, None, as_ids=True)
    (prompt,) = Custom(Sampling(path, oversamples=False), None).prompts(3, as_ids, seed=0)
    assert (prompt.content, prompt.output_len) == (tokenizer.encode("Three é").ids, 5)


def test_prefixes_are_repeated_evenly(texts: PromptMaker, tokenizer: Tokenizer) -> None:
    dataset = PrefixRepetition(prefix_len=40, suffix_len=10, num_prefixes=4, output_len=3)
    prompts = dataset.prompts(22, IDS, seed=3)
    assert {prompt.num_tokens for prompt in prompts} == {50}
    assert {prompt.output_len for prompt in prompts} == {3}
    prefixes = [tuple(prompt.content[:40]) for prompt in prompts]
    assert sorted(Counter(prefixes).values()) in ([4, 6, 6, 6], [5, 5, 6, 6])
    assert len({tuple(prompt.content) for prompt in prompts}) == 22
    assert prompts == dataset.prompts(22, IDS, seed=3)

    of_text = dataset.prompts(22, texts, seed=3)
    encoded = [tokenizer.encode(str(prompt.content)).ids for prompt in of_text]
    assert [len(ids) for ids in encoded] == [prompt.num_tokens for prompt in of_text]
    assert {prompt.num_tokens for prompt in of_text} == {50}
    # The last token of a prefix may merge with what follows.
    assert len({tuple(ids[:32]) for ids in encoded}) == 4

    in_order = PrefixRepetition(8, 8, 2, 1, shuffles=False).prompts(6, IDS, seed=0)
    assert [tuple(prompt.content[:8]) for prompt in in_order] == [tuple(in_order[0].content[:8])] * 3 + [
        tuple(in_order[5].content[:8])
    ] * 3
    with pytest.raises(ConfigError, match="--num-prompts 3 is less than --prefix-repetition-num-prefixes 4"):
        dataset.prompts(3, IDS, seed=0)


def row(time: Any, input_length: Any, output_length: Any = 2, hash_ids: Any = ()) -> dict[str, Any]:
    hash_ids = list(hash_ids) if isinstance(hash_ids, tuple) else hash_ids
    return {"timestamp": time, "input_length": input_length, "output_length": output_length, "hash_ids": hash_ids}


def test_a_trace_repeats_blocks_and_times(tmp_path: Path, texts: PromptMaker, tokenizer: Tokenizer) -> None:
    path = write(
        tmp_path, row(3000, 40, 5, (7, 8, 9)), row(1000, 20, 1, (7, 8)), row(1500, 36, 1, (7, 8)), row(4000, 9)
    )
    dataset = TimedTrace(path, block_len=16, seconds_per_unit=0.001)
    prompts = dataset.prompts(9, IDS, seed=0)
    assert [prompt.offset_s for prompt in prompts] == [0.0, 0.5, 2.0, 3.0]
    assert [prompt.num_tokens for prompt in prompts] == [20, 36, 40, 9]
    assert [prompt.output_len for prompt in prompts] == [1, 1, 5, 2]
    first, second, third, last = (prompt.content for prompt in prompts)
    assert first == second[:20] == third[:20]
    assert second[:32] == third[:32]
    assert second[32:] != third[32:36]
    assert last != first[:9]
    assert dataset.prompts(2, IDS, seed=0) == prompts[:2]
    assert dataset.prompts(2, IDS, seed=1) != prompts[:2]
    of_text = dataset.prompts(4, texts, seed=0)
    assert [len(tokenizer.encode(str(prompt.content)).ids) for prompt in of_text] == [20, 36, 40, 9]


def test_fields_of_a_trace_may_have_other_names(tmp_path: Path) -> None:
    path = write(tmp_path, {"at": 1, "in": 4, "out": 3, "blocks": [-5]})
    (prompt,) = TimedTrace(path, labels=TraceLabels("at", "in", "out", "blocks")).prompts(1, IDS, seed=0)
    assert (prompt.num_tokens, prompt.output_len, prompt.offset_s) == (4, 3, 0.0)


@pytest.mark.parametrize(
    ("dataset", "rows", "message"),
    [
        (TimedTrace, [row("noon", 4)], "has noon as timestamp; --timed-trace-label-timestamp"),
        (TimedTrace, [row(1, None)], "has None as input_length; --timed-trace-label-input-length"),
        (TimedTrace, [row(1, 4, 0)], "has 0 as output_length"),
        (TimedTrace, [row(1, 4, 1, 5)], "has 5 as hash_ids"),
        (TimedTrace, [row(1, 600, 1, (1, 2))], "--timed-trace-chunk-hash-size 16 is not that of the trace"),
        (TimedTrace, [row(1, 16, 1, (1, 2))], "2 hash_ids for 16 tokens"),
        (TimedTrace, [], "has no requests of use"),
        (TimedTrace, ["{"], "line 1 of .* is no JSON"),
        (TimedTrace, ["1"], "line 1 of .* is no JSON object"),
        (Custom, [{"text": "x"}], "line 1 of .* has no text as prompt"),
        (Custom, [], "has no requests of use"),
        (ShareGpt, ["{"], "is no JSON"),
        (ShareGpt, ["{}"], "is no list of conversations"),
        (ShareGpt, [[{"conversations": [{}, {}]}]], "has a turn without a value"),
        (ShareGpt, [[{"conversations": []}]], "has no requests of use"),
    ],
)
def test_files_that_are_wrong(
    tmp_path: Path, texts: PromptMaker, dataset: type[Any], rows: list[Any], message: str
) -> None:
    path = write(tmp_path, *rows)
    made: Dataset = dataset(path if dataset is TimedTrace else Sampling(path))
    with pytest.raises(ConfigError, match=message):
        made.prompts(3, texts, seed=0)


def test_files_that_are_not_there_and_texts_without_a_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "none"
    for dataset in (TimedTrace(path), Custom(Sampling(path)), ShareGpt(Sampling(path))):
        with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
            dataset.prompts(1, IDS, seed=0)
    with pytest.raises(ConfigError, match="leave --vocab-size out"):
        Custom(Sampling(write(tmp_path, {"prompt": "x"}))).prompts(1, IDS, seed=0)

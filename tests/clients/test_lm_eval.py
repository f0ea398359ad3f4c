"""lm-eval's `local-completions`: it asks for the log-probabilities of prompts, as evaluations of models do."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import requests
from lm_eval import simple_evaluate

QUESTIONS = [
    {"question": "The capital of France is", "choices": [" Paris", " a very long way from here", " Rome"], "answer": 0},
    {"question": "Two and two are", "choices": [" four", " five"], "answer": 0},
    {"question": "Grün\nist die Farbe von", "choices": [" Gras", " Schnee", " Kohle"], "answer": 2},
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Questions of which the most likely answer counts."""
    file = tmp_path_factory.mktemp("task") / "questions.jsonl"
    file.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    return {
        "task": "questions",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{answer}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }


def loglikelihood(endpoint: Any, question: str, choice: str) -> tuple[float, bool]:
    """The same from the server's other field for it, and whether the choice is what the model would say."""
    tokenize = f"{endpoint.url.removesuffix('/v1')}/tokenize"
    headers = {"Authorization": f"Bearer {endpoint.key}"}

    def tokens(text: str) -> list[int]:
        body = {"prompt": text, "add_special_tokens": False}
        return list(requests.post(tokenize, json=body, headers=headers, timeout=60).json()["tokens"])

    ids, begin = tokens(question + choice), len(tokens(question))
    body = {"model": endpoint.model, "prompt": ids, "max_tokens": 1, "prompt_logprobs": 1, "temperature": 0}
    reply = requests.post(f"{endpoint.url}/completions", json=body, headers=headers, timeout=60).json()
    entries = reply["choices"][0]["prompt_logprobs"][begin:]
    own = [entry[str(token_id)] for entry, token_id in zip(entries, ids[begin:], strict=True)]
    return sum(entry["logprob"] for entry in own), all(entry["rank"] == 1 for entry in own)


@pytest.mark.parametrize("batch_size", [1, 4])
def test_multiple_choice(
    endpoint: Any, task: dict[str, Any], batch_size: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", endpoint.key)
    tokenizer = os.environ["CLIENT_TOKENIZER"]
    named = {"model": endpoint.model, "base_url": f"{endpoint.url}/completions", "tokenizer": tokenizer}
    options = {**named, "tokenizer_backend": "huggingface", "num_concurrent": 2, "max_length": 256}
    found = simple_evaluate(
        model="local-completions", model_args={**options, "batch_size": batch_size}, tasks=[task], bootstrap_iters=0
    )
    expected = [[loglikelihood(endpoint, each["question"], choice) for choice in each["choices"]] for each in QUESTIONS]
    samples = sorted(found["samples"]["questions"], key=lambda sample: sample["doc_id"])
    for sample, wanted in zip(samples, expected, strict=True):
        assert [each[0] for each in sample["filtered_resps"]] == pytest.approx([each[0] for each in wanted], abs=1e-3)
        assert [bool(each[1]) for each in sample["filtered_resps"]] == [each[1] for each in wanted]
    right = [max(range(len(one)), key=lambda at: one[at][0]) for one in expected]
    score = sum(at == question["answer"] for at, question in zip(right, QUESTIONS, strict=True)) / len(QUESTIONS)
    assert found["results"]["questions"]["acc,none"] == pytest.approx(score)

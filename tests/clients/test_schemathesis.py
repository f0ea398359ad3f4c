"""Requests made from the server's own description, right and wrong ones: it answers all of them as it says there."""

import os
import random
from collections import Counter
from typing import Any

import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi import checks

SERVER = os.environ["CLIENT_BASE_URL"].removesuffix("/v1")
KEY = {"Authorization": f"Bearer {os.environ['CLIENT_API_KEY']}"}
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/embeddings": {"input": "Hi"},
    "/v1/score": {"text_1": "Hi", "text_2": ["Hello", "Bye"]},
    "/v1/rerank": {"query": "Hi", "documents": ["Hello", "Bye"]},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [1, 2]},
}
"""Path -> what is taken, and takes no time."""
REPLY_CHECKS = [
    not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
]

config = schemathesis.Config.from_dict({"generation": {"deterministic": True}})
schema = schemathesis.openapi.from_url(f"{SERVER}/openapi.json", headers=KEY, config=config)
repeat = settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
answers: Counter[tuple[str, int]] = Counter()


@schema.parametrize()
@repeat
def test_any_request(case: schemathesis.Case) -> None:
    """What is right by the description alone may still be refused: fields contradict each other, models differ."""
    excluded = [checks.positive_data_acceptance]
    case.call_and_validate(headers=KEY, excluded_checks=excluded, timeout=60)


@schema.include(method="POST", path=list(GOOD)).parametrize()
@repeat
def test_a_good_request_with_a_field_or_two_of_chance(case: schemathesis.Case) -> None:
    """These come far: what is wrong with them, if anything, is wrong with these fields."""
    if not isinstance(case.body, dict):
        return
    chance = random.Random(repr(case.body))
    fields = chance.sample(sorted(case.body), min(len(case.body), chance.choice([1, 1, 2])))
    body = {**GOOD[case.path], **{name: case.body[name] for name in fields if case.body[name] is not None}}
    case.body, case.media_type = body, "application/json"
    response = case.call(headers=KEY, timeout=60)
    answers[case.path, response.status_code] += 1
    case.validate_response(response, checks=REPLY_CHECKS)


def test_many_came_to_their_end() -> None:
    """Of the requests before; the model either generates text or makes vectors."""
    assert min(answers[path, 200] for path in ("/tokenize", "/detokenize")) > 5
    generated = min(answers[path, 200] for path in ("/v1/chat/completions", "/v1/completions"))
    made = min(answers[path, 200] for path in ("/v1/embeddings", "/v1/score", "/v1/rerank"))
    assert max(generated, made) > 5

"""The rows of docs/compatibility.md, each of them tried. A field works if the outcome of a request changes with it:
what the engine is asked, or what the client gets."""

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers.processors import TemplateProcessing

from tests.support.api_server import Server, engine_config, run_server
from tests.support.compatibility.fields import BASES, FIELDS, VECTOR_PATHS, common_fields
from tests.support.compatibility.replies import REPLIES, SHOWN
from tests.support.compatibility.routes import ROUTES
from tests.support.compatibility.rows import FieldRow, ReplyRow, RouteRow, Status
from tests.support.sse import is_error, post_stream
from tokenmill_engine.config.engine import SchedulerConfig
from tokenmill_engine.config.model_files import embedded_model_path
from tokenmill_engine.config.pooling import PoolingConfig
from tokenmill_engine.vocabulary.gguf_tokenizer import load_gguf_tokenizer

TEMPLATE = (
    "{{ documents if documents }}{{ tools | tojson if tools }}{{ enable_thinking }}{{ reasoning_effort }}"
    "{% for message in messages %}{{ message.content }}{% if not loop.last %}<|im_end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %} two{% endif %}"
)
TRIED = [(path, row) for path, rows in FIELDS.items() for row in rows]
IDS = [f"{path}-{row.name}" for path, row in TRIED]
STARTED = (Status.WORKS, Status.DIFFERS)


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer that ends texts with a token of its own."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = load_gguf_tokenizer(str(embedded_model_path()))
    tokenizer.post_processor = TemplateProcessing(single="$A <|im_start|>", special_tokens=[("<|im_start|>", 1)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return str(folder)


@pytest.fixture(scope="module")
def able(tokenizer_folder: str) -> Iterator[Server]:
    """With everything that a flag allows."""
    engine = engine_config(tokenizer_path=tokenizer_folder)
    engine = dataclasses.replace(engine, scheduler=SchedulerConfig(policy="priority"))
    routes = {"load_tracking": True, "tokenizer_info": True}
    wishes = routes | {"chat_template": TEMPLATE, "tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    with run_server(engine=engine, trust_request_chat_template=True, per_request_metrics=True, **wishes) as server:
        yield server


@pytest.fixture(scope="module")
def able_embedder(tokenizer_folder: str) -> Iterator[Server]:
    """The same where vectors are made."""
    engine = engine_config(tokenizer_path=tokenizer_folder, pooling=PoolingConfig("last"))
    engine = dataclasses.replace(engine, scheduler=SchedulerConfig(policy="priority"))
    with run_server(engine=engine, engine_options={"vector_size": 576}) as server:
        yield server


@pytest.fixture
def server_of(able: Server, server: Server, able_embedder: Server, embedder: Server) -> Callable[[str, bool], Server]:
    """The server to try a path on: an able one, or one without flags."""

    def choose(path: str, is_able: bool) -> Server:
        if path in VECTOR_PATHS:
            return able_embedder if is_able else embedder
        return able if is_able else server

    return choose


def outcome(server: Server, path: str, body: dict[str, Any]) -> tuple[httpx.Response, Any]:
    """The answer, and all that would be the same for the same request."""
    engine = server.engines[0]
    before = len(engine.added)
    with server.client() as client:
        response = client.post(path, json=body)
    asked = [msgspec.structs.asdict(request) for request in engine.added[before:]]
    for request in asked:
        del request["request_id"], request["arrival_time"]
    text = re.sub(r'"(created|[a-z_]+_ms|tokens_per_second)":[\d.e+-]+', "", response.text)
    return response, (response.status_code, text, asked)


def request_of(path: str, row: FieldRow) -> tuple[dict[str, Any], dict[str, Any]]:
    """A body with the field, and one without it."""
    plain = {**common_fields(path), **BASES[path], **row.beside}
    if path == "/v1/completions" and row.name == "logprob_token_ids":
        plain["logprobs"] = 0
    return {**plain, row.name: row.value}, plain


@pytest.mark.parametrize("path", BASES)
def test_the_same_request_has_the_same_outcome(server_of: Callable[[str, bool], Server], path: str) -> None:
    """Or else a difference would not be that of a field."""
    able, plain = server_of(path, True), {**common_fields(path), **BASES[path]}
    for body in (plain, {**plain, "stream": True}):
        assert outcome(able, path, body)[1] == outcome(able, path, body)[1]


@pytest.mark.parametrize(("path", "row"), TRIED, ids=IDS)
def test_a_field_is_what_the_table_says(server_of: Callable[[str, bool], Server], path: str, row: FieldRow) -> None:
    body, plain = request_of(path, row)
    tried = server_of(path, row.status in STARTED)
    response, result = outcome(tried, path, body)
    listed = response.headers.get("x-ignored-fields", "").split(", ")
    if row.status is Status.REFUSED:
        assert is_error(response, 400, row.name)
    elif row.status is Status.LISTED:
        assert response.status_code == 200
        assert listed == [row.name]
        assert result == outcome(tried, path, plain)[1]
    else:
        assert response.status_code == row.status_code, response.text
        assert row.name not in listed
        assert result != outcome(tried, path, plain)[1]


@pytest.mark.parametrize(("path", "row"), [each for each in TRIED if each[1].needs])
def test_a_field_is_refused_without_the_flag_that_it_needs(
    server_of: Callable[[str, bool], Server], path: str, row: FieldRow
) -> None:
    response, _ = outcome(server_of(path, False), path, request_of(path, row)[0])
    assert is_error(response, 400, row.name)
    assert row.needs in response.json()["error"]["message"]


@pytest.mark.parametrize("row", ROUTES, ids=lambda row: f"{row.method}-{row.path}")
def test_a_route_is_what_the_table_says(server_of: Callable[[str, bool], Server], row: RouteRow) -> None:
    path = row.path.replace("{model_id}", "smol")
    with server_of(row.path, False).client() as client:
        response = client.request(row.method, path, json=row.body)
    if row.needs:
        assert is_error(response, 404, code="not_found")
        with server_of(row.path, True).client() as client:
            response = client.request(row.method, path, json=row.body)
    if row.status is Status.ABSENT:
        assert is_error(response, 404, code="not_found")
    else:
        assert response.status_code == 200, response.text


def test_every_route_is_in_the_table(client: httpx.Client) -> None:
    paths = client.get("/openapi.json").json()["paths"]
    served = {(method.upper(), path) for path, methods in paths.items() for method in methods}
    rows = {(row.method, row.path) for row in ROUTES if row.status is not Status.ABSENT}
    assert {(method, path.replace(":path", "")) for method, path in served} <= rows


def paths_in(value: Any, path: str = "") -> set[str]:
    """Of all fields in an answer. Maps whose keys are tokens end a path."""
    if path.endswith(("top_logprobs[]", "prompt_logprobs[]")) and "token" not in (value or ()):
        return set()
    if isinstance(value, list):
        return set().union(*(paths_in(each, f"{path}[]") for each in value))
    found: set[str] = set()
    if isinstance(value, dict):
        for name, each in value.items():
            found |= {f"{path}.{name}".lstrip(".")} | paths_in(each, f"{path}.{name}".lstrip("."))
    return found


@pytest.mark.parametrize(("kind", "rows"), REPLIES.items())
def test_answers_have_what_the_table_says(
    server_of: Callable[[str, bool], Server], kind: str, rows: tuple[ReplyRow, ...]
) -> None:
    """No field more, and none less."""
    path, bodies = SHOWN[kind]
    found: set[str] = set()
    with server_of(path, True).client() as client:
        for body in bodies:
            body = {**common_fields(path), **body}
            if kind.endswith("chunk"):
                stream = post_stream(client, path, body)
                found |= set().union(*map(paths_in, stream.chunks))
            else:
                found |= paths_in(client.post(path, json=body).json())
    assert found == {row.path for row in rows if row.status is not Status.ABSENT}

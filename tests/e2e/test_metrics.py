"""What /metrics says equals what clients counted, whichever API server says it, in every topology, after every end."""

import re
import socket

import pytest

from tests.support.connections import ports_taken_by_each, scrape_each, wait_until_taken
from tests.support.server import PATIENCE_S, Server, wait_for
from tests.support.streams import BackgroundStream, Stream, at_once, raw_request, read_stream

pytestmark = pytest.mark.slow

ENDLESS = {"prompt": "Once", "max_tokens": 60000, "ignore_eos": True, "stream": True}
LIMIT = 7
PROMPT = "Many mills ground"
STATE = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")


def total(page: dict[str, float], name: str, **labels: str) -> float:
    """Sum of the series of one name that have `labels`."""
    wanted = [f'{key}="{value}"' for key, value in labels.items()]
    found = {key: value for key, value in page.items() if key.partition("{")[0] == name}
    assert found, f"no {name}"
    return sum(value for key, value in found.items() if all(label in key for label in wanted))


def settled(page: dict[str, float]) -> dict[str, float]:
    """What cannot change while the server has nothing to do."""
    return {key: value for key, value in page.items() if not key.startswith(("process_", "python_"))}


def one_page(server: Server) -> dict[str, float]:
    """What every API server of an idle server says twice, once all that has happened is written down."""
    server.check_idle()
    seen: list[dict[str, float]] = []

    def agree() -> bool:
        earlier = seen[:]
        seen[:] = map(settled, scrape_each(server))
        return earlier != [] and all(page == seen[0] for page in (*earlier, *seen))

    wait_for(agree, PATIENCE_S, "metrics that all API servers agree on")
    return seen[0]


@pytest.fixture(params=["tiny_server", "smollm_server", "scaled_server"], ids=["1x1", "2x1", "4x2"])
def server(request: pytest.FixtureRequest) -> Server:
    """API servers times engine cores."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


def test_counters_equal_what_clients_counted(server: Server) -> None:
    """Forty-two requests of every kind and end, all at once."""
    fields = {"prompt": PROMPT, "max_tokens": LIMIT, "temperature": 0, "ignore_eos": True}
    num_prompt_tokens = server.complete(**fields)["usage"]["prompt_tokens"]
    stop = server.text(PROMPT, max_tokens=LIMIT, ignore_eos=True)[2]
    before = one_page(server)

    def leave() -> Stream:
        long = {**fields, "max_tokens": 5000}
        return read_stream(server.url, "/v1/completions", long, lambda stream: len(stream.events) < 3)

    calls = {
        "whole": (12, lambda: server.complete(**fields)["usage"]["completion_tokens"]),
        "streamed": (8, lambda: read_stream(server.url, "/v1/completions", fields).finish_reasons()),
        "two choices": (4, lambda: server.complete(**fields, n=2)["usage"]["completion_tokens"]),
        "stopped": (
            4,
            lambda: server.complete(**fields | {"max_tokens": 5000}, stop=stop)["choices"][0]["finish_reason"],
        ),
        "left": (5, leave),
        "refused": (6, lambda: server.post("/v1/completions", prompt=PROMPT, temperature=-1).status_code),
        "unknown": (3, lambda: server.http.get("/v1/unknown").status_code),
    }
    answers = dict(zip(calls, at_once([lambda c=c: at_once([c[1]] * c[0]) for c in calls.values()]), strict=True))  # type: ignore[misc]
    assert answers["whole"] == [LIMIT] * 12
    assert answers["streamed"] == [["length"]] * 8
    assert answers["two choices"] == [2 * LIMIT] * 4
    assert answers["stopped"] == ["stop"] * 4
    assert answers["refused"] == [400] * 6
    assert answers["unknown"] == [404] * 3

    num_http = total(before, "http_requests_total") + 42
    wait_for(lambda: server.metric("http_requests_total") >= num_http, PATIENCE_S, "notes of all HTTP requests")
    after = one_page(server)

    def counted(name: str, **labels: str) -> float:
        return total(after, name, **labels) - total(before, name, **labels)

    ends = {reason: counted("tokenmill:request_success_total", finished_reason=reason) for reason in ("length", "stop")}
    assert ends == {"length": 12 + 8 + 2 * 4, "stop": 4}
    assert counted("tokenmill:request_success_total", finished_reason="abort") == 5
    assert counted("tokenmill:request_success_total") == 28 + 4 + 5
    assert counted("tokenmill:prompt_tokens_total") == 37 * num_prompt_tokens
    by_source = "tokenmill:prompt_tokens_by_source_total"
    assert counted("tokenmill:prompt_tokens_cached_total") == counted(by_source, source="local_cache_hit")
    assert counted("tokenmill:generation_tokens_total") >= 28 * LIMIT + 4 * 1 + 5 * 3
    assert counted("tokenmill:request_generation_tokens_count") == 37
    assert counted("tokenmill:time_to_first_token_seconds_count") == 12 + 8 + 4 + 4 + 5
    assert counted("tokenmill:request_params_n_sum") >= 28 + 4
    assert counted("http_requests_total", handler="/v1/completions", method="POST", status="2xx") == 33
    assert counted("http_requests_total", handler="/v1/completions", method="POST", status="4xx") == 6
    assert counted("http_requests_total", handler="none", status="4xx") == 3
    assert counted("http_request_duration_seconds_count") == 42


def test_tokens_are_exact(server: Server) -> None:
    """Of requests that end by their length alone, to the last token."""
    before = one_page(server)
    limits = [1, 2, 3, 5, 8, 13, 21, 34] * 3
    at_once([lambda n=n: server.complete(PROMPT, max_tokens=n, ignore_eos=True) for n in limits])  # type: ignore[misc]
    after = one_page(server)
    for name in ("generation_tokens_total", "request_generation_tokens_sum", "request_params_max_tokens_sum"):
        assert total(after, f"tokenmill:{name}") - total(before, f"tokenmill:{name}") == sum(limits)


def test_each_series_comes_once_and_says_nothing_of_process_numbers(server: Server) -> None:
    """Reading fails on a series that comes twice. Everything of an engine is there once per engine core."""
    page = one_page(server)
    assert not [key for key in page if re.search(r"[{,]pid=", key)]
    engines = [str(engine) for engine in range(len(server.engine_pids()))]
    for name in (*STATE, "num_preemptions_total", "generation_tokens_total", "cache_config_info"):
        found = [key for key in page if key.partition("{")[0] == f"tokenmill:{name}"]
        assert sorted(re.findall(r'engine="(\d+)"', " ".join(found))) == engines, name
    (scraped, *_) = scrape_each(server)
    processes = {match[1] for key in scraped if (match := re.match(r'process_open_fds{process="(.*)"}', key))}
    api_servers = {f"api server {number}" for number in range(len(server.api_server_pids()))}
    assert processes == {"launcher", *api_servers, *(f"engine core {engine}" for engine in engines)}
    assert any(key.startswith("python_info{") for key in scraped)


def test_both_namespaces_say_the_same(scaled_server: Server) -> None:
    page = one_page(scaled_server)
    ours = {key.partition(":")[2]: value for key, value in page.items() if key.startswith("tokenmill:")}
    theirs = {key.partition(":")[2]: value for key, value in page.items() if key.startswith("vllm:")}
    assert ours == theirs
    assert len(ours) > 200


def test_a_killed_api_server_takes_nothing_away(scaled_server: Server) -> None:
    """Its clients see their connections end at once, its engine work ends, its counts stay, and nobody else notices."""
    server = scaled_server
    at_once([lambda: server.text("x", max_tokens=3)] * 12)
    before = one_page(server)
    streams = streams_on_every_api_server(server)
    running = [total(page, "tokenmill:num_requests_running") for page in scrape_each(server)]
    assert running == [len(streams)] * 4
    waiting = raw_request(server.url, "/v1/completions", {**ENDLESS, "stream": False})
    wait_for(lambda: server.metric("num_requests_running") == len(streams) + 1, PATIENCE_S, "one more request")
    victim = wait_until_taken(server, [waiting]).index(1)
    num_broken = ports_taken_by_each(server, (stream.stream.port for stream in streams))[victim]
    num_kept = len(streams) - num_broken
    server.kill(server.api_server_pids()[victim])
    with waiting:
        waiting.settimeout(PATIENCE_S)
        assert is_cut_off(waiting)
    server.drop_connections()
    wait_for(lambda: sum(not stream.is_alive() for stream in streams) >= num_broken, PATIENCE_S, "broken streams")
    wait_for(lambda: server.metric("num_requests_running") == num_kept, PATIENCE_S, "freed blocks")
    assert sum(stream.stream.broken for stream in streams) == num_broken
    num_events = [len(stream.stream.events) for stream in streams if stream.is_alive()]
    wait_for(lambda: len(server.api_server_pids()) == 4, PATIENCE_S, "four API servers")
    for page in scrape_each(server):
        assert total(page, "tokenmill:num_requests_running") == num_kept
        aborted = total(page, "tokenmill:request_success_total", finished_reason="abort")
        assert aborted == total(before, "tokenmill:request_success_total", finished_reason="abort") + num_broken + 1
        for name in ("http_requests_total", "tokenmill:e2e_request_latency_seconds_count"):
            assert total(page, name) == total(before, name)
    alive = [stream for stream in streams if stream.is_alive()]
    for stream, count in zip(alive, num_events, strict=True):
        stream.wait_for_events(count + 1)
    for stream in alive:
        stream.leave()
    server.check_idle()
    server.check_alive()


def streams_on_every_api_server(server: Server) -> list[BackgroundStream]:
    """Twelve, or more if chance wants it so. All of them have begun."""
    streams: list[BackgroundStream] = []
    while len(streams) < 12 or not all(ports_taken_by_each(server, (one.stream.port for one in streams))):
        streams.append(BackgroundStream(server.url, "/v1/completions", **ENDLESS))
        if len(streams) >= 12:
            for stream in streams:
                stream.wait_for_events(2)
    return streams


def is_cut_off(connection: socket.socket) -> bool:
    """Whether the connection ends, or is reset, without an answer. Raises TimeoutError if nothing happens."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True

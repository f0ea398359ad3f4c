import pytest

from tokenmill_server.bench.metrics import RequestRecord, summarize


def record(
    start_s: float, token_times_s: list[float], output_tokens: int | None = None, **fields: object
) -> RequestRecord:
    end_s = fields.pop("end_s", token_times_s[-1] if token_times_s else start_s)
    return RequestRecord(
        prompt_tokens=10,
        max_tokens=8,
        start_s=start_s,
        token_times_s=token_times_s,
        end_s=end_s,
        output_tokens=len(token_times_s) if output_tokens is None else output_tokens,
        **fields,
    )


def test_latencies_of_two_requests_by_hand() -> None:
    records = [record(0.0, [0.100, 0.150, 0.250]), record(1.0, [1.300, 1.320])]
    summary = summarize(records, duration_s=2.0, percentiles=[50, 99])

    ttft = summary.latencies["ttft"]
    assert ttft.mean == pytest.approx(200)
    assert ttft.median == pytest.approx(200)
    assert ttft.std == pytest.approx(100)
    assert ttft.percentiles[99] == pytest.approx(100 + 0.99 * 200)
    itl = summary.latencies["itl"]
    assert itl.mean == pytest.approx((50 + 100 + 20) / 3)
    assert itl.median == pytest.approx(50)
    # (250 - 100) / 2 and (320 - 300) / 1
    assert summary.latencies["tpot"].mean == pytest.approx((75 + 20) / 2)
    assert summary.latencies["e2el"].mean == pytest.approx((250 + 320) / 2)
    assert summary.total_output_tokens == 5
    assert summary.output_throughput == pytest.approx(2.5)
    assert summary.total_token_throughput == pytest.approx(12.5)
    assert summary.request_throughput == pytest.approx(1.0)


def test_tpot_uses_the_servers_token_count_not_the_number_of_chunks() -> None:
    summary = summarize([record(0.0, [0.1, 0.3], output_tokens=11)], 1.0, [99])
    assert summary.latencies["tpot"].mean == pytest.approx(20)
    assert summary.latencies["itl"].mean == pytest.approx(200)


def test_end_after_the_last_token_counts_for_e2el_and_tpot() -> None:
    summary = summarize([record(0.0, [0.1, 0.2], end_s=0.25)], 1.0, [99])
    assert summary.latencies["e2el"].mean == pytest.approx(250)
    assert summary.latencies["tpot"].mean == pytest.approx(150)


def test_single_token_requests_have_no_tpot_sample() -> None:
    summary = summarize([record(0.0, [0.1]), record(0.0, [0.1, 0.2])], 1.0, [99])
    assert summary.latencies["tpot"].mean == pytest.approx(100)


def test_failed_requests_count_nowhere_but_as_failed() -> None:
    summary = summarize([record(0.0, [0.1, 0.2]), record(0.0, [0.5], error="HTTP 500")], 1.0, [99])
    assert (summary.completed, summary.failed) == (1, 1)
    assert summary.total_input_tokens == 10
    assert summary.total_output_tokens == 2
    assert summary.latencies["ttft"].mean == pytest.approx(100)


def test_goodput_needs_every_goal() -> None:
    fast, slow_first, slow_rest = record(0, [0.1, 0.11]), record(0, [0.9, 0.91]), record(0, [0.1, 0.3])
    summary = summarize([fast, slow_first, slow_rest], 2.0, [99], {"ttft": 200, "tpot": 50})
    assert summary.num_good == 1
    assert summary.request_goodput == pytest.approx(0.5)
    assert summarize([fast, slow_first, slow_rest], 2.0, [99], {"e2el": 350}).num_good == 2
    assert summarize([fast], 2.0, [99]).request_goodput is None


def test_one_token_meets_any_tpot_goal() -> None:
    assert summarize([record(0, [5.0])], 1.0, [99], {"tpot": 1}).num_good == 1


def test_peaks() -> None:
    records = [record(10.0, [10.1, 10.2, 10.3, 11.5]), record(10.5, [10.6, 11.9]), record(11.9, [13.0])]
    summary = summarize(records, 3.0, [99])
    assert summary.max_output_tokens_per_s == 4
    assert summary.max_concurrent_requests == 2


def test_nothing_succeeded() -> None:
    summary = summarize([record(0, [], error="refused")], 1.0, [99], {"ttft": 1})
    assert summary.completed == 0
    assert summary.num_good == 0
    assert summary.to_json()["p99_ttft_ms"] == 0
    assert summary.max_concurrent_requests == 0


def test_json_has_the_known_keys() -> None:
    result = summarize([record(0, [0.1, 0.2])], 1.0, [90, 99.9]).to_json()
    counts = ["duration", "completed", "total_input_tokens", "total_output_tokens"]
    rates = ["request_throughput", "output_throughput", "total_token_throughput", "request_goodput"]
    kinds = ["mean", "median", "std", "p90", "p99.9"]
    latencies = [f"{kind}_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el") for kind in kinds]
    assert set(counts + rates + latencies) <= set(result)

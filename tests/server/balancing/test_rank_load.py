from tokenmill_engine.messages import EngineLoad
from tokenmill_server.balancing.rank_load import RankLoad, TypicalRequest


def test_a_report_confirms_the_requests_that_it_counts() -> None:
    load = RankLoad()
    load.sent(100, num_sequences=1)
    load.sent(40, num_sequences=3)
    load.sent(7, num_sequences=1)
    assert (load.num_unconfirmed, load.num_unconfirmed_tokens) == (5, 147)
    load.report(EngineLoad(1, 0, num_received=1))
    assert (load.num_unconfirmed, load.num_unconfirmed_tokens) == (4, 47)
    load.report(EngineLoad(3, 0, num_received=3))
    assert (load.num_unconfirmed, load.num_unconfirmed_tokens) == (2, 7)
    assert load.num_sequences(num_senders=1) == 5
    assert load.num_sequences(num_senders=4) == 11
    assert load.num_prompt_tokens(4, TypicalRequest()) == 28


def test_a_report_without_a_count_confirms_everything() -> None:
    load = RankLoad()
    load.sent(100, num_sequences=2)
    load.report(EngineLoad(1, 1))
    assert (load.num_unconfirmed, load.num_unconfirmed_tokens) == (0, 0)


def test_another_engine_begins_at_zero() -> None:
    load = RankLoad()
    load.sent(100, num_sequences=2)
    load.report(EngineLoad(5, 1, num_received=1))
    load.forget()
    assert load.num_sequences(num_senders=4) == 0
    load.sent(10, num_sequences=1)
    load.report(EngineLoad(0, 0, num_received=0))
    assert load.num_unconfirmed == 1


def test_waiting_prompts_are_taken_to_be_cached_as_much_as_those_sent_before() -> None:
    load, typical = RankLoad(), TypicalRequest()
    load.report(EngineLoad(0, 10, num_waiting_tokens=1000))
    assert load.num_prompt_tokens(4, typical) == 1000
    for _ in range(1000):
        typical.observe(num_tokens=100, num_missing=25)
    assert abs(load.num_prompt_tokens(4, typical) - 250) < 1
    assert abs(typical.prompt_tokens - 100) < 1

import pytest

from tokenmill_server.bench.compare_groups import FOUR_SERVERS, GROUPS, ONE_SERVER, plans_of
from tokenmill_server.bench.compare_plan import DEFAULT, START, Load, rows_of, seed_offset, sessions_of


def loads_of(group: str, selected: list[str], divisor: int) -> dict[str, list[Load]]:
    """By model, each once."""
    plans = plans_of(group, selected, divisor)
    return {plan.model: list(dict.fromkeys(each for pair in plan.pairings for each in pair.loads)) for plan in plans}


def order(group: str, rounds: int, with_peer: bool = True) -> list[tuple[str, str, str, list[int], str]]:
    sessions = sessions_of(plans_of(group), rounds, with_peer)
    return [(each.side, each.model, each.variant, list(each.rounds), each.cache) for each in sessions]


def test_offline_turns() -> None:
    assert order("offline", 3) == [
        ("ours", "8b", DEFAULT, [0, 1], "default"),
        ("peer", "8b", DEFAULT, [0, 1, 2], "default"),
        ("ours", "8b", DEFAULT, [2], "default"),
        ("ours", "1b", DEFAULT, [0, 1], "default"),
        ("peer", "1b", DEFAULT, [0, 1, 2], "default"),
        ("ours", "1b", DEFAULT, [2], "default"),
    ]
    assert [each[0] for each in order("offline", 1)] == ["ours", "peer"] * 2
    assert [each[0] for each in order("offline", 3, with_peer=False)] == ["ours"] * 2


def test_online_turns() -> None:
    assert order("online8b", 3) == [
        ("ours", "8b", DEFAULT, [0, 1], "empty"),
        ("peer", "8b", DEFAULT, [0, 1, 2], "empty"),
        ("ours", "8b", DEFAULT, [2], "kept"),
    ]
    assert order("online8b", 1, with_peer=False) == [
        ("ours", "8b", DEFAULT, [0], "empty"),
        ("ours", "8b", DEFAULT, [], "kept"),
    ]
    assert [each[:4] for each in order("online1b", 3)] == [
        ("ours", "1b", DEFAULT, [0, 1]),
        ("peer", "1b", DEFAULT, [0, 1, 2]),
        ("ours", "1b", ONE_SERVER, [0, 1]),
        ("peer", "1b", FOUR_SERVERS, [0, 1, 2]),
        ("ours", "1b", DEFAULT, [2]),
        ("ours", "1b", ONE_SERVER, [2]),
    ]
    assert [each[2:4] for each in order("online1b", 3, with_peer=False)] == [
        (DEFAULT, [0, 1, 2]),
        (ONE_SERVER, [0, 1, 2]),
    ]


def test_turns_over_several_devices() -> None:
    stages, parts = "--pipeline-parallel-size 2", "--tensor-parallel-size 2"
    assert [each[:4] for each in order("pp2", 2)] == [
        ("ours", "8b", DEFAULT, [0]),
        ("ours", "8b", stages, [0]),
        ("peer", "8b", stages, [0, 1]),
        ("ours", "8b", parts, [0]),
        ("ours", "8b", DEFAULT, [1]),
        ("ours", "8b", stages, [1]),
        ("ours", "8b", parts, [1]),
    ]
    sessions = sessions_of(plans_of("tp4-70b"), 1, True)
    assert [(each.side, each.model, each.flags, each.num_devices) for each in sessions] == [
        ("ours", "70b", ("--tensor-parallel-size", "4"), 4),
        ("peer", "70b", ("--tensor-parallel-size", "4"), 4),
    ]
    assert [row.title for row in rows_of(plans_of("tp2", ["decode 256"]), True)] == [
        "8b decode step, batch 256, TP 2, ms",
        "8b decode step, batch 256, TP 2, share of the memory bandwidth",
        "8b prefill of 256 x 1024, TP 2, input tok/s",
    ]


def test_copies_take_as_much_more_load_and_are_compared_with_as_many_times_one_device() -> None:
    sessions = sessions_of(plans_of("dp4"), 1, True)
    flags = "--data-parallel-size 4 --api-server-count 4"
    assert [(each.side, each.variant, [load.concurrency for load in each.loads]) for each in sessions] == [
        ("ours", DEFAULT, [256]),
        ("peer", DEFAULT, [256]),
        ("ours", flags, [1024]),
        ("peer", flags, [1024]),
    ]
    compared = [row for row in rows_of(plans_of("dp4"), True) if row.base is not None]
    assert [row.title for row in compared] == [
        "8b 1024 clients 1024/128, DP 4, output tok/s by 4 x one device",
    ]
    assert rows_of(plans_of("dp4", ["1024 clients"]), True)[-1].base is None  # the one device was not selected


def test_decode_loads_of_a_round_share_their_prompts_and_no_others_do() -> None:
    session = sessions_of(plans_of("offline"), 1, True)[0]
    offsets = {load.name: seed_offset(session, load) for load in session.loads}
    decodes = {offset for name, offset in offsets.items() if "decode" in name}
    others = [offset for name, offset in offsets.items() if "decode" not in name]
    assert len(decodes) == 1
    assert len({*decodes, *others}) == 1 + len(others)
    sizes = [load.num_prompts for load in session.loads if load.kind == "decode"]
    assert sizes == sorted(sizes, reverse=True)  # the first one computes the prompts of all


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_every_side_runs_every_round_once(group: str, rounds: int) -> None:
    seen: dict[tuple[str, str, str], list[int]] = {}
    for side, model, variant, its_rounds, _ in order(group, rounds):
        seen.setdefault((side, model, variant), []).extend(its_rounds)
    assert all(its_rounds == list(range(rounds)) for its_rounds in seen.values())


def test_flags_of_a_variant() -> None:
    sessions = sessions_of(plans_of("online1b"), 1, True)
    assert [each.flags for each in sessions] == [
        (),
        (),
        ("--api-server-count", "1"),
        ("--api-server-count", "4"),
    ]


@pytest.mark.parametrize("group", GROUPS)
def test_every_row_has_its_sessions(group: str) -> None:
    plans = plans_of(group)
    sessions = sessions_of(plans, 1, True)
    measured = {(each.side, each.variant, load.name) for each in sessions for load in each.loads}
    for row in rows_of(plans, True):
        wanted = [(row.ours, row.peer, row.load)] if row.load != START else []
        wanted += [(row.base.ours, row.base.peer, row.base.load)] if row.base is not None else []
        for ours, peer, load in wanted:
            assert ("ours", ours, load) in measured
            assert peer is None or ("peer", peer, load) in measured
    titles = [row.title for row in rows_of(plans, True)]
    assert len(set(titles)) == len(titles)


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("divisor", [1, 2, 16, 64, 100000])
def test_alone_every_row_is_a_measurement_of_its_own(group: str, divisor: int) -> None:
    plans = plans_of(group, (), divisor)
    rows = rows_of(plans, False)
    measured = {(each.variant, load.name) for each in sessions_of(plans, 1, False) for load in each.loads}
    assert {(row.ours, row.load) for row in rows if row.load != START} == measured
    assert len({(row.ours, row.load, row.metric, row.base) for row in rows}) == len(rows)
    assert len({row.title for row in rows}) == len(rows)


def test_selection_and_sizes() -> None:
    loads = loads_of("offline", ["1b decode", "512 x"], 1)
    assert [load.name for load in loads["8b"]] == ["8b 512 x 128/128"]
    assert [load.num_prompts for load in loads["1b"]] == [512, 256, 128, 32, 8, 1]
    assert loads_of("online8b", ["no such load"], 1) == {}
    small = loads_of("online8b", [], 64)["8b"]
    assert [(load.num_prompts, load.input_len, load.output_len, load.concurrency) for load in small] == [
        (12, 16, 2, 4),
        (1, 16, 2, 1),
    ]
    decodes = [load.name for load in loads_of("offline", ["8b decode"], 16)["8b"]]
    assert decodes == ["8b decode 256", "8b decode 128", "8b decode 32", "8b decode 8"]
    decode = loads_of("offline", ["8b decode 256"], 64)["8b"][0]
    assert (decode.num_prompts, decode.input_len, decode.output_len) == (4, 16, 16)

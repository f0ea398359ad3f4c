from tokenmill_server.bench.compare_groups import FOUR_SERVERS
from tokenmill_server.bench.compare_plan import Base, Row, Side
from tokenmill_server.bench.compare_report import Measurement, card_name, format_table

ROWS = [Row("step, ms", "decode", "step_ms"), Row("tok/s", "load", "tok_s", peer=FOUR_SERVERS), Row("no", "no", "no")]


def measured(side: Side, load: str, *values: float, variant: str = "default flags") -> list[Measurement]:
    key = "step_ms" if load == "decode" else "tok_s"
    return [Measurement(side, variant, load, number, {key: value}) for number, value in enumerate(values)]


def test_medians_extremes_and_ratios() -> None:
    measurements = [
        *measured("ours", "decode", 5.0, 4.5, 9.25),
        *measured("peer", "decode", 6.25, 6.5, 6.0),
        *measured("ours", "load", 12345.6),
        *measured("peer", "load", 99999.0),
        *measured("peer", "load", 10000.0, variant=FOUR_SERVERS),
    ]
    assert format_table(ROWS, measurements, "Peer").splitlines() == [
        "| | Tokenmill | Peer | ratio |",
        "|---|---|---|---|",
        "| step, ms | 5 (4.5 to 9.25) | 6.25 (6 to 6.5) | 0.800 |",
        "| tok/s | 12346 | 10000 | 1.235 |",
    ]


def test_a_row_by_a_multiple_of_another() -> None:
    row = Row("by 2 x one", "both", "tok_s", base=Base("one", "default flags", "default flags", 2))
    ours = [*measured("ours", "one", 90.0, 100.0, 110.0), *measured("ours", "both", 190.0, 198.0)]
    peer = [*measured("peer", "both", 100.0), *measured("peer", "one", 100.0)]
    assert format_table([row], [*ours, *peer], "Peer").splitlines()[2:] == [
        "| by 2 x one | 0.97 (0.95 to 0.99) | 0.5 | 1.940 |"
    ]
    assert format_table([row], [*ours, *peer[:1]], "Peer").splitlines()[2:] == [
        "| by 2 x one | 0.97 (0.95 to 0.99) |  |  |"
    ]


def test_a_missing_side_leaves_a_gap() -> None:
    measurements = [*measured("peer", "decode", 2.0), *measured("ours", "load", 3.0)]
    assert format_table(ROWS, measurements, "Peer").splitlines()[2:] == [
        "| step, ms |  | 2 |  |",
        "| tok/s | 3 |  |  |",
    ]


def test_no_ratio_to_nothing() -> None:
    measurements = [*measured("ours", "decode", 1.0), *measured("peer", "decode", 0.0)]
    assert format_table(ROWS, measurements, "Peer").splitlines()[2] == "| step, ms | 1 | 0 |  |"


def test_without_a_peer() -> None:
    assert format_table(ROWS, measured("ours", "decode", 5.0, 6.0), None).splitlines() == [
        "| | Tokenmill |",
        "|---|---|",
        "| step, ms | 5.5 (5 to 6) |",
    ]


def test_the_device_has_a_name() -> None:
    assert card_name()

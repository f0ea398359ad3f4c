from hypothesis import example, given
from hypothesis import strategies as st

from tokenmill_server.processing.stop_strings import StopStrings

_TEXT = st.text(alphabet="ab", max_size=30)
_STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=5), min_size=1, max_size=4)


def cut(text: str, sizes: list[int]) -> list[str]:
    pieces, start = [], 0
    for size in sizes:
        pieces.append(text[start : start + size])
        start += size
    return [*pieces, text[start:]]


def oracle(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop string that ends first (of those the longest), found by looking at every prefix of the text."""
    for end in range(1, len(text) + 1):
        matches = [stop for stop in stops if text[:end].endswith(stop)]
        if matches:
            stop = max(matches, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(_TEXT, _STOPS, st.lists(st.integers(0, 5)), st.booleans())
@example("aab", ["ab"], [1, 1], False)
@example("abaabab", ["abab"], [1, 1, 1], False)
def test_result_depends_on_the_text_alone(text: str, stops: list[str], sizes: list[int], include: bool) -> None:
    watcher = StopStrings(stops, include)
    output = ""
    for piece in cut(text, sizes):
        output += watcher.push(piece)
        if watcher.matched is not None:
            break
        assert oracle(text, stops, False)[0].startswith(output), "text of a stop string leaked"
    if watcher.matched is None:
        output += watcher.flush()
    assert (output, watcher.matched) == oracle(text, stops, include)


@given(_TEXT, _STOPS, st.lists(st.integers(0, 5)))
def test_no_more_is_held_back_than_may_become_a_stop_string(text: str, stops: list[str], sizes: list[int]) -> None:
    watcher = StopStrings(stops, include_in_output=False)
    seen = output = ""
    for piece in cut(text, sizes):
        seen += piece
        output += watcher.push(piece)
        if watcher.matched is not None:
            return
        held = seen[len(output) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


def test_watchers_of_one_string_share_its_table() -> None:
    tables = {id(StopStrings(["ab" * 500], False)._automata[0]._fallback) for _ in range(100)}
    assert len(tables) == 1


def test_before_the_minimum_a_stop_string_is_ordinary_text() -> None:
    watcher = StopStrings(["ab"], include_in_output=False)
    assert watcher.push("xaby", may_stop=False) == "xaby"
    assert watcher.push("a", may_stop=False) == ""
    assert watcher.push("b") == ""
    assert watcher.matched == "ab"

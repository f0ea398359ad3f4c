from hypothesis import given
from hypothesis import strategies as st

from tokenmill_engine.messages import RepetitionDetection
from tokenmill_server.processing.repetition import RepetitionDetector


def ends_in_circles(tokens: list[int], detection: RepetitionDetection) -> bool:
    """By definition: the last tokens are a pattern, `min_count` times."""
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        pattern = tokens[-size:]
        if len(pattern) == size and tokens[-size * detection.min_count :] == pattern * detection.min_count:
            return True
    return False


@given(
    tokens=st.lists(st.integers(0, 2), max_size=60),
    largest=st.integers(1, 6),
    smallest=st.integers(1, 6),
    min_count=st.integers(2, 4),
)
def test_the_first_repetition_is_found_at_once(tokens: list[int], largest: int, smallest: int, min_count: int) -> None:
    detection = RepetitionDetection(
        max_pattern_size=largest, min_pattern_size=min(smallest, largest), min_count=min_count
    )
    detector = RepetitionDetector(detection)
    for position, token in enumerate(tokens):
        assert detector.push(token) == ends_in_circles(tokens[: position + 1], detection)


def test_a_long_sequence_is_forgotten_except_for_its_end() -> None:
    detector = RepetitionDetector(RepetitionDetection(max_pattern_size=3, min_count=3))
    for token in range(5000):
        assert not detector.push(token)
    assert [detector.push(token) for token in (7, 8, 9) * 3] == [False] * 8 + [True]
    assert len(detector._recent) < 2000

import time

import pytest

from tokenmill_server.processing.shown import shown


@pytest.mark.parametrize("value", [1, -2.5, "text", None, True, [1, "a"], {"a": [1]}])
def test_small_values_are_shown_as_they_are(value: object) -> None:
    assert shown(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 10**7, [[0] * 10**6] * 9, {"k" * 10**6: "v" * 10**6}, 10**4000])
def test_large_values_are_short_and_cheap(value: object) -> None:
    started = time.thread_time()
    assert len(shown(value)) <= 203
    assert time.thread_time() - started < 0.1

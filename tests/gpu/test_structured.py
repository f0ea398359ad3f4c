"""Requests with grammars in an engine core on a GPU: text that has to follow is computed at once, and nothing shows."""

from typing import Any

import pytest

from tests.engine_core.engine.test_structured import generate, watched_core
from tokenmill_engine.config.engine import DeviceConfig

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SCARCE: tuple[dict[str, Any], ...] = ({"budget": 16}, {"num_blocks": 8})


@pytest.mark.parametrize("eager", [False, True])
def test_text_that_has_to_follow_is_what_it_would_be(eager: bool) -> None:
    """In graphs and without, in chunks, and after preemptions."""
    device = DeviceConfig(kind="cuda", enforce_eager=eager)
    with watched_core(ahead=False, jumps=False, device=device) as (core, _):
        expected = generate(core, 0)
    for ahead in (True, False):
        with watched_core(ahead=ahead, device=device) as (core, _):
            assert generate(core, 0) == expected
            assert core.core.scheduler.counters.num_known_tokens > 40
    for scarce in SCARCE:
        with watched_core(ahead=True, device=device, **scarce) as (core, _):
            assert generate(core, 0) == expected
            assert core.core.scheduler.counters.num_known_tokens

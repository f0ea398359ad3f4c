"""What a prompt with media may have, once all of it is known."""

import pytest

from tests.support.media_items import WITH_TIME, WITH_VIDEO, video_item
from tokenmill_engine.errors import ContextLengthError
from tokenmill_server.multimodal.media_request import MediaLimits, check_positions


def test_videos_may_last_as_long_as_there_are_positions() -> None:
    """4 tokens, and 11 positions where the time counts; one more is for the first token of the output."""
    limits, items = MediaLimits(num_positions=32), [video_item("a", 0, seconds=5.0)]
    check_positions(24, items, WITH_TIME, limits)
    with pytest.raises(ContextLengthError, match="takes 32 positions of the 32 that there are; send shorter ones"):
        check_positions(25, items, WITH_TIME, limits)
    check_positions(32, items, WITH_VIDEO, limits)

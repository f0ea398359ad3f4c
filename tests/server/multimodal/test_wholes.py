"""Videos whose groups of frames are remembered one by one."""

from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.wholes import Wholes


def part(number: int) -> PreparedItem:
    return PreparedItem("video", bytes([number]) * 32, 2, (1, 2, 4), {})


def whole(*numbers: int) -> PreparedItem:
    parts = tuple(map(part, numbers))
    return PreparedItem("video", bytes(numbers) * 8, 2 * len(parts), None, {}, parts=parts, times=(0.5,) * len(parts))


def test_a_whole_is_found_while_all_of_its_parts_are() -> None:
    wholes, known = Wholes(10_000), {part(number).key: part(number) for number in (1, 2, 3)}
    video = whole(1, 2, 1, 3)
    assert wholes.find(video.key, known.get) is None
    wholes.remember(video)
    assert wholes.find(video.key, known.get) == video
    del known[part(2).key]
    assert wholes.find(video.key, known.get) is None


def test_the_latest_are_remembered() -> None:
    wholes, known = Wholes(512 * 5), {part(number).key: part(number) for number in range(9)}
    videos = [whole(0, 1), whole(2, 3), whole(4, 5)]
    for video in videos:
        wholes.remember(video)
        wholes.remember(video)
    assert [wholes.find(video.key, known.get) is not None for video in videos] == [False, True, True]
    wholes.remember(whole(0, 1, 2, 3, 4, 5))  # more than all of it
    assert wholes.find(videos[2].key, known.get) is None

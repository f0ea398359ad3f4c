"""`multi_modal_data` of `LLM.generate`: taken as vLLM takes it, or refused with a sentence."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from tests.support.pictures import noise
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.multimodal.given import given_media
from tokenmill_server.multimodal.given_video import DEFAULT_FPS, GivenVideo
from tokenmill_server.multimodal.parts import ImageSource, MediaParts, MediaSource, VideoSource

PIXELS = noise(4, 6)
IMAGE = Image.fromarray(PIXELS)
FRAMES = np.stack([noise(4, 6, seed) for seed in range(5)])


def taken(data: Any, uuids: Any = None) -> list[MediaSource]:
    return given_media(data, uuids, MediaParts("tiny", images=True, videos=True, local=True), "prompt 0")


def pixels_of(sources: list[MediaSource]) -> list[list[Any]]:
    """Of each image, and of each frame of a video."""
    found = []
    for source in sources:
        content = source.content
        frames = content.frames if isinstance(content, GivenVideo) else [content]
        found.append([np.asarray(frame).tolist() for frame in frames])
    return found


def video_of(value: Any) -> GivenVideo:
    (source,) = taken({"video": value})
    assert isinstance(source, VideoSource)
    assert isinstance(source.video, GivenVideo)
    return source.video


@pytest.mark.parametrize("data", [IMAGE, [IMAGE], (IMAGE,), PIXELS, [PIXELS], PIXELS[None]])
def test_one_image(data: Any) -> None:
    sources = taken({"image": data})
    assert pixels_of(sources) == [[PIXELS.tolist()]]
    assert sources[0].param == "multi_modal_data['image'][0]"


def test_several_of_each_kind() -> None:
    film = list(FRAMES[:2])
    sources = taken({"video": [FRAMES, film, (film, {"fps": 2})], "image": [IMAGE, FRAMES[1]]})
    assert [source.kind for source in sources] == ["image"] * 2 + ["video"] * 3
    wanted = [[PIXELS], [FRAMES[1]], FRAMES, film, film]
    assert pixels_of(sources) == [[np.asarray(frame).tolist() for frame in frames] for frames in wanted]


@pytest.mark.parametrize("data", [FRAMES, list(FRAMES), [Image.fromarray(frame) for frame in FRAMES], FRAMES[None]])
def test_one_video(data: Any) -> None:
    video = video_of(data)
    assert [np.asarray(frame).tolist() for frame in video.frames] == FRAMES.tolist()
    assert (video.fps, video.num_frames, video.chosen) == (DEFAULT_FPS, 5, None)


@pytest.mark.parametrize(
    ("said", "fps", "total", "chosen"),
    [
        ({}, DEFAULT_FPS, 5, None),
        ({"fps": 4, "duration": 1.25, "video_backend": "mine"}, 4.0, 5, None),
        ({"do_sample_frames": False}, DEFAULT_FPS, 5, (0, 1, 2, 3, 4)),
        ({"frames_indices": range(5), "do_sample_frames": True}, DEFAULT_FPS, 5, None),
        ({"frames_indices": range(5)}, DEFAULT_FPS, 5, (0, 1, 2, 3, 4)),
        ({"fps": 8.0, "frames_indices": np.arange(5) * 2, "total_num_frames": 10}, 8.0, 10, (0, 2, 4, 6, 8)),
    ],
)
def test_metadata_of_a_video(said: dict[str, Any], fps: float, total: int, chosen: Any) -> None:
    video = video_of((FRAMES, said))
    assert (video.fps, video.num_frames, video.chosen) == (fps, total, chosen)


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"fps": 0}, "fps must be a number above 0, not 0"),
        ({"fps": "2"}, "fps must be a number above 0"),
        ({"frames_indices": [0, 1]}, "frames_indices must be the numbers of its 5 frames, ascending"),
        ({"frames_indices": [0, 1, 2, 4, 3]}, "its 5 frames, ascending"),
        ({"total_num_frames": 9}, "total_num_frames is 9, which does not fit 5 frames .* frames_indices says"),
        ({"frames_indices": range(5, 10), "total_num_frames": 9}, "does not fit 5 frames up to number 9"),
        ({"frames_indices": [0, 2, 4, 6, 8], "total_num_frames": 9, "do_sample_frames": True}, "chosen already"),
        ({"rate": 3}, "'rate' is not known"),
    ],
)
def test_metadata_that_do_not_fit(said: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        video_of((FRAMES, said))


def test_uuids() -> None:
    assert [source.uuid for source in taken({"image": IMAGE}, {"image": "a"})] == ["a"]
    sources = taken({"image": [IMAGE, None], "video": None}, {"image": [None, "b"], "video": ["c"]})
    assert [source.uuid for source in sources] == [None, "b", "c"]
    assert [source.content is None for source in sources] == [False, True, True]
    assert isinstance(sources[1], ImageSource)
    assert taken(None, None) == []


@pytest.mark.parametrize(
    ("data", "uuids", "message"),
    [
        ({"image": [IMAGE, None]}, None, r"\[1\] of prompt 0 is None, and no uuid"),
        ({"image": [IMAGE, IMAGE]}, {"image": ["a"]}, "of prompt 0 has 1 entries, and .* 2"),
        ({"image": IMAGE}, {"image": [""]}, "uuid must be a text of 1 to"),
        ({"audio": 1}, None, "multi_modal_data of prompt 0 has 'audio'; known are image and video"),
        ({"image": np.zeros((4, 6, 3), np.float32)}, None, r"an array of float32 \[4, 6, 3\]; pixels are uint8"),
        ({"image": np.zeros((3, 4, 6), np.uint8)}, None, "red, green and blue in the last dimension"),
        ({"image": np.zeros((0, 6, 3), np.uint8)}, None, "pixels are uint8"),
        ({"video": np.zeros((2, 4, 6, 4), np.uint8)}, None, "red, green and blue in the last dimension"),
        ({"video": [PIXELS, noise(4, 7)]}, None, "frames of different sizes"),
        ({"video": [[]]}, None, r"\['video'\]\[0\] of prompt 0 has no frames"),
    ],
)
def test_refusals(data: Any, uuids: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        taken(data, uuids)


@pytest.mark.parametrize(
    ("data", "uuids", "message"),
    [
        (IMAGE, None, "multi_modal_data of prompt 0 must be a dict"),
        ({"image": "cat.jpg"}, None, "must be an image of Pillow's or uint8 .*; got str"),
        ({"image": [IMAGE, b"x"]}, None, r"\[1\] of prompt 0 must be an image .*; got bytes"),
        ({"video": "cat.mp4"}, None, r"or \(frames, dict\), or a list of these; got str"),
        ({"video": [FRAMES, 5]}, None, "; got int"),
        ({"image": IMAGE}, {"image": 5}, "must be text, or a list of texts and None; got int"),
    ],
)
def test_wrong_types(data: Any, uuids: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        taken(data, uuids)


def test_kinds_that_a_model_does_not_take() -> None:
    parts = MediaParts("tiny", images=True, local=True)
    with pytest.raises(InvalidRequestError, match=r"videos in multi_modal_data of prompt 1 .* takes text and images"):
        given_media({"video": FRAMES}, None, parts, "prompt 1")

"""Flags of images."""

import json
import logging
import re
from typing import Any

import pytest

from tests.support.tiny_media_models import MediaFamily, cached_tiny_media_model, make_tiny_media_model
from tokenmill_engine.errors import ConfigError
from tokenmill_server.config import Configuration
from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.flags.media import domain_list
from tokenmill_server.flags.media_limits import prompt_limits
from tokenmill_server.flags.values import FlagValues, offer_keywords
from tokenmill_server.multimodal.processor_kwargs import ProcessorKwargs
from tokenmill_server.multimodal.settings import GIB, MIB, PromptLimits
from tokenmill_server.multimodal.video_reading import VideoReading


def configure(*arguments: str, **environment: str) -> Configuration:
    return build_configuration(read_flags(["--device", "cpu", *arguments], environment))


@pytest.mark.parametrize(
    ("value", "images", "videos"),
    [
        ('{"image": 4}', 4, 999),
        ("image=4", 4, 999),
        ("image=4,video=1", 4, 1),
        ({"image": 4, "video": 0}, 4, 0),
        ('{"image": {"count": 5, "width": 512, "height": 512}}', 5, 999),
        ('{"video": {"count": 2, "num_frames": 32, "width": 512, "height": 512}}', 999, 2),
        ('{"image": {"width": 512}}', 999, 999),
        ('{"image": 0}', 0, 999),
        ("{}", 999, 999),
        ('{"video": 0, "audio": 0}', 999, 0),
    ],
)
def test_limits(value: Any, images: int, videos: int) -> None:
    assert prompt_limits(value) == PromptLimits(images, videos)
    text = value if isinstance(value, str) else json.dumps(value)
    media = configure("--model", str(cached_tiny_media_model("qwen2_vl")), "--limit-mm-per-prompt", text).server.media
    assert media.limits == PromptLimits(images, videos)


@pytest.mark.parametrize(
    "value",
    ["", "image", "image=x", '{"image": -1}', '{"image": "4"}', "[1]", '{"pdf": 1}', True, {"image": {"count": "x"}}],
)
def test_what_is_no_limit(value: Any) -> None:
    with pytest.raises(ValueError, match="how many images and videos"):
        prompt_limits(value)


def test_sound_is_refused() -> None:
    with pytest.raises(ConfigError, match="audio is not supported, its limit is 0"):
        configure("--limit-mm-per-prompt", '{"image": 2, "audio": 1}')


def test_domains() -> None:
    assert domain_list("a.example,B.example.") == ("a.example", "b.example")
    assert domain_list(["Bücher.example", "10.0.0.7", "::1"]) == ("xn--bcher-kva.example", "10.0.0.7", "::1")
    for value in (
        "https://a.example",
        "a.example/x",
        "a.example:80",
        "*.example",
        "u@a.example",
        "a" * 70 + ".example",
    ):
        with pytest.raises(ValueError, match="without https"):
            domain_list(value)


def test_variables_of_vllm() -> None:
    media = configure(
        VLLM_MEDIA_LOADING_THREAD_COUNT="2",
        VLLM_IMAGE_FETCH_TIMEOUT="7",
        VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB="3",
        VLLM_MEDIA_URL_ALLOW_REDIRECTS="0",
    ).server.media
    assert (media.loading_threads, media.fetch_timeout_s, media.max_bytes) == (2, 7.0, 3 * 2**20)
    assert media.allow_redirects is False


def test_the_folder_must_be_there() -> None:
    with pytest.raises(ConfigError, match="--allowed-local-media-path /nowhere is not a folder"):
        configure("--allowed-local-media-path", "/nowhere")


def test_a_folder_at_home(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pictures").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    media = configure("--allowed-local-media-path", "~/pictures").server.media
    assert media.local_path == str(tmp_path / "pictures")


def test_how_images_are_prepared_must_be_known_at_start(tmp_path: Any) -> None:
    folder = make_tiny_media_model(tmp_path / "model", "qwen2_vl")
    assert configure("--model", str(folder)).engine.model.media is not None
    (folder / "preprocessor_config.json").unlink()
    with pytest.raises(ConfigError, match=re.escape("""--limit-mm-per-prompt '{"image": 0, "video": 0}'""")):
        configure("--model", str(folder))
    text_alone = configure("--model", str(folder), "--limit-mm-per-prompt", '{"image": 0, "video": 0}')
    assert text_alone.engine.model.media is None


@pytest.mark.parametrize(
    ("family", "arguments"),
    [
        ("qwen2_vl", ["--language-model-only"]),
        ("qwen2_vl", ["--limit-mm-per-prompt", "image=0,video=0"]),
        ("qwen3_vl", ["--language-model-only", "--limit-mm-per-prompt", "image=0,video=0"]),
        ("llava", ["--limit-mm-per-prompt", "image=0"]),
    ],
)
def test_text_alone_needs_nothing_that_images_do(family: MediaFamily, arguments: list[str], tmp_path: Any) -> None:
    folder = make_tiny_media_model(tmp_path / "model", family)
    (folder / "preprocessor_config.json").unlink()
    whole = configure("--model", str(cached_tiny_media_model(family))).engine
    engine = configure("--model", str(folder), "-tp", "2", *arguments).engine
    assert engine.model.media is None
    assert engine.model.num_parameters < whole.model.num_parameters


@pytest.mark.parametrize(
    ("family", "arguments", "limits"),
    [
        ("llava", [], (999, 0)),
        ("llava", ["--limit-mm-per-prompt", "image=2,video=3"], (2, 0)),
        ("llava", ["--limit-mm-per-prompt", "image=0,video=3"], None),
        ("qwen2_vl", [], (999, 999)),
        ("qwen2_vl", ["--limit-mm-per-prompt", "image=0,video=3"], (0, 3)),
        ("qwen2_vl", ["--limit-mm-per-prompt", "image=1,video=0"], (1, 0)),
        ("qwen2_vl", ["--limit-mm-per-prompt", "image=0,video=0"], None),
    ],
)
def test_who_takes_nothing_has_nothing_for_media(
    family: MediaFamily, arguments: list[str], limits: tuple[int, int] | None
) -> None:
    configuration = configure("--model", str(cached_tiny_media_model(family)), "-asc", "1", *arguments)
    assert (configuration.engine.model.media is not None) == (limits is not None)
    assert (configuration.engine.media_store_bytes > 0) == (limits is not None)
    if limits is not None:
        assert configuration.server.media.limits == PromptLimits(*limits)


def test_text_alone_and_some_images_contradict_each_other() -> None:
    with pytest.raises(ConfigError, match="--language-model-only contradicts --limit-mm-per-prompt"):
        configure("--language-model-only", "--limit-mm-per-prompt", "image=3")


def test_each_worker_needs_a_head_of_the_encoder_or_all_of_it() -> None:
    """The tiny encoder has two; the decoder four."""
    arguments = ["--model", str(cached_tiny_media_model("qwen2_vl")), "-tp", "4"]
    with pytest.raises(
        ConfigError, match=r"-parallel-size 4 is more than the 2 attention heads.* --mm-encoder-tp-mode data"
    ):
        configure(*arguments)
    assert configure(*arguments, "--mm-encoder-tp-mode", "data").engine.model.encoder_mode == "data"
    assert configure(*arguments, "--language-model-only").engine.parallel.tensor_parallel_size == 4


def test_the_first_stage_has_the_layers_behind_which_images_are_added() -> None:
    """Two of three in the tiny model, which is shared out so by itself."""
    arguments = ["--model", str(cached_tiny_media_model("qwen3_vl")), "-pp"]
    assert configure(*arguments, "2").engine.parallel.pipeline_parallel_size == 2
    with pytest.raises(ConfigError, match=r"-parallel-size 3 leaves 1 of .* which needs the 2 behind"):
        configure(*arguments, "3")
    with pytest.raises(ConfigError, match=r"-parallel-layers 1,2 leaves 1"):
        configure(*arguments, "2", "--pipeline-parallel-layers", "1,2")
    assert configure(*arguments, "3", "--language-model-only").engine.parallel.pipeline_parallel_size == 3


def test_who_has_nothing_to_share_may_say_how() -> None:
    model = str(cached_tiny_media_model("qwen2_vl"))
    assert configure("--model", model, "--mm-encoder-tp-mode", "data").engine.parallel.world_size == 1
    assert configure("--mm-encoder-tp-mode", "data", "-tp", "3").engine.model.media is None


def test_llava() -> None:
    assert configure("--model", str(cached_tiny_media_model("llava"))).engine.model.media is not None


def test_a_model_of_text_alone_cannot_be_told_of_media() -> None:
    for flag, value, of_nothing in (
        ("--limit-mm-per-prompt", '{"image": 2}', '{"image": 0}'),
        ("--media-io-kwargs", '{"video": {"fps": 1}}', "{}"),
        ("--mm-processor-kwargs", '{"max_pixels": 4096}', "{}"),
    ):
        with pytest.raises(
            ConfigError, match=f"^{flag}: the model SmolLM2-135M-Instruct takes text only; leave it out"
        ):
            configure(flag, value)
        assert configure(flag, of_nothing).engine.model.media is None
        assert configure(**{f"TOKENMILL_{flag[2:].replace('-', '_').upper()}": value}).engine.model.media is None
        model = str(cached_tiny_media_model("qwen2_vl"))
        if flag != "--limit-mm-per-prompt":
            assert configure("--model", model, "--language-model-only", flag, value).engine.model.media is None


def test_videos() -> None:
    media = configure(
        *("--model", str(cached_tiny_media_model("qwen2_vl"))),
        "--media-io-kwargs",
        '{"video": {"num_frames": 16}}',
        "--mm-processor-kwargs",
        '{"max_pixels": 602112}',
        "--trust-request-mm-kwargs",
        *("--max-video-pixels", "1000000", "--max-video-frames", "64", "--max-video-duration", "60"),
        *("--video-decode-timeout", "5"),
        VLLM_VIDEO_FETCH_TIMEOUT="9",
    ).server.media
    assert media.video_reading == VideoReading(16)
    assert media.processor_kwargs == ProcessorKwargs(max_pixels=602112)
    assert media.trusts_requests
    assert (media.max_video_pixels, media.max_video_frames, media.max_video_duration_s) == (1000000, 64, 60.0)
    assert (media.video_decode_timeout_s, media.video_fetch_timeout_s, media.fetch_timeout_s) == (5.0, 9.0, 5.0)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--media-io-kwargs", '{"video": {"frames": 1}}', "video.frames is not known; known are num_frames and fps"),
        ("--media-io-kwargs", "x", "an object such as"),
        ("--mm-processor-kwargs", '{"num_crops": 1}', "'num_crops' is not known; known are size"),
    ],
)
def test_what_media_cannot_be_told(flag: str, value: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        configure(flag, value)


def test_who_keeps_prepared_media(caplog: pytest.LogCaptureFixture) -> None:
    """An engine core keeps tensors for later requests if it is the only one, of the only API server."""
    model = ("--model", str(cached_tiny_media_model("qwen2_vl")))
    cases: list[tuple[tuple[str, ...], int, str]] = [
        ((*model, "--api-server-count", "1"), 4 * GIB - 64 * MIB, "tensors in the engine core"),
        ((*model, "--api-server-count", "1", "--mm-processor-cache-gb", "0.5"), 480 * MIB, "at most 0.5 GiB"),
        ((*model, "--api-server-count", "3"), 0, "each of 3 API servers (lru), at most 12 GiB"),
        ((*model, "--api-server-count", "1", "-dp", "2"), 0, "in the API server (lru), at most 4 GiB"),
        ((*model, "--api-server-count", "1", "--mm-processor-cache-gb", "0"), 0, "media: none"),
        ((*model, "--limit-mm-per-prompt", '{"image": 0, "video": 0}'), 0, ""),
        ((), 0, ""),
    ]
    for arguments, num_bytes, line in cases:
        caplog.clear()
        with caplog.at_level(logging.INFO):
            assert configure(*arguments).engine.media_store_bytes == num_bytes, arguments
        said = [record.message for record in caplog.records if "prepared media" in record.message]
        assert (len(said), line in "".join(said)) == (1 if line else 0, True), arguments


@pytest.mark.parametrize("value", ["-1", "x", "nan", "inf"])
def test_what_is_no_size_of_a_cache(value: str) -> None:
    with pytest.raises(ConfigError, match="--mm-processor-cache-gb"):
        configure("--mm-processor-cache-gb", value)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("limit_mm_per_prompt", '{"image": 1}'),
        ("mm_processor_kwargs", '{"max_pixels": 20000}'),
        ("media_io_kwargs", '{"video": {"num_frames": 4}}'),
        ("allowed_media_domains", "a.example,b.example"),
        ("max_media_bytes", "8M"),
    ],
)
def test_values_read_from_a_command_line_may_be_given_to_python(key: str, text: str) -> None:
    value = read_flags([f"--{key.replace('_', '-')}", text], {})[key]
    values = FlagValues()
    offer_keywords(values, {key: value}, "LLM")
    assert values[key] == value
    assert values.is_given(key)

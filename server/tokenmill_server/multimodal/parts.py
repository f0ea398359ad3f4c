"""Images and videos in the content of messages: found, checked and replaced by what chat templates expect there.

Knows nothing of where images come from, nor of models.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from PIL import Image

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.multimodal.given_video import GivenVideo
from tokenmill_server.multimodal.processor import Detail
from tokenmill_server.multimodal.settings import PromptLimits
from tokenmill_server.processing.chat_template import TEXT_PARTS, text_of_content
from tokenmill_server.processing.shown import shown

IMAGE_PART = {"type": "image"}
VIDEO_PART = {"type": "video"}
"""An image and a video, in a content that a template is to render."""
PLACES = {"image": IMAGE_PART, "video": VIDEO_PART}

_IMAGE_KINDS = frozenset({"image_url", "input_image"})
_VIDEO_KIND = "video_url"
_LOCAL_KIND = "image_pil"
_DETAILS = ("auto", "low", "high")
_MAX_UUID_CHARS = 1024
_MAX_IGNORED = 32
"""Keys without effect that are noted; more would not be shown."""
_KEYS = {
    **{kind: frozenset({"type", key}) for kind, key in TEXT_PARTS.items()},
    **dict.fromkeys(_IMAGE_KINDS, frozenset({"type", "image_url", "uuid", "detail"})),
    _LOCAL_KIND: frozenset({"type", "image_pil", "uuid", "detail"}),
    _VIDEO_KIND: frozenset({"type", "video_url", "uuid"}),
}
"""Of a content part, that have an effect."""
_INNER_KEYS = {"image_url": {"url", "detail"}, "video_url": {"url"}}


@dataclass(slots=True, frozen=True)
class ImageSource:
    """An image that a message names."""

    image: str | Image.Image | None
    """An address (http, https, data or file), or within a Python program the image itself; None: it was sent before,
    under the same `uuid`."""
    detail: Detail
    param: str
    """The field it came from."""
    uuid: str | None = None
    """What the client calls it."""
    kind: ClassVar[str] = "image"

    @property
    def content(self) -> str | Image.Image | None:
        return self.image


@dataclass(slots=True, frozen=True)
class VideoSource:
    """A video that a message names."""

    video: str | GivenVideo | None
    """An address (http, https, data or file), or within a Python program the frames; None: it was sent before, under
    the same `uuid`."""
    param: str
    """The field it came from."""
    uuid: str | None = None
    """What the client calls it."""
    kind: ClassVar[str] = "video"

    @property
    def content(self) -> str | GivenVideo | None:
        return self.video


MediaSource = ImageSource | VideoSource


class MediaParts:
    """Takes the media out of the contents of messages."""

    def __init__(self, model: str, *, images: bool = False, videos: bool = False, local: bool = False) -> None:
        """Which kinds `model` takes. `local`: messages come from within the same program, which may hand over images of
        Pillow's."""
        self.sources: list[MediaSource] = []
        """What was found, in order."""
        self.ignored: list[str] = []
        """Keys of parts that had no effect, the first of them."""
        self._model = model
        self._kinds = {"image": images, "video": videos}
        self._known = frozenset[str]()
        if images:
            self._known |= _IMAGE_KINDS | ({_LOCAL_KIND} if local else set())
        if videos:
            self._known |= {_VIDEO_KIND}
        self._image_kinds = "image_url, image_pil" if local else "image_url"

    def takes(self, kind: str) -> bool:
        """Whether the model takes an `image`, or a `video`."""
        return self._kinds[kind]

    def refusal(self, what: str, param: str) -> InvalidRequestError:
        """For `what`, which the model does not take."""
        kinds = [f"images ({self._image_kinds})"] * self.takes("image") + ["videos (video_url)"] * self.takes("video")
        takes = f"{', '.join(['text', *kinds[:-1]])} and {kinds[-1]}" if kinds else "text only"
        return InvalidRequestError(
            f"{what} are not supported: the model {shown(self._model)} takes {takes} here",
            param,
            "unsupported_parameter",
        )

    def content(self, given: Any, path: str) -> Any:
        """The content of one message: text, or, if it has media, a list of `{"type": "text", "text": ...}`,
        `IMAGE_PART` and `VIDEO_PART` in the order given.

        Raises InvalidRequestError naming the part at `path` for anything else.
        """
        kinds = [_kind_of(part) for part in given] if isinstance(given, list) else []
        for index, kind in enumerate(kinds):
            if kind is not None and kind not in TEXT_PARTS and kind not in self._known:
                raise self.refusal(f"content parts of type {shown(kind)}", f"{path}[{index}].type")
            if kind is not None:
                self._note_ignored(given[index], kind, f"{path}[{index}]")
        if not self._known & set(kinds):
            return text_of_content(given, path)
        parts: list[dict[str, Any]] = []
        for index, (part, kind) in enumerate(zip(given, kinds, strict=True)):
            if kind in self._known:
                source = _source(part, kind or "", f"{path}[{index}]")
                self.sources.append(source)
                parts.append(PLACES[source.kind])
            else:
                parts.append({"type": "text", "text": _text_of_part(part, index, path)})
        return parts

    def _note_ignored(self, part: dict[str, Any], kind: str, path: str) -> None:
        """`kind` is one that is known."""
        names = _without_effect(part, _KEYS[kind])
        for field, known in _INNER_KEYS.items():
            inner = part.get(field)
            if field in _KEYS[kind] and isinstance(inner, dict):
                names += [f"{field}.{name}" for name in _without_effect(inner, known)]
                if "detail" in known & inner.keys() and part.get("detail") is not None:
                    names.append("detail")
        self.ignored += [f"{path}.{name}" for name in sorted(names)][: _MAX_IGNORED - len(self.ignored)]


def check_num_media(sources: Sequence[MediaSource], limits: PromptLimits) -> None:
    """Raises InvalidRequestError for more images or videos than a request may have."""
    for kind, most in (("image", limits.images), ("video", limits.videos)):
        some = [source for source in sources if source.kind == kind]
        if len(some) > most:
            raise InvalidRequestError(
                f"the request has {len(some)} {kind}s, more than the {most} that --limit-mm-per-prompt allows",
                some[most].param,
            )


def _without_effect(owner: dict[str, Any], known: Set[str]) -> list[str]:
    """Keys that nothing here knows, although they ask for something."""
    return [str(key) for key in owner.keys() - known if owner[key] is not None]


def _kind_of(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _text_of_part(part: Any, index: int, path: str) -> str:
    """Of one part that is no image, with the errors that `text_of_content` has for it."""
    if _kind_of(part) in TEXT_PARTS or isinstance(part, str):
        return text_of_content([part], path) or ""
    padding = [""] * index  # so that the error names the right one
    return text_of_content([*padding, part], path) or ""


def _source(part: dict[str, Any], kind: str, path: str) -> MediaSource:
    return _video_source(part, path) if kind == _VIDEO_KIND else _image_source(part, kind, path)


def _video_source(part: dict[str, Any], path: str) -> VideoSource:
    uuid, field, value = uuid_of(part.get("uuid"), f"{path}.uuid"), _VIDEO_KIND, part.get(_VIDEO_KIND)
    if isinstance(value, dict):
        field, value = "video_url.url", value.get("url")
    if value is None and uuid is not None:
        return VideoSource(None, f"{path}.uuid", uuid)
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(
            'a video is {"type": "video_url", "video_url": {"url": "https://..."}}, or with a data: address; its '
            "url is missing or no text",
            f"{path}.{field}",
        )
    return VideoSource(value, f"{path}.{field}", uuid)


def _image_source(part: dict[str, Any], kind: str, path: str) -> ImageSource:
    uuid = uuid_of(part.get("uuid"), f"{path}.uuid")
    if kind == _LOCAL_KIND:
        image = part.get(kind)
        if not isinstance(image, Image.Image) and (image is not None or uuid is None):
            raise InvalidRequestError("image_pil must be an image of Pillow's", f"{path}.{kind}")
        return ImageSource(image, _detail(part, path), path if image is not None else f"{path}.uuid", uuid)
    field, value = "image_url", part.get("image_url")
    detail = _detail(part, path)
    if isinstance(value, dict):
        detail = _detail(value, f"{path}.{field}") if "detail" in value else detail
        field, value = "image_url.url", value.get("url")
    if value is None and uuid is not None:
        return ImageSource(None, detail, f"{path}.uuid", uuid)
    if not isinstance(value, str) or not value:
        raise InvalidRequestError(
            'an image is {"type": "image_url", "image_url": {"url": "https://..."}}, or with a data: address; its '
            "url is missing or no text",
            f"{path}.{field}",
        )
    return ImageSource(value, detail, f"{path}.{field}", uuid)


def uuid_of(value: object, path: str) -> str | None:
    """What a client calls an image or a video. Raises InvalidRequestError naming `path` for what is no such name."""
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= _MAX_UUID_CHARS):
        raise InvalidRequestError(f"uuid must be a text of 1 to {_MAX_UUID_CHARS} characters", path)
    return value


def _detail(owner: dict[str, Any], path: str) -> Detail:
    detail = owner.get("detail")
    if detail is None:
        return "auto"
    if detail not in _DETAILS:
        raise InvalidRequestError(f"detail must be one of {', '.join(_DETAILS)}, got {shown(detail)}", f"{path}.detail")
    return cast(Detail, detail)

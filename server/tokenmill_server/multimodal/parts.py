"""Images in the content of messages: found, checked and replaced by what chat templates expect in their place.

Knows nothing of where images come from, nor of models.
"""

from dataclasses import dataclass
from typing import Any, cast

from PIL import Image

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.multimodal.processor import Detail
from tokenmill_server.processing.chat_template import TEXT_PARTS, text_of_content
from tokenmill_server.processing.shown import shown

IMAGE_PART = {"type": "image"}
"""An image, in a content that a template is to render."""

_IMAGE_KINDS = frozenset({"image_url", "input_image"})
_LOCAL_KIND = "image_pil"
_OTHER_MEDIA = frozenset(
    {"input_audio", "audio_url", "video_url", "image_embeds", "audio_embeds", "video_embeds", "prompt_embeds"}
)
_DETAILS = ("auto", "low", "high")
_MAX_UUID_CHARS = 1024


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


def content_with_images(content: Any, path: str, images: list[ImageSource], *, local: bool = False) -> Any:
    """The content of one message: text, or, if it has images, a list of `{"type": "text", "text": ...}` and
    `IMAGE_PART` in the order given. Its images are appended to `images`. With `local` it comes from within the same
    program, which may hand over images of Pillow's.

    Raises InvalidRequestError naming the part at `path` for anything else.
    """
    known = _IMAGE_KINDS | {_LOCAL_KIND} if local else _IMAGE_KINDS
    kinds = [_kind_of(part) for part in content] if isinstance(content, list) else []
    for index, kind in enumerate(kinds):
        if kind in _OTHER_MEDIA or (kind == _LOCAL_KIND and not local):
            raise InvalidRequestError(
                f"content parts of type {shown(kind)} are not supported; this server takes text and images (image_url)",
                f"{path}[{index}].type",
                "unsupported_parameter",
            )
    if not known & set(kinds):
        return text_of_content(content, path)
    parts: list[dict[str, Any]] = []
    for index, (part, kind) in enumerate(zip(content, kinds, strict=True)):
        if kind in known:
            images.append(_image_source(part, kind, f"{path}[{index}]"))
            parts.append(IMAGE_PART)
        else:
            parts.append({"type": "text", "text": _text_of_part(part, index, path)})
    return parts


def check_num_images(images: list[ImageSource], max_images: int) -> None:
    """Raises InvalidRequestError for more images than a request may have."""
    if len(images) > max_images:
        raise InvalidRequestError(
            f"the request has {len(images)} images, more than the {max_images} that --limit-mm-per-prompt allows",
            images[max_images].param,
        )


def _kind_of(part: Any) -> str | None:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else None


def _text_of_part(part: Any, index: int, path: str) -> str:
    """Of one part that is no image, with the errors that `text_of_content` has for it."""
    if _kind_of(part) in TEXT_PARTS or isinstance(part, str):
        return text_of_content([part], path) or ""
    padding = [""] * index  # so that the error names the right one
    return text_of_content([*padding, part], path) or ""


def _image_source(part: dict[str, Any], kind: str, path: str) -> ImageSource:
    uuid = _uuid(part, path)
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


def _uuid(part: dict[str, Any], path: str) -> str | None:
    uuid = part.get("uuid")
    if uuid is not None and (not isinstance(uuid, str) or not 0 < len(uuid) <= _MAX_UUID_CHARS):
        raise InvalidRequestError(f"uuid must be a text of 1 to {_MAX_UUID_CHARS} characters", f"{path}.uuid")
    return uuid


def _detail(owner: dict[str, Any], path: str) -> Detail:
    detail = owner.get("detail")
    if detail is None:
        return "auto"
    if detail not in _DETAILS:
        raise InvalidRequestError(f"detail must be one of {', '.join(_DETAILS)}, got {shown(detail)}", f"{path}.detail")
    return cast(Detail, detail)

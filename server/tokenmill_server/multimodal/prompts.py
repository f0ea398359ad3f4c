"""Where the images of a conversation stand in its prompt.

A template writes the model's image token once for each image; it becomes as many of them as the image has rows. Only
those that the template wrote count: what a user typed stays text that happens to name a token, whatever it says.
"""

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.errors import ConfigError, InvalidRequestError
from tokenmill_engine.messages import MediaItem
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.parts import IMAGE_PART
from tokenmill_server.processing.chat_template import ChatTemplate, Message
from tokenmill_server.processing.tokenizer import Tokenizer

_PROBE = "probe"


class Placeholders:
    """The image token of one model and how its template writes it."""

    def __init__(self, media: MediaConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        """Raises ConfigError if the tokenizer has no image token."""
        text = tokenizer.token_string(media.image_token_id)
        if text is None:
            raise ConfigError(f"the tokenizer has no token {media.image_token_id}, which stands for images")
        self.token_id = media.image_token_id
        self.token = text
        around = [
            "" if token_id is None else tokenizer.token_string(token_id) or ""
            for token_id in (media.vision_start_token_id, media.vision_end_token_id)
        ]
        self._in_text = text.join(around)
        """What stands for an image in the text that a template gets, if it knows of text alone."""
        self._takes_lists = template is not None and self._renders_images(template)

    def _renders_images(self, template: ChatTemplate) -> bool:
        """Whether the template makes an image token of an image in a list of parts."""
        message = {"role": "user", "content": [IMAGE_PART, {"type": "text", "text": _PROBE}]}
        try:
            text = template.render([message], add_generation_prompt=False, variables={})
        except InvalidRequestError:
            return False
        return text.count(self.token) == 1 and _PROBE in text

    def prepared(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the template takes them: with lists of parts, or with text that has placeholders in it."""
        return [
            {**message, "content": self._as_text(message["content"])}
            if isinstance(message["content"], list) and not self._takes_lists
            else message
            for message in messages
        ]

    def _as_text(self, parts: Sequence[Mapping[str, Any]]) -> str:
        return "\n".join(self._in_text if part is IMAGE_PART else str(part["text"]) for part in parts)

    def expand(
        self, token_ids: Sequence[int], are_images: Sequence[bool], images: Sequence[PreparedItem]
    ) -> tuple[list[int], tuple[MediaItem, ...]]:
        """The prompt with one image token for each row, and where each image stands. `are_images` says of each image
        token in `token_ids`, in order, whether it stands for an image."""
        if list(token_ids).count(self.token_id) != len(are_images):
            raise InvalidRequestError("the text reads like the model's own name for images", "messages")
        expanded: list[int] = []
        items: list[MediaItem] = []
        flags, rest = iter(are_images), iter(images)
        for token_id in token_ids:
            if token_id == self.token_id and next(flags):
                image = next(rest)
                items.append(image.at(len(expanded)))
                expanded.extend([token_id] * image.num_tokens)
            else:
                expanded.append(token_id)
        return expanded, tuple(items)


class TypedTokens:
    """Keeps the image tokens that a user typed apart from those that a template writes: they are something else while
    the template works."""

    def __init__(self, token: str) -> None:
        self._token = token
        self._mark = f"typed{uuid.uuid4().hex}"

    def hidden(self, value: Any) -> Any:
        """A copy of messages or variables with every image token in their texts replaced."""
        if isinstance(value, str):
            return value.replace(self._token, self._mark)
        if isinstance(value, Mapping):
            return (
                value if value is IMAGE_PART else {self.hidden(key): self.hidden(each) for key, each in value.items()}
            )
        if isinstance(value, list | tuple):
            return [self.hidden(each) for each in value]
        return value

    def shown(self, text: str, num_images: int) -> tuple[str, list[bool]]:
        """The rendered text with those tokens back in place, and of each image token in it whether it stands for an
        image.

        Raises InvalidRequestError unless the template wrote one for each image.
        """
        are_images: list[bool] = []
        for index, piece in enumerate(text.split(self._mark)):
            are_images += [False] * (index > 0) + [True] * piece.count(self._token)
        if sum(are_images) != num_images:
            raise InvalidRequestError(
                f"the chat template writes {sum(are_images)} places for images where the conversation has {num_images}",
                "messages",
            )
        return text.replace(self._mark, self._token), are_images

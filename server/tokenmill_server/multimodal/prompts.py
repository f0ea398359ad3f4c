"""Where the images and videos of a conversation stand in its prompt.

A template writes the model's token for an image or a video once for each; it becomes as many of them as the encoder
gives rows. Only those that the template wrote count: what a user typed stays text that happens to name a token.
"""

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill_engine.config.media import MediaConfig
from tokenmill_engine.errors import ConfigError, InvalidRequestError
from tokenmill_engine.messages import MediaItem
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.parts import PLACES
from tokenmill_server.processing.chat_template import ChatTemplate, Message
from tokenmill_server.processing.tokenizer import Tokenizer

_PROBE = "probe"


@dataclass(slots=True, frozen=True)
class Expanded:
    """A prompt with media in it."""

    token_ids: list[int]
    items: tuple[MediaItem, ...]
    """Ascending."""
    order: tuple[tuple[int, int], ...]
    """Of each item, which of the media it belongs to, and which of its pieces it is."""


class Placeholders:
    """The tokens of one model for images and videos, and how its template writes them."""

    def __init__(self, media: MediaConfig, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        """Raises ConfigError if the tokenizer lacks a token."""
        self.media = media
        self._tokenizer = tokenizer
        ids = {"image": media.image_token_id}
        if media.takes_video and media.video_token_id is not None:
            ids["video"] = media.video_token_id
        self.token_ids: Mapping[str, int] = ids
        self.tokens: Mapping[str, str] = {kind: self._text_of(token_id, kind) for kind, token_id in ids.items()}
        self._around = [
            [] if token_id is None else [token_id]
            for token_id in (media.vision_start_token_id, media.vision_end_token_id)
        ]
        start, end = ("".join(tokenizer.token_string(each) or "" for each in side) for side in self._around)
        self._in_text = {kind: f"{start}{token}{end}" for kind, token in self.tokens.items()}
        """What stands for them in the text that a template gets, if it knows of text alone."""
        self._in_lists = {
            kind for kind in self.tokens if template is not None and self._renders(template, PLACES[kind], kind)
        }

    def _text_of(self, token_id: int, kind: str) -> str:
        text = self._tokenizer.token_string(token_id)
        if text is None:
            raise ConfigError(f"the tokenizer has no token {token_id}, which stands for {kind}s")
        return text

    def _renders(self, template: ChatTemplate, place: Mapping[str, str], kind: str) -> bool:
        """Whether the template makes a token of an image or a video in a list of parts."""
        message = {"role": "user", "content": [place, {"type": "text", "text": _PROBE}]}
        try:
            text = template.render([message], add_generation_prompt=False, variables={})
        except InvalidRequestError:
            return False
        return text.count(self.tokens[kind]) == 1 and _PROBE in text

    def prepared(self, messages: Sequence[Message]) -> list[Message]:
        """Messages as the template takes them: with lists of parts, or with text that has placeholders in it."""
        return [
            {**message, "content": self._content(message["content"])}
            if isinstance(message["content"], list)
            else message
            for message in messages
        ]

    def _content(self, parts: Sequence[Mapping[str, Any]]) -> Any:
        if not self._in_lists:
            return "\n".join(self._in_text[kind] if (kind := _kind(part)) else str(part["text"]) for part in parts)
        return [
            {"type": "text", "text": self._in_text[kind]}
            if (kind := _kind(part)) and kind not in self._in_lists
            else part
            for part in parts
        ]

    def places(self, token_ids: Sequence[int], kinds: Sequence[str]) -> list[bool]:
        """As `expand` wants it for a prompt that a program wrote, where every such token stands for one of `kinds`.

        Raises InvalidRequestError unless there is one for each.
        """
        for kind, token_id in self.token_ids.items():
            num_places, num_given = sum(each == token_id for each in token_ids), kinds.count(kind)
            if num_places != num_given:
                raise InvalidRequestError(
                    f"the prompt has {num_places} places for {kind}s, and multi_modal_data {num_given} {kind}s; "
                    f"write {self._in_text[kind]} once for each, whatever its size",
                    "prompt",
                )
        tokens = set(self.token_ids.values())
        return [True] * sum(token_id in tokens for token_id in token_ids)

    def expand(self, token_ids: Sequence[int], are_places: Sequence[bool], media: Sequence[PreparedItem]) -> Expanded:
        """The prompt with one token for each row. `are_places` says of each token for an image or a video in
        `token_ids`, in order, whether it stands for one; those of a kind are in the order of `media`."""
        kinds = {token_id: kind for kind, token_id in self.token_ids.items()}
        if sum(token_id in kinds for token_id in token_ids) != len(are_places):
            raise InvalidRequestError("the text reads like the model's own name for images or videos", "messages")
        rest = {kind: iter([each for each in enumerate(media) if each[1].kind == kind]) for kind in self.tokens}
        expanded: list[int] = []
        items: list[MediaItem] = []
        order: list[tuple[int, int]] = []
        flags = iter(are_places)
        for token_id in token_ids:
            if token_id not in kinds or not next(flags):
                expanded.append(token_id)
                continue
            source, item = next(rest[kinds[token_id]])
            for number, piece in enumerate(item.pieces):
                start, end = self._sides(item, number)
                expanded.extend(start)
                items.append(piece.at(len(expanded)))
                expanded.extend([token_id] * piece.num_tokens)
                expanded.extend(end)
                order.append((source, number))
        return Expanded(expanded, tuple(items), tuple(order))

    def _sides(self, item: PreparedItem, number: int) -> tuple[list[int], list[int]]:
        """What stands in front of a group of frames that is told its time, and behind it."""
        if not item.times:
            return [], []
        start, end = self._around
        time = self._tokenizer.encode(f"<{item.times[number]:.1f} seconds>", add_special_tokens=False)
        return [*time, *start], end


def _kind(part: Mapping[str, Any]) -> str | None:
    """`image` or `video`, if that is what stands there."""
    return next((kind for kind, place in PLACES.items() if part is place), None)


class TypedTokens:
    """Keeps the tokens for images and videos that a user typed apart from those that a template writes: they are
    something else while the template works."""

    def __init__(self, tokens: Mapping[str, str]) -> None:
        """The tokens by kind."""
        mark = f"typed{uuid.uuid4().hex}"
        self._tokens = tokens
        self._marks = {kind: f"{mark}{kind}" for kind in tokens}

    def hidden(self, value: Any) -> Any:
        """A copy of messages or variables with every such token in their texts replaced."""
        if isinstance(value, str):
            for kind, token in self._tokens.items():
                value = value.replace(token, self._marks[kind])
            return value
        if isinstance(value, Mapping):
            return value if _kind(value) else {self.hidden(key): self.hidden(each) for key, each in value.items()}
        if isinstance(value, list | tuple):
            return [self.hidden(each) for each in value]
        return value

    def shown_length(self, text: str) -> int:
        """Characters of the text that `shown` gives: known without looking at each token."""
        return len(text) + sum(
            text.count(self._marks[kind]) * (len(self._tokens[kind]) - len(self._marks[kind])) for kind in self._tokens
        )

    def shown(self, text: str, kinds: Sequence[str]) -> tuple[str, list[bool]]:
        """The rendered text with those tokens back in place, and of each token in it whether it stands for an image or
        a video. `kinds`: of the media of the conversation.

        Raises InvalidRequestError unless the template wrote one for each of them.
        """
        found: list[tuple[int, bool, str]] = []
        for kind, token in self._tokens.items():
            for is_place, sought in ((True, token), (False, self._marks[kind])):
                start = text.find(sought)
                while start >= 0:
                    found.append((start, is_place, kind))
                    start = text.find(sought, start + len(sought))
        for kind in self._tokens:
            places = sum(is_place for _, is_place, each in found if each == kind)
            if places != kinds.count(kind):
                raise InvalidRequestError(
                    f"the chat template writes {places} places for {kind}s where the conversation has "
                    f"{kinds.count(kind)}",
                    "messages",
                )
        for kind, token in self._tokens.items():
            text = text.replace(self._marks[kind], token)
        return text, [is_place for _, is_place, _ in sorted(found)]

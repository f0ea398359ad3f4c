"""From a conversation with images to a prompt with images: joins templates and tokenizer with the loading of media."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.ipc.object_store import ObjectStore
from tokenmill_server.multimodal.image_options import read_image_options
from tokenmill_server.multimodal.loader import MediaLoader, TokenRoom
from tokenmill_server.multimodal.parts import ImageSource, check_num_images
from tokenmill_server.multimodal.placement import place_caches
from tokenmill_server.multimodal.prepared import PreparedMedia
from tokenmill_server.multimodal.processor import ImageProcessor
from tokenmill_server.multimodal.prompts import Placeholders, TypedTokens
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.supply import RequestSupply
from tokenmill_server.processing.chat_template import Message
from tokenmill_server.processing.input_processor import ChatOptions, InputProcessor, Prompt, Truncation


@dataclass(slots=True, frozen=True)
class ImageLimits:
    """What a request may have."""

    max_images: int
    max_image_tokens: int
    one_view_of_several: bool = False
    """A model that sees an image in several views, too, sees several images in one each, as it was trained."""


class ImageChats:
    """Images of one model, in one process."""

    def __init__(
        self, inputs: InputProcessor, placeholders: Placeholders, loader: MediaLoader, limits: ImageLimits
    ) -> None:
        self._inputs = inputs
        self._placeholders = placeholders
        self._loader = loader
        self._limits = limits

    async def encode(
        self,
        messages: list[Message],
        images: list[ImageSource],
        options: ChatOptions,
        truncation: Truncation | None = None,
        scope: tuple[str, ...] = (),
    ) -> Prompt:
        """Like `InputProcessor.encode_chat`, for messages with `images` in their contents. Uuids of images mean
        something within `scope` alone.

        Raises InvalidRequestError for an image that cannot be had, and if the prompt would have to be cut.
        """
        if not images:
            return await self._inputs.encode_chat(messages, options, truncation)
        check_num_images(images, self._limits.max_images)
        if self._limits.one_view_of_several and len(images) > 1:
            images = [replace(image, detail="low") for image in images]
        placeholders, typed = self._placeholders, TypedTokens(self._placeholders.token)
        hidden = placeholders.prepared(typed.hidden(messages))
        variables = typed.hidden(options.template_variables)
        rendered = await self._inputs.chat_text(hidden, replace(options, template_variables=variables))
        text, are_images = typed.shown(rendered, len(images))
        # Whatever is wrong with the text is known before any image is fetched.
        prompt = await self._inputs.encode_text(text, options.add_special_tokens, param="messages")
        self._inputs.check_fits(len(prompt.token_ids), prompt.param)
        room = self._inputs.max_model_len - len(prompt.token_ids) + len(images)
        loaded = await self._loader.load(images, TokenRoom(room, self._limits.max_image_tokens), scope)
        token_ids, items = placeholders.expand(prompt.token_ids, are_images, [each.item for each in loaded])
        if truncation is not None and len(self._inputs.truncated(token_ids, truncation)) < len(token_ids):
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens, and prompts with images are not truncated",
                "truncate_prompt_tokens",
            )
        supply = RequestSupply(self._loader.prepared, loaded, items)
        return replace(prompt, token_ids=token_ids, media=supply.places, media_supply=supply)

    def engine_lost(self) -> None:
        """An engine core is gone, and with it the media that it had."""
        self._loader.prepared.engine_lost()

    def close(self) -> None:
        """Ends the threads."""
        self._loader.close()


def make_image_chats(
    inputs: InputProcessor,
    engine: EngineConfig,
    settings: MediaSettings,
    num_api_servers: int = 1,
    on_lookup: Callable[[bool], None] | None = None,
    store: ObjectStore | None = None,
) -> ImageChats | None:
    """None for a model that takes text alone, or is told to. `on_lookup` is called for each image that is looked up in
    the cache, with whether it was there. `store`: where tensors are shared, if the settings say that they are.

    Raises ConfigError if images cannot be prepared.
    """
    media = engine.model.media
    if media is None or settings.limits.images == 0:
        return None
    processor = ImageProcessor(media, read_image_options(Path(engine.model.path), media))
    placeholders = Placeholders(media, inputs.tokenizer, inputs.template)
    limits = ImageLimits(settings.limits.images, engine.scheduler.max_item_tokens, media.views is not None)
    prepared = PreparedMedia(place_caches(settings, num_api_servers, engine.data_parallel_size), on_lookup, store)
    return ImageChats(inputs, placeholders, MediaLoader(processor, settings, prepared), limits)

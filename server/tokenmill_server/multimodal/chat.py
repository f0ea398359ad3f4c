"""From a conversation with media to a prompt with media: joins templates and tokenizer with the loading of media."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import InvalidRequestError, TokenmillError
from tokenmill_engine.ipc.object_store import ObjectStore
from tokenmill_server.multimodal.image_options import read_image_options
from tokenmill_server.multimodal.loader import MediaLoader, TokenRoom
from tokenmill_server.multimodal.media_request import MediaLimits, MediaRequest, check_positions
from tokenmill_server.multimodal.parts import ImageSource, MediaParts, MediaSource, check_num_media
from tokenmill_server.multimodal.placement import place_caches
from tokenmill_server.multimodal.prepared import PreparedMedia
from tokenmill_server.multimodal.processor import ImageProcessor
from tokenmill_server.multimodal.prompts import Placeholders, TypedTokens
from tokenmill_server.multimodal.settings import MediaSettings
from tokenmill_server.multimodal.supply import RequestSupply
from tokenmill_server.multimodal.under_way import UnderWay
from tokenmill_server.multimodal.video_options import read_video_options
from tokenmill_server.multimodal.video_preparer import VideoPreparer
from tokenmill_server.multimodal.wishes import WishReader
from tokenmill_server.processing.chat_template import Message
from tokenmill_server.processing.input_processor import ChatOptions, InputProcessor, Prompt, Truncation


@dataclass(slots=True, frozen=True)
class MediaPrompt:
    """A prompt without its media: of what is in it, nothing has been looked at."""

    prompt: Prompt
    """With one token for each of them."""
    are_places: Sequence[bool]
    """Which tokens of the prompt that could stand for media do."""
    request: MediaRequest
    truncation: Truncation | None = None


class MediaChats:
    """Images and videos of one model, in one process."""

    def __init__(
        self,
        inputs: InputProcessor,
        placeholders: Placeholders,
        loader: MediaLoader,
        wishes: WishReader,
        limits: MediaLimits,
    ) -> None:
        self.wishes = wishes
        self._inputs = inputs
        self._placeholders = placeholders
        self._loader = loader
        self._limits = limits
        self._under_way = UnderWay()

    def parts(self, model: str, *, local: bool = False) -> MediaParts:
        """For the messages of one request. `model`: what it is called."""
        return MediaParts(model, images=self._limits.images > 0, videos=self._limits.videos > 0, local=local)

    async def encode(
        self,
        messages: list[Message],
        request: MediaRequest,
        options: ChatOptions,
        truncation: Truncation | None = None,
    ) -> Prompt:
        """Like `InputProcessor.encode_chat`, for messages with media in their contents.

        Raises InvalidRequestError for one that cannot be had, and if the prompt would have to be cut.
        """
        return await self.load(await self.render(messages, request, options, truncation))

    async def render(
        self,
        messages: list[Message],
        request: MediaRequest,
        options: ChatOptions,
        truncation: Truncation | None = None,
    ) -> MediaPrompt:
        """All of `encode` that needs no media. Raises InvalidRequestError for what is wrong with the text."""
        sources = self._checked(request)
        placeholders, typed = self._placeholders, TypedTokens(self._placeholders.tokens)
        hidden = placeholders.prepared(typed.hidden(messages))
        variables = typed.hidden(options.template_variables)
        rendered = await self._inputs.chat_text(hidden, replace(options, template_variables=variables))
        self._inputs.check_text_length(typed.shown_length(rendered), self._inputs.max_model_len, "messages")
        text, are_places = typed.shown(rendered, [source.kind for source in sources])
        # Whatever is wrong with the text is known before anything is fetched.
        prompt = await self._inputs.encode_text(text, options.add_special_tokens, param="messages")
        self._inputs.check_fits(len(prompt.token_ids), prompt.param)
        return MediaPrompt(prompt, are_places, replace(request, sources=sources), truncation)

    def place(self, prompt: Prompt, request: MediaRequest) -> MediaPrompt:
        """`prompt` with media in the place of its tokens for images and videos, of which it has one for each.

        Raises InvalidRequestError if it has not.
        """
        sources = self._checked(request)
        are_places = self._placeholders.places(prompt.token_ids, [source.kind for source in sources])
        self._inputs.check_fits(len(prompt.token_ids), prompt.param)
        return MediaPrompt(prompt, are_places, replace(request, sources=sources))

    async def room(self) -> None:
        """Waits until open requests hold less than they may together: for whoever is not refused when it is more."""
        await self._loader.held.room()

    def _checked(self, request: MediaRequest) -> Sequence[MediaSource]:
        """The media as the model sees them."""
        sources = request.sources
        check_num_media(sources, self._limits)
        if self._limits.one_view_of_several and sum(isinstance(source, ImageSource) for source in sources) > 1:
            return [replace(source, detail="low") if isinstance(source, ImageSource) else source for source in sources]
        return sources

    async def load(self, planned: MediaPrompt) -> Prompt:
        """The prompt with its media. Raises InvalidRequestError for those that cannot be had, or do not fit."""
        prompt, request, truncation = planned.prompt, planned.request, planned.truncation
        sources, most = request.sources, self._inputs.max_model_len
        room = TokenRoom(most - len(prompt.token_ids) + len(sources), self._limits.max_image_tokens)
        holding = self._loader.held.holding()
        loading = self._loader.load(sources, room, request.scope, request.wishes, holding)
        loaded = await self._under_way.wait(loading)
        expanded = self._placeholders.expand(prompt.token_ids, planned.are_places, [each.item for each in loaded])
        token_ids = expanded.token_ids
        check_positions(len(token_ids), expanded.items, self._placeholders.media, self._limits)
        if truncation is not None and len(self._inputs.truncated(token_ids, truncation)) < len(token_ids):
            raise InvalidRequestError(
                f"the prompt has {len(token_ids)} tokens, and prompts with images or videos are not truncated",
                "truncate_prompt_tokens",
            )
        pieces = [loaded[source].piece(number) for source, number in expanded.order]
        supply = RequestSupply(self._loader.prepared, pieces, expanded.items, holding)
        return replace(prompt, token_ids=token_ids, media=supply.places, media_supply=supply)

    def engine_lost(self) -> None:
        """An engine core is gone, and with it the media that it had."""
        self._loader.prepared.engine_lost()

    def give_up(self, reason: TokenmillError) -> None:
        """Requests whose images are not there yet fail with `reason`, now and from now on."""
        self._under_way.give_up(reason)

    def close(self) -> None:
        """Ends the threads."""
        self._loader.close()


def make_media_chats(
    inputs: InputProcessor,
    engine: EngineConfig,
    settings: MediaSettings,
    num_api_servers: int = 1,
    on_lookup: Callable[[bool], None] | None = None,
    store: ObjectStore | None = None,
) -> MediaChats | None:
    """None for a model that takes text alone, or is told to. `on_lookup` is called for each item that is looked up in
    the cache, with whether it was there. `store`: where tensors are shared, if the settings say that they are.

    Raises ConfigError if they cannot be prepared.
    """
    media = engine.model.media
    if media is None:
        return None
    most, folder = engine.scheduler.max_item_tokens, Path(engine.model.path)
    asked, num_positions = settings.limits, engine.model.num_positions
    limits = MediaLimits(asked.images, asked.videos, most, media.views is not None, num_positions)
    processor = ImageProcessor(media, read_image_options(folder, media)) if limits.images else None
    videos = VideoPreparer(media, read_video_options(folder, media), settings, most) if limits.videos else None
    prepared = PreparedMedia(place_caches(settings, num_api_servers, engine.data_parallel_size), on_lookup, store)
    return MediaChats(
        inputs,
        Placeholders(media, inputs.tokenizer, inputs.template),
        MediaLoader(processor, settings, prepared, videos),
        WishReader(settings, takes_kwargs=media.vision.image_size is None or media.takes_video),
        limits,
    )

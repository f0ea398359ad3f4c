"""`LLM`: text from Python, without a server, by the same engine cores and the same client as `tokenmill serve`."""

import contextlib
import os
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from tokenmill_engine.config.model_files import read_tokenizer_facts
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import SamplingParams
from tokenmill_engine.progress import progress_bar
from tokenmill_server.config import Configuration
from tokenmill_server.engine_host import EngineHost
from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.values import FlagValues, offer_environment, offer_keywords
from tokenmill_server.llm_inputs import (
    Item,
    PromptInput,
    conversations_of,
    items_of,
    naming_prompt,
    priorities_of,
    sampling_of,
    template_variables_of,
)
from tokenmill_server.llm_outputs import RequestOutput, public_output
from tokenmill_server.llm_vectors import (
    EmbeddingRequestOutput,
    PoolingRequestOutput,
    ScoringRequestOutput,
    check_task,
    pair_requests,
    pooling_of,
    public_embedding,
    public_score,
    vector_requests,
)
from tokenmill_server.media_segments import create_segments, open_store
from tokenmill_server.multimodal.chat import MediaPrompt, make_media_chats
from tokenmill_server.multimodal.failures import in_order, together, together_as_they_come
from tokenmill_server.multimodal.media_request import MediaRequest
from tokenmill_server.multimodal.parts import MediaParts
from tokenmill_server.multimodal.wishes import MediaWishes, read_wishes
from tokenmill_server.processing import generation
from tokenmill_server.processing.chat_template import ChatTemplate, Message
from tokenmill_server.processing.generation import GenerationRequest
from tokenmill_server.processing.input_processor import ChatOptions, InputProcessor
from tokenmill_server.processing.tokenizer import Tokenizer, load_tokenizer
from tokenmill_server.processing.vectors import (
    VectorInputs,
    check_pairs,
    cosines,
    make_vector_inputs,
    pairs_of,
    score_of,
)

_BUILT_AT_A_TIME = 16
"""Prompts that are tokenized, and whose media are prepared, at a time."""


class LLM:
    """A model, loaded and ready. Keyword arguments are the flags of `tokenmill serve` with underscores.

    Engine cores run in child processes, which end with `shutdown()`, with the `with` block, with the object or with
    the program, whichever comes first. Calls from several threads at once are fine.

    Raises:
        ConfigError: an argument is unknown, wrong or contradicts another.
        StartupError: the machine cannot give what the model needs.
    """

    def __init__(self, model: str | Path | None = None, *, disable_log_stats: bool = True, **flags: Any) -> None:
        values = FlagValues()
        offer_keywords(values, {"model": model, "disable_log_stats": disable_log_stats, **flags}, "LLM")
        offer_environment(values, os.environ)
        configuration = build_configuration(values, offline=True)
        self.tokenizer = load_tokenizer(configuration.engine.model.tokenizer_path)
        self._name = configuration.server.served_model_names[0]
        self._default_sampling = SamplingParams(**configuration.server.default_sampling)
        self._configuration = configuration
        self.input_processor = _input_processor(configuration, self.tokenizer)
        self._vectors = make_vector_inputs(self.input_processor, configuration.engine.model)
        kept_open = contextlib.ExitStack()
        segments = kept_open.enter_context(create_segments(configuration))
        media = replace(configuration.server.media, refuses_when_full=False)
        store = open_store(segments[0], 0, media) if segments else None
        self._media = make_media_chats(self.input_processor, configuration.engine, media, store=store)
        self.host = EngineHost(configuration.engine, self.tokenizer, segments)
        """With `input_processor`, for tools that watch single steps."""
        kept_open.callback(self.host.close)
        self._num_requests = 0
        self._finalizer = weakref.finalize(self, kept_open.close)
        ready = self.host.start()
        self.input_processor.max_model_len = most = min(engine.max_model_len for engine in ready)
        if (self._default_sampling.max_tokens or 0) > most:  # the model's own limit may exceed what fits here
            self._default_sampling = msgspec.structs.replace(self._default_sampling, max_tokens=most)

    @property
    def max_model_len(self) -> int:
        """Longest prompt and output together, in tokens."""
        return self.input_processor.max_model_len

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer, with `encode(text)` and `decode(token_ids)`."""
        return self.tokenizer

    def generate(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        priority: Sequence[int] | None = None,
    ) -> list[RequestOutput]:
        """Completes each prompt; outputs are in the order of the prompts. Images and videos go into a mapping:
        `{"prompt": "... <image> ...", "multi_modal_data": {"image": image}}`.

        `sampling_params` is one for all or one per prompt; None takes the model's own defaults.

        Raises:
            TypeError: an argument is of another type.
            RequestError: a prompt or its parameters are wrong, which the message numbers; nothing was generated. Or
                an image or a video is, which is known when its turn comes; what was generated until then is lost.
            EngineDeadError: an engine core died.
        """
        items = items_of(prompts, self._media_parts)
        sampling = self._sampling_list(sampling_params, len(items))
        return self._run(items, sampling, priorities_of(priority, len(items)), use_tqdm=use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        media_io_kwargs: Mapping[str, Any] | None = None,
        mm_processor_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answers one conversation or several; otherwise like `generate`. `max_tokens` None means: as many as fit. How
        images and videos are read and prepared may be said as by the flags of these names. `tools` are shown to the
        model; calls of them are in the text."""
        self._check_generates()
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            template_variables=template_variables_of(
                chat_template_kwargs, tools, self.input_processor.template_variables
            ),
        )
        wishes = self._wishes(media_io_kwargs, mm_processor_kwargs)
        items = [
            Item(conversation=conversation, chat_options=options, wishes=wishes)
            if conversation.sources
            else Item(text=self.input_processor.render_chat(conversation.messages, options), add_special_tokens=False)
            for conversation in conversations_of(messages, self._media_parts)
        ]
        return self._run(items, self._sampling_list(sampling_params, len(items)), [0] * len(items), use_tqdm=use_tqdm)

    def embed(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        use_tqdm: bool = True,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """A vector of each text, of length 1 unless `normalize` or the model says otherwise; the first `dimensions` of
        it. `truncate_prompt_tokens`: texts keep so many tokens, -1 for as many as the model takes.

        Raises as `generate`, and InvalidRequestError if the model is there to generate text (`runner="pooling"`).
        """
        vectors = self._vector_inputs()
        vectors.check_embeds(self._name, "score")
        size = vectors.num_dimensions(dimensions)
        unit = vectors.pooling.normalize if normalize is None else normalize
        items = items_of(prompts, self._media_parts)
        requests = partial(vector_requests, vectors, items, truncate_prompt_tokens)
        outputs = self._pool(requests, len(items), use_tqdm=use_tqdm)
        return [public_embedding(output, unit, size) for output in outputs]

    def encode(
        self,
        prompts: PromptInput | Sequence[PromptInput],
        *,
        pooling_task: str | None = None,
        use_tqdm: bool = True,
        normalize: bool | None = None,
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[PoolingRequestOutput]:
        """What `embed` gives, as numpy arrays, for code that names the task: `pooling_task="embed"`, the only one
        that there is. Raises as `embed`, and InvalidRequestError for another task or none."""
        check_task(pooling_task)
        outputs = self.embed(
            prompts,
            use_tqdm=use_tqdm,
            normalize=normalize,
            dimensions=dimensions,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return list(map(pooling_of, outputs))

    def score(
        self,
        text_1: PromptInput | Sequence[PromptInput],
        text_2: PromptInput | Sequence[PromptInput],
        *,
        use_tqdm: bool = True,
        truncate_prompt_tokens: int | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well each of `text_2` goes with the only `text_1`, or with that of the same number: what a model for
        pairs says of them, which are to be texts then, or else the cosine of their vectors. Raises as `embed`."""
        vectors = self._vector_inputs()
        first, second = items_of(text_1, self._media_parts), items_of(text_2, self._media_parts)
        check_pairs(len(first), len(second), ("text_1", "text_2"))
        if vectors.pooling.scores_pairs:
            pairs = partial(pair_requests, vectors, pairs_of(first, second), truncate_prompt_tokens)
            outputs = self._pool(pairs, len(second), use_tqdm=use_tqdm)
            return [public_score(score_of(output, vectors.pooling.squash), output) for output in outputs]
        items = [*first, *second]
        requests = partial(vector_requests, vectors, items, truncate_prompt_tokens)
        outputs = self._pool(requests, len(items), use_tqdm=use_tqdm)
        ours, theirs = outputs[: len(first)], outputs[len(first) :]
        scores = zip(cosines(ours, theirs), pairs_of(ours, theirs), strict=True)
        return [public_score(score, *pair) for score, pair in scores]

    def shutdown(self) -> None:
        """Ends the engine cores. Calls that are still running in other threads fail. May be called twice."""
        self._finalizer()
        if self._media is not None:
            self._media.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _media_parts(self) -> MediaParts:
        return MediaParts(self._name) if self._media is None else self._media.parts(self._name, local=True)

    def _wishes(self, io: Mapping[str, Any] | None, processor: Mapping[str, Any] | None) -> MediaWishes | None:
        reader = None if self._media is None else self._media.wishes
        return read_wishes(reader, self._name, io, processor, is_local=True)

    def _sampling_list(
        self, given: SamplingParams | Sequence[SamplingParams] | None, count: int
    ) -> Sequence[SamplingParams]:
        return [self._default_sampling] * count if given is None else sampling_of(given, count)

    def _run(
        self, items: Sequence[Item], sampling: Sequence[SamplingParams], priorities: Sequence[int], *, use_tqdm: bool
    ) -> list[RequestOutput]:
        """Nothing is sent before every request is known to be right, but for what its images and videos are: these are
        read while others generate."""
        self._check_generates()
        with progress_bar(total=len(items), desc="Processed prompts", unit="prompt", disable=not use_tqdm) as bar:
            return self.host.run(self._generate(items, sampling, priorities, bar))

    def _check_generates(self) -> None:
        if self._vectors is not None:
            raise InvalidRequestError(f"{self._name} makes vectors and generates no text here; use embed or score")

    def _vector_inputs(self) -> VectorInputs:
        if self._vectors is None:
            raise InvalidRequestError(f"{self._name} generates text; LLM(..., runner='pooling') makes vectors of it")
        return self._vectors

    def _pool(
        self, prepare: Callable[[], Awaitable[list[GenerationRequest]]], count: int, *, use_tqdm: bool
    ) -> list[generation.RequestOutput]:
        """Nothing is sent before all of the `count` requests are known to be right."""

        async def pool() -> list[generation.RequestOutput]:
            requests = await prepare()

            async def complete(request: GenerationRequest) -> generation.RequestOutput:
                output = await self.host.generator.complete(request)
                bar.update()
                return output

            return await together(complete(request) for request in requests)

        with progress_bar(total=count, desc="Processed prompts", unit="prompt", disable=not use_tqdm) as bar:
            return self.host.run(pool())

    async def _generate(
        self, items: Sequence[Item], sampling: Sequence[SamplingParams], priorities: Sequence[int], bar: "tqdm[Any]"
    ) -> list[RequestOutput]:
        drafting = (self._draft(index, item, sampling[index], priorities[index]) for index, item in enumerate(items))
        drafts = [draft async for draft in in_order(drafting, _BUILT_AT_A_TIME)]
        progress = _Progress(bar)

        async def complete(request: GenerationRequest) -> RequestOutput:
            result = await self.host.generator.complete(request)
            output = public_output(result, self.tokenizer, named=bool(request.sampling.logprob_token_ids))
            progress.add(output)
            return output

        return await together_as_they_come(
            complete(request) async for request in in_order(map(self._filled, drafts), _BUILT_AT_A_TIME)
        )

    async def _draft(self, index: int, item: Item, sampling: SamplingParams, priority: int) -> "_Draft":
        """Whatever is wrong with one is known now, but for its media."""
        self._num_requests += 1
        label = str(self._num_requests)
        planned: MediaPrompt | None = None
        with naming_prompt(index):
            if item.conversation is not None and self._media is not None:
                conversation = item.conversation
                asked = MediaRequest(conversation.sources, item.wishes)
                planned = await self._media.render(conversation.messages, asked, item.chat_options)
                prompt = planned.prompt
            elif item.text is not None:
                prompt = await self.input_processor.encode_text(item.text, item.add_special_tokens)
            else:
                prompt = self.input_processor.take_token_ids(item.token_ids)
            wishes = self._wishes(None, item.processor_kwargs)
            if item.sources and self._media is not None:
                planned = self._media.place(prompt, MediaRequest(item.sources, wishes))
            request = self.input_processor.build(
                prompt, sampling, label=label, priority=priority, cache_salt=item.cache_salt
            )
        return _Draft(index, request, sampling, planned)

    async def _filled(self, draft: "_Draft") -> GenerationRequest:
        """With its media, once those of others leave them memory."""
        if draft.planned is None or self._media is None:
            return draft.request
        await self._media.room()
        with naming_prompt(draft.index):
            prompt = await self._media.load(draft.planned)
            known = draft.request
            return self.input_processor.build(
                prompt, draft.sampling, label=known.label, priority=known.priority, cache_salt=known.cache_salt
            )


@dataclass(frozen=True, slots=True)
class _Draft:
    """A request that is right as far as it is known, which is all of one that has no media."""

    index: int
    request: GenerationRequest
    sampling: SamplingParams
    planned: MediaPrompt | None


class _Progress:
    """Moves the bar and shows the rate of generated tokens."""

    def __init__(self, bar: "tqdm[Any]") -> None:
        self._bar = bar
        self._num_tokens = 0
        self._started = time.monotonic()

    def add(self, output: RequestOutput) -> None:
        self._num_tokens += sum(len(choice.token_ids) for choice in output.outputs)
        rate = self._num_tokens / max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
        self._bar.update()


def _input_processor(configuration: Configuration, tokenizer: Tokenizer) -> InputProcessor:
    source, bos_token, eos_token = read_tokenizer_facts(Path(configuration.engine.model.tokenizer_path))
    source = configuration.server.chat_template or source
    template = ChatTemplate(source, bos_token, eos_token) if source is not None else None
    return InputProcessor(tokenizer, template, configuration.engine)

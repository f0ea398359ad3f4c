"""Everything that crosses a socket between an API server and an engine core.

Structs are encoded as msgpack arrays. Token ids and request ids of one engine step travel as packed
little-endian arrays, so that a step costs one message per API server and not one object per token.
"""

from enum import StrEnum
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    Buffer = bytes | memoryview
else:
    Buffer = bytes
    """As msgspec decodes it. It encodes views as well."""


class FinishReason(StrEnum):
    """Why a request ended. The values are what clients and metrics show."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"
    REPETITION = "repetition"


class RepetitionDetection(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """End a sequence once a pattern of `min_pattern_size` to `max_pattern_size` tokens has come `min_count` times in a
    row."""

    max_pattern_size: int
    """0: never."""
    min_pattern_size: int = 1
    min_count: int = 2


class StructuredOutputsParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What the output must look like, as users say it. Exactly one of the first six is given. Names are vLLM's."""

    json: str | dict[str, Any] | bool | None = None
    """A JSON schema, or its text."""
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    """A context-free grammar, in EBNF (GBNF) or in Lark."""
    json_object: bool | None = None
    """True: any JSON object."""
    structural_tag: str | dict[str, Any] | None = None
    """Free text with parts that follow a schema, as xgrammar describes it, or the text of that."""
    disable_any_whitespace: bool | None = None
    """JSON has no whitespace but what `json.dumps` writes. None: as the flag says."""
    disable_additional_properties: bool | None = None
    """False: objects that name properties may have others, unless the schema forbids it."""
    whitespace_pattern: str | None = None
    """Regex of the whitespace between the parts of JSON."""
    param: str = "structured_outputs"
    """The field that errors name."""


class StructuredKind(StrEnum):
    """What `StructuredSpec.text` is."""

    JSON = "json"
    """A JSON schema."""
    JSON_OBJECT = "json_object"
    """Nothing: any JSON object."""
    REGEX = "regex"
    CHOICE = "choice"
    """A JSON list of strings."""
    GRAMMAR = "grammar"
    STRUCTURAL_TAG = "structural_tag"
    """JSON."""


class StructuredSpec(msgspec.Struct, array_like=True, frozen=True):
    """What the output must look like, as engines read it. Equal ones share what is compiled."""

    kind: StructuredKind
    text: str
    any_whitespace: bool = True
    additional_properties: bool = False
    whitespace_pattern: str | None = None
    param: str = "structured_outputs"
    """The field that errors name; nothing else depends on it."""

    def key(self) -> "StructuredSpec":
        """The same without what makes no difference to the grammar."""
        return msgspec.structs.replace(self, param="")


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How to turn logits into tokens, and when to stop. Names and defaults are those of the OpenAI API and vLLM.

    Fields that end in `_token_ids` hold vocabulary ids. `stop`, `include_stop_str_in_output`, `bad_words`,
    `repetition_detection`, `skip_special_tokens`, `spaces_between_special_tokens`, `structured_outputs` and `n` are
    resolved by the front end; the engine sees one request per choice, with `bad_words_token_ids` and `structured`
    filled in.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 or -1 keeps the whole vocabulary."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    """None means: as many as fit."""
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    """Number of most likely tokens to report beside the sampled one; 0 reports the sampled one alone."""
    logprob_token_ids: tuple[int, ...] = ()
    """Report these tokens, not the most likely ones, where `logprobs` is a number."""
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    repetition_detection: RepetitionDetection | None = None
    structured_outputs: StructuredOutputsParams | None = None
    structured: StructuredSpec | None = None
    """What `structured_outputs` come to. Set by the server itself, it is taken as it is."""


class MediaTensor(msgspec.Struct, array_like=True, frozen=True):
    """An array of the processor's output. `data` is little-endian, in C order."""

    dtype: str
    """A name of numpy's: `uint8`, `float32`."""
    shape: tuple[int, ...]
    data: Buffer
    """Or a view of bytes elsewhere, which do not change: nobody copies a large tensor on its way (`ipc.frames`)."""
    frame: int = 0
    """On a socket: the frame of the message that has the bytes; 0: they are here, or `MediaItem` says where."""


class SharedObject(msgspec.Struct, array_like=True, frozen=True):
    """Where the bytes of an item's tensors are, in memory that API servers share with engine cores and workers; see
    `ipc.shared_objects`. They are in the order of the tensors, and what each has is known by its shape."""

    segment: int
    """That of this API server."""
    offset: int
    """Where the object begins."""
    num_bytes: int
    stamp: bytes
    """16 bytes, of this object alone: another one at the same place has another."""


class MediaItem(msgspec.Struct, array_like=True, frozen=True):
    """One image or video of a prompt, where it stands and what the encoder needs. Each of its placeholder tokens stands
    for one row of the encoder's output, in order. Where text stands between the frames of a video (Qwen3-VL, which is
    told the time of each), every group of frames that become one is an item of its own."""

    kind: str
    """`image` or `video`."""
    key: bytes
    """32 bytes: names the content and everything that changes what the encoder makes of it. Items with equal keys are
    encoded once, and prompts that differ in nothing else share their blocks."""
    offset: int
    """Position of the first placeholder in the prompt."""
    num_tokens: int
    """Placeholders, all in a row."""
    grid: tuple[int, int, int] | None
    """Patches in time, height and width, before merging; images have one in time. For LLaVA-OneVision views, and height
    and width of the image in pixels; frames and their height and width. None for models with one size of image."""
    tensors: dict[str, MediaTensor]
    """Empty: the engine core is believed to have them under this key; one that has not answers `MediaMissing`.
    `pixel_values` uint8: [num_patches, num_channels * patch_size**2] for an image (Qwen2-VL; the encoder repeats it
    in time), [num_patches, num_channels * temporal_patch_size * patch_size**2] for a video, [3, height, width]
    (LLaVA) or [num_views, 3, height, width] (LLaVA-OneVision).
    `values` float32 [3, 256]: what each pixel of each channel becomes."""
    seconds_per_step: float | None = None
    """Videos of Qwen2.5-VL: from one patch in time to the next. None for all else."""
    shared: SharedObject | None = None
    """Where the bytes of `tensors` are, which come without them then, and stay for as long as the request does. None:
    the bytes travel with the tensors."""


class AddRequest(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """One sequence to generate. `request_id` is unique among all processes: slot and incarnation of the API
    server in the high bits, a counter in the low ones. `label` is the client's own id, for logs only."""

    request_id: int
    label: str
    prompt_token_ids: bytes
    """int32, little-endian."""
    sampling: SamplingParams
    arrival_time: float
    """Seconds of the machine-wide monotonic clock (`time.monotonic`)."""
    priority: int = 0
    cache_salt: str | None = None
    media: tuple[MediaItem, ...] = ()
    """Ascending by offset; none overlaps another."""
    second_text: int = 0
    """For a model that reads pairs of texts: where in the prompt the second one begins."""


class AbortRequests(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Forget these requests. No output follows. `reason` is what metrics count: `abort` when the client went
    away, `stop` or `repetition` when the front end found a stop string or a text that repeats itself."""

    request_ids: list[int]
    reason: FinishReason = FinishReason.ABORT


class ClientGone(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Sent by the launcher when this incarnation of API server `client` died: abort all of its requests. Those of a
    successor, which may be here already, are not touched."""

    client: int
    incarnation: int


class ReportsMissed(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """From the engine core's own outbox: this incarnation of API server `client` did not take its messages for a while
    and was spared loads and block events; tell it anew."""

    client: int
    incarnation: int


class Hello(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """First message of an API server, once its output socket is connected: from now on it is told the load.

    The engine answers with a `LoadReport`, which also proves that the way back works, and where it publishes block
    events with all of its blocks. One that greets again has lost its connection, and with it what was on the way: it
    has given its requests up, and the engine forgets them.
    """

    client: int
    incarnation: int = 0


ClientMessage = AddRequest | AbortRequests | ClientGone | ReportsMissed | Hello


class Finish(msgspec.Struct, array_like=True, frozen=True):
    """The last word on the request at position `index` of a `StepOutput`."""

    index: int
    reason: FinishReason
    stop_token_id: int | None = None
    """The entry of `stop_token_ids` that matched; None for the model's own end token."""
    message: str | None = None
    """For `error`: one sentence for the client."""
    num_preemptions: int = 0
    """How often it was preempted."""
    param: str | None = None
    """For `error`: the field of the request that is to blame; None if it is the engine's own fault."""
    retry_after_s: int | None = None
    """For `error`: nothing has begun, and the same request may work that much later."""


class TokenLogprobs(msgspec.Struct, array_like=True, frozen=True):
    """Log-probabilities of `n` consecutive positions of one request, from the raw logits.

    `token_ids` int32 [n, 1 + k] and `logprobs` float32 [n, 1 + k]: column 0 is the token itself, the others the
    k most likely. `ranks` int32 [n]: rank of the token itself, 1 for the most likely.
    """

    index: int
    """Position of the request in the `StepOutput`."""
    num_top: int
    token_ids: bytes
    logprobs: bytes
    ranks: bytes


class PooledVector(msgspec.Struct, array_like=True, frozen=True):
    """What a model that generates no text made of a prompt, as it is before it is brought to length 1."""

    index: int
    """Position of the request in the `StepOutput`."""
    values: bytes
    """float32, little-endian."""


class EngineLoad(msgspec.Struct, array_like=True, frozen=True):
    """State of an engine core after a step, for balancing."""

    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    num_waiting_tokens: int = 0
    """Tokens of waiting and running requests that no step has computed or will compute yet: queued prefill work. Told
    with several data-parallel ranks only; what waiting requests will find in the prefix cache is not taken off."""
    num_received: int | None = None
    """Requests that have come from this incarnation of the API server that is told, ended ones included: this load
    counts them, and none that it has sent since. Told with several data-parallel ranks only."""


class StepOutput(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """What one engine step yields for the requests of one API server.

    `request_ids` int64 [r], `num_tokens` int32 [r] and `token_ids` int32 [sum(num_tokens)] are packed.
    """

    engine: int
    request_ids: bytes
    num_tokens: bytes
    token_ids: bytes
    load: EngineLoad
    finishes: list[Finish] = []
    logprobs: list[TokenLogprobs] = []
    prompt_logprobs: list[TokenLogprobs] = []
    """Consecutive pieces for prompt positions 1..; the first position has none."""
    cached_tokens: list[tuple[int, int]] = []
    """(index, number of prompt tokens found in the prefix cache), once per request with its first output."""
    prefill_times: list[tuple[int, float]] = []
    """(index, seconds from its first step to its first token), with `cached_tokens`."""
    vectors: list[PooledVector] = []
    """Each with the end of its request."""


class LoadReport(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Load of an engine, sent to the API servers that had no request in the step."""

    engine: int
    load: EngineLoad
    incarnation: int = 0
    """Of the API server that it is meant for."""


class MediaMissing(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """These requests were not added: some of their media came without tensors, and the engine has none under their
    keys. They are to be sent again, with all tensors. All are of one incarnation of one API server."""

    engine: int
    request_ids: list[int]


class BlockEvents(msgspec.Struct, array_like=True, tag=True, frozen=True):
    """Which blocks an engine's prefix cache has gained and lost since the last such message to this API server. Comes
    after the outputs of the steps it covers. No name is in both; neither order of applying them is wrong.

    `stored` and `removed` are packed names (`block_hash.short_name`), uint64, little-endian.
    """

    engine: int
    stored: bytes
    removed: bytes
    incarnation: int = 0
    """Of the API server that it is meant for."""
    is_snapshot: bool = False
    """`stored` is all there is; forget what was known before."""


EngineMessage = StepOutput | LoadReport | BlockEvents | MediaMissing


class Endpoints(msgspec.Struct, frozen=True):
    """ZeroMQ addresses of one engine core, `ipc://` or `tcp://`."""

    input: str
    """Where it receives `ClientMessage`s."""
    output: str
    """Where it sends `EngineMessage`s from."""
    key: str = ""
    """CURVE key of both if they are TCP: the secret one for the engine core, the public one for whoever connects."""


class EngineReady(msgspec.Struct, tag=True, frozen=True):
    """From a started engine core to the launcher, which passes it on to the API servers."""

    engine: int
    incarnation: int
    """How often this rank was started before."""
    endpoints: Endpoints
    """Of this incarnation: nobody else ever had them."""
    max_model_len: int
    """Longest request (prompt + output tokens) that this engine can hold."""
    num_gpu_blocks: int
    block_size: int
    kv_cache_tokens: int
    attention_backend: str
    startup_s: dict[str, float] = {}
    """Seconds by phase: import, load, profile, warmup."""
    num_segments: int = 0
    """API servers whose shared media it reads: those with the first numbers. 0 where nothing is shared with it."""

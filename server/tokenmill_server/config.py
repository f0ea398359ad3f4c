"""The frozen configuration of the HTTP front end, shared by the launcher and every API server, and the whole of it."""

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_server.multimodal.settings import MediaSettings

FingerprintMode = Literal["full", "hash", "custom", "none"]


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Everything an API server needs beside the engine's configuration. Resolved: no `auto`."""

    host: str = "127.0.0.1"
    port: int = 8000
    uds: str | None = None
    api_keys: tuple[str, ...] = ()
    served_model_names: tuple[str, ...] = ()
    """At least one; the first is the `model` of every reply, all of them are accepted in requests."""
    api_server_count: int = 1
    chat_template: str | None = None
    """Template text given with --chat-template (a file's content or the literal); None: the model's own."""
    default_sampling: dict[str, Any] = field(default_factory=dict)
    """Sampling defaults from the model's generation config (temperature, top_p, top_k, min_p, repetition_penalty,
    max_tokens); empty with `--generation-config vllm`."""
    stream_interval: int = 1
    """Tokens per streamed chunk."""
    shutdown_timeout_s: float = 30.0
    log_level: str = "INFO"
    max_body_bytes: int = 32 * 1024 * 1024
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    """What may be open at once before requests are refused: sequences, and prompt tokens without a first answer."""
    allowed_origins: tuple[str, ...] = ()
    """Whose pages may send requests from browsers; none: browsers are told nothing."""
    allowed_methods: tuple[str, ...] = ("*",)
    allowed_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False
    root_path: str = ""
    """What a proxy puts before every path: `/prefix`, or nothing."""
    ssl_certfile: str | None = None
    """PEM; None: plain HTTP."""
    ssl_keyfile: str | None = None
    ssl_ca_certs: str | None = None
    ssl_cert_reqs: int = 0
    """Certificates of clients: 0 none, 1 optional, 2 required."""
    ssl_ciphers: str | None = None
    ssl_refresh: bool = False
    """Certificates are read again when they have changed."""
    trust_request_chat_template: bool = False
    sse_keep_alive_s: float = 0.0
    """Streams that are silent for so long carry a comment; 0: none."""
    log_requests: bool = False
    """Every request is a line in the log."""
    log_outputs: bool = False
    """These lines tell what was generated, too."""
    max_log_len: int | None = None
    """And this much of prompts, in characters; None: nothing. More of an output is not told either."""
    unlogged_paths: tuple[str, ...] = ()
    """Their requests are no lines."""
    max_headers: int = 256
    max_head_bytes: int = 256 * 1024
    """Of a request's first line and headers together."""
    middleware: tuple[str, ...] = ()
    """Import paths, the innermost first."""
    load_tracking: bool = False
    """There is a route /load."""
    tokenizer_info: bool = False
    """There is a route /tokenizer_info."""
    fingerprint_mode: FingerprintMode = "full"
    fingerprint_value: str | None = None
    force_include_usage: bool = False
    """Every chunk of every stream tells the usage, as if the request had asked for it."""
    return_tokens_as_token_ids: bool = False
    """Tokens are called `token_id:N` in log-probabilities, as if the request had asked for it."""
    default_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template that requests do not set."""
    disable_docs: bool = False
    """No /docs, /redoc and /openapi.json."""
    per_request_metrics: bool = False
    """Replies tell how long their parts took."""
    strict_fields: bool = False
    """Fields without effect are refused."""
    enable_auto_tool_choice: bool = True
    tool_call_parser: str | None = None
    """Of the calls that the model writes (`parsing.registry`); None: it writes none that are known."""
    exclude_tools_when_tool_choice_none: bool = False
    reasoning_parser: str | None = None
    disable_webui: bool = False
    """No page at `/`."""
    media: MediaSettings = field(default_factory=MediaSettings)


class LoadBalancing(StrEnum):
    """Who chooses the data-parallel rank of a request."""

    INTERNAL = "internal"
    """An API server, among all ranks, wherever they run."""
    HYBRID = "hybrid"
    """Something outside chooses a launcher, an API server of that one chooses among its ranks."""
    EXTERNAL = "external"
    """Something outside: every launcher has one rank."""


@dataclass(frozen=True, slots=True)
class DataParallelConfig:
    """The ranks of a deployment, and which of them this launcher has to do with."""

    size: int = 1
    """Ranks of all launchers together."""
    size_local: int = 1
    """Engine cores that this launcher starts."""
    start_rank: int = 0
    """Rank of the first of them."""
    load_balancing: LoadBalancing = LoadBalancing.INTERNAL
    headless: bool = False
    """No API servers: the engine cores are for the head's."""
    address: str = "127.0.0.1"
    """Of the head, as headless launchers reach it."""
    rpc_port: int = 29550
    token: str | None = None
    """Secret of all launchers; None: their network is trusted."""

    @property
    def local_ranks(self) -> range:
        """The ranks that this launcher runs."""
        return range(self.start_rank, self.start_rank + self.size_local)

    @property
    def served_ranks(self) -> range:
        """The ranks that the API servers choose from: this launcher's, or for a headless one the head's."""
        return range(self.size) if self.load_balancing is LoadBalancing.INTERNAL else self.local_ranks

    @property
    def is_head(self) -> bool:
        """Whether headless launchers are to join this one."""
        return not self.headless and len(self.served_ranks) > self.size_local


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """What a launcher does about engine cores that die or hang."""

    max_engine_restarts: int = 0
    """How often each is started again before it stays away."""
    engine_stall_timeout_s: float = 0.0
    """How long one may have work and finish no step until it counts as stalled; 0: for ever, and no other process that
    hangs is looked for."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the processes of one server (or one `LLM`) are started with."""

    engine: EngineConfig
    server: ServerConfig
    data_parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    faults: FaultConfig = field(default_factory=FaultConfig)

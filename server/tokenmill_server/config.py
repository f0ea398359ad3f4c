"""The frozen configuration of the HTTP front end, shared by the launcher and every API server, and the whole of it."""

from dataclasses import dataclass, field
from typing import Any

from tokenmill_engine.config.engine import EngineConfig


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


@dataclass(frozen=True, slots=True)
class Configuration:
    """What the processes of one server (or one `LLM`) are started with."""

    engine: EngineConfig
    server: ServerConfig

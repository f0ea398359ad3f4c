"""What the routes of one API server share."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request

from tokenmill_engine.config.engine import EngineConfig
from tokenmill_engine.errors import InvalidRequestError, NotFoundError
from tokenmill_engine.metrics import FrontendMetrics
from tokenmill_server.admission import Admission, QueueCounts
from tokenmill_server.balancing.load_balancer import RANK_HEADER
from tokenmill_server.config import ServerConfig
from tokenmill_server.data_parallel.remote_metrics import RemoteMetrics
from tokenmill_server.multimodal.chat import MediaChats
from tokenmill_server.multimodal.parts import MediaParts
from tokenmill_server.multimodal.wishes import MediaWishes, read_wishes
from tokenmill_server.own_middleware import Wrap
from tokenmill_server.processing.input_processor import ChatOptions, InputProcessor
from tokenmill_server.processing.request_templates import RequestTemplates
from tokenmill_server.processing.shown import shown
from tokenmill_server.processing.vectors import VectorInputs
from tokenmill_server.protocol.chat import ChatRequest, chat_options
from tokenmill_server.protocol.tokenize import TokenizeRequest
from tokenmill_server.readiness import Readiness
from tokenmill_server.text_generator import TextGenerator


@dataclass(slots=True)
class ServerContext:
    """Built once by `api_process`; reached as `app.state.context`."""

    config: ServerConfig
    engine_config: EngineConfig
    inputs: InputProcessor
    generator: TextGenerator
    readiness: Readiness
    started_at: int
    """Unix seconds."""
    fingerprint: str | None
    metrics: FrontendMetrics
    metrics_dir: str
    """Directory with the metrics of all processes."""
    remote_metrics: RemoteMetrics | None = None
    """Where some engine cores are on other machines."""
    media: MediaChats | None = None
    """None: the model takes text alone."""
    request_templates: RequestTemplates = field(default_factory=lambda: RequestTemplates(None, trusted=False))
    vectors: VectorInputs | None = None
    """None: the model generates text."""
    admission: Admission | None = None
    """None: nothing limits how much may be open."""
    queue_counts: QueueCounts | None = None
    """What is open; None if nobody asks."""
    own_middleware: Sequence[Wrap] = ()
    """The innermost first."""

    @property
    def model_name(self) -> str:
        """The name that answers carry."""
        return self.config.served_model_names[0]

    def media_parts(self) -> MediaParts:
        """For the messages of one request."""
        return MediaParts(self.model_name) if self.media is None else self.media.parts(self.model_name)

    def media_wishes(self, io: dict[str, Any] | None, processor: dict[str, Any] | None) -> MediaWishes | None:
        """How a request wants its media. Raises InvalidRequestError for what this server does not allow."""
        return read_wishes(None if self.media is None else self.media.wishes, self.model_name, io, processor)

    def chat_options(self, request: ChatRequest | TokenizeRequest) -> ChatOptions:
        """How a request wants its conversation rendered. Raises InvalidRequestError for what cannot be done."""
        template = None if request.chat_template is None else self.request_templates.get(request.chat_template)
        variables = self.inputs.template_variables if template is None else template.variables
        return chat_options(request, variables, template, self.config.default_chat_template_kwargs)

    def engine_of(self, rank: int) -> int:
        """The engine core with data-parallel rank `rank`. Raises InvalidRequestError if it is not one of this
        server's."""
        first, size = self.engine_config.data_parallel_first_rank, self.engine_config.data_parallel_size
        if not first <= rank < first + size:
            ranks = f"rank {first}" if size == 1 else f"ranks {first} to {first + size - 1}"
            raise InvalidRequestError(f"this server has no data-parallel rank {rank}; it has {ranks}", RANK_HEADER)
        return rank - first

    def check_model(self, name: str | None) -> None:
        """Raises NotFoundError unless `name` is a served name, or absent."""
        if name and name not in self.config.served_model_names:
            served = ", ".join(self.config.served_model_names)
            raise NotFoundError(f"the model {shown(name)} does not exist; served: {served}", "model", "model_not_found")

    def check_use(self, makes_vectors: bool) -> None:
        """Raises InvalidRequestError unless the model is there to make vectors, or to generate text, as is asked."""
        if makes_vectors == (self.vectors is not None):
            return
        if makes_vectors:
            raise InvalidRequestError(
                f"{shown(self.model_name)} generates text; a server started with --runner pooling makes vectors of it",
                "model",
                "unsupported_model",
            )
        raise InvalidRequestError(
            f"{shown(self.model_name)} makes vectors and generates no text here; use /v1/embeddings, /v1/score or "
            "/v1/rerank",
            "model",
            "unsupported_model",
        )


def context_of(request: Request) -> ServerContext:
    context: ServerContext = request.app.state.context
    return context

"""Chat templates that come with requests (`chat_template`, with `--trust-request-chat-template`)."""

from collections import OrderedDict

from tokenmill_engine.errors import ConfigError, InvalidRequestError
from tokenmill_server.processing.chat_template import ChatTemplate

MAX_TEMPLATE_CHARS = 64 * 1024
"""Compiling so many takes some ten milliseconds."""
_MAX_KEPT = 16


class RequestTemplates:
    """Compiles them, and keeps the last ones: clients send the same one again and again."""

    def __init__(self, own: ChatTemplate | None, *, trusted: bool) -> None:
        """`own` is the model's template, whose special tokens others may print."""
        self._own = own
        self._trusted = trusted
        self._kept: OrderedDict[str, ChatTemplate] = OrderedDict()

    def get(self, source: str) -> ChatTemplate:
        """Raises InvalidRequestError unless `source` is a template and may be used."""
        if not self._trusted:
            raise InvalidRequestError(
                "chat_template is refused: the server was started without --trust-request-chat-template",
                "chat_template",
                "unsupported_parameter",
            )
        if len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidRequestError(
                f"chat_template has {len(source)} characters, more than {MAX_TEMPLATE_CHARS}", "chat_template"
            )
        template = self._kept.get(source)
        if template is None:
            try:
                template = ChatTemplate(source) if self._own is None else self._own.replaced(source)
            except ConfigError as error:
                raise InvalidRequestError(str(error), "chat_template") from None
            self._kept[source] = template
            if len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(source)
        return template

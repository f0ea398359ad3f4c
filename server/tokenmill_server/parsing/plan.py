"""How the output of one request is to be parsed: decided once, for all of its choices."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill_server.parsing.chat_output import ChatDelta, ChatOutput, long_call_id, short_call_id
from tokenmill_server.parsing.forced import ForcedArgumentsParser, ForcedCallsParser
from tokenmill_server.parsing.reasoning import ReasoningCounter, ReasoningSplitter, Start
from tokenmill_server.parsing.registry import TOOL_PARSERS, Schemas


@dataclass(slots=True, frozen=True)
class ToolPlan:
    """Calls in the output."""

    schemas: Schemas
    parser: str | None
    """Of a model that chooses whether it calls."""
    forced: bool = False
    """The output is calls and nothing else."""
    function: str | None = None
    """The one that is called, if only its arguments are in the output."""
    parallel: bool = True
    short_ids: bool = False
    as_functions: bool = False
    """The client knows one call of a function, and no list of them."""


@dataclass(slots=True, frozen=True)
class OutputPlan:
    """What `ChatOutput` and `ReasoningCounter` of each choice are made from."""

    tools: ToolPlan | None = None
    reasoning: Start | None = None
    """Where the output begins; None: thinking is not looked for."""
    include_reasoning: bool = True
    max_reasoning_tokens: int | None = None
    """Before thinking has to end."""

    @property
    def shows_reasoning(self) -> bool:
        """Whether thinking is part of the answer."""
        return self.reasoning is not None and self.include_reasoning

    @property
    def calls_functions(self) -> bool:
        """Whether a call is shown as that of a function."""
        return self.tools is not None and self.tools.as_functions

    @property
    def is_forced(self) -> bool:
        """Whether the answer is calls and nothing else."""
        return self.tools is not None and (self.tools.forced or self.tools.function is not None)

    def output(self) -> ChatOutput:
        """For one choice."""
        splitter = None if self.reasoning is None else ReasoningSplitter(self.reasoning)
        tools = self.tools
        if tools is None:
            return ChatOutput(splitter, None)
        if tools.function is not None:
            parser: Any = ForcedArgumentsParser(tools.function)
        elif tools.forced:
            parser = ForcedCallsParser()
        else:
            parser = TOOL_PARSERS[tools.parser](tools.schemas) if tools.parser is not None else None
        return ChatOutput(
            splitter,
            parser,
            max_calls=None if tools.parallel else 1,
            new_id=short_call_id if tools.short_ids else long_call_id,
        )

    def counter(self, token_bytes: Sequence[bytes]) -> ReasoningCounter | None:
        """For one choice."""
        return None if self.reasoning is None else ReasoningCounter(self.reasoning, token_bytes)

    def parse(self, text: str) -> ChatDelta:
        """A whole output."""
        output = self.output()
        delta = output.push(text)
        delta.add(output.finish())
        return delta

    def finish_reason(self, reason: str, num_calls: int) -> str:
        """A choice that stopped, and that called, ends for its calls, unless the client named the function."""
        named = self.tools is not None and self.tools.function is not None
        if reason != "stop" or not num_calls or named:
            return reason
        return "function_call" if self.calls_functions else "tool_calls"

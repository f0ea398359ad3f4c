"""What a chat's request, the server's flags and the prompt say of how the output is to be parsed."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import SamplingParams
from tokenmill_server.config import ServerConfig
from tokenmill_server.context import ServerContext
from tokenmill_server.parsing.plan import OutputPlan, ToolPlan
from tokenmill_server.parsing.reasoning import CLOSE, OPEN, Start, start_after, start_within
from tokenmill_server.parsing.registry import ALWAYS_THINKS, TOOL_TAGS
from tokenmill_server.processing.chat_template import Message, text_of_message
from tokenmill_server.processing.input_processor import ChatOptions
from tokenmill_server.processing.tokenizer import Tokenizer
from tokenmill_server.protocol.chat import ChatRequest
from tokenmill_server.protocol.tools import ToolUse


def with_tools(context: ServerContext, options: ChatOptions, tools: ToolUse | None) -> ChatOptions:
    """With what the chat template is to render of tools.

    Raises InvalidRequestError where the model would choose among tools that it is not told of, or whose calls nobody
    would find.
    """
    if tools is None:
        return options
    config, template = context.config, options.template or context.inputs.template
    knows_tools = template is not None and "tools" in template.variables
    if tools.choice == "auto":
        _check_auto(config, knows_tools)
    if not knows_tools or (tools.choice == "none" and config.exclude_tools_when_tool_choice_none):
        return options
    return replace(options, template_variables={**options.template_variables, "tools": tools.tools})


def _check_auto(config: ServerConfig, knows_tools: bool) -> None:
    if not config.enable_auto_tool_choice:
        raise InvalidRequestError(
            "tool_choice auto is turned off at this server (--no-enable-auto-tool-choice)",
            "tool_choice",
            "unsupported_parameter",
        )
    if not knows_tools:
        raise InvalidRequestError(
            "this model's chat template has no tools; start the server with --chat-template FILE",
            "tools",
            "unsupported_parameter",
        )
    if config.tool_call_parser is None:
        raise InvalidRequestError(
            "this server does not know how the model writes calls of tools; start it with --tool-call-parser "
            f"{'|'.join(TOOL_TAGS)}",
            "tools",
            "unsupported_parameter",
        )


def tools_without_effect(options: ChatOptions, tools: ToolUse | None) -> list[str]:
    """Names of what a request says of tools that changes nothing."""
    if tools is None or tools.choice in ("required", "named"):
        return []
    if "tools" not in options.template_variables:
        return ["tools"]
    strict = [index for index, tool in enumerate(tools.tools) if tool["function"].get("strict")]
    return [f"tools[{index}].function.strict" for index in strict]


def plan_output(
    context: ServerContext, fields: ChatRequest, tools: ToolUse | None, messages: Sequence[Message], prompt: str
) -> OutputPlan | None:
    """None: the text is the answer. `prompt`: what the model goes on with."""
    parser = context.config.reasoning_parser
    start: Start | None = None
    if parser is not None:
        if fields.continue_final_message:
            start = start_within(text_of_message(messages[-1]))
        else:
            start = start_after(prompt, always_thinks=parser in ALWAYS_THINKS)
    tool_plan = None if tools is None or tools.choice == "none" else _tool_plan(context, tools)
    if start is None and tool_plan is None:
        return None
    return OutputPlan(tool_plan, start, fields.include_reasoning is not False)


def _tool_plan(context: ServerContext, tools: ToolUse) -> ToolPlan:
    parser = context.config.tool_call_parser
    return ToolPlan(
        schemas=tools.schemas,
        parser=parser,
        forced=tools.choice == "required",
        function=tools.function,
        parallel=tools.parallel,
        short_ids=parser == "mistral",
    )


def showing_tags(sampling: SamplingParams, plan: OutputPlan | None, tokenizer: Tokenizer) -> SamplingParams:
    """With special tokens in the text, if the parsers look for some."""
    if plan is None:
        return sampling
    tags: tuple[str, ...] = () if plan.reasoning is None else (OPEN, CLOSE)
    if plan.tools is not None and plan.tools.parser is not None:
        tags += TOOL_TAGS[plan.tools.parser]
    if any(tokenizer.token_id(tag) in tokenizer.special_token_ids for tag in tags):
        return msgspec.structs.replace(sampling, skip_special_tokens=False)
    return sampling

"""What a chat's request, the server's flags and the prompt say of how the output is to be parsed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import SamplingParams, StructuredOutputsParams
from tokenmill_server.config import ServerConfig
from tokenmill_server.context import ServerContext
from tokenmill_server.parsing.answer_grammar import (
    TAGGED_PARSERS,
    Functions,
    after_thinking,
    answer_or_calls,
    text_with_calls,
)
from tokenmill_server.parsing.call_schema import arguments_schema, calls_schema
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
        _check_auto(config, knows_tools, tools.field)
    if not knows_tools or (tools.choice == "none" and config.exclude_tools_when_tool_choice_none):
        return options
    return replace(options, template_variables={**options.template_variables, "tools": tools.tools})


def _check_auto(config: ServerConfig, knows_tools: bool, field: str) -> None:
    if not config.enable_auto_tool_choice:
        raise InvalidRequestError(
            "tool_choice auto is turned off at this server (--no-enable-auto-tool-choice)",
            "tool_choice" if field == "tools" else "function_call",
            "unsupported_parameter",
        )
    if not knows_tools:
        raise InvalidRequestError(
            "this model's chat template has no tools; start the server with --chat-template FILE",
            field,
            "unsupported_parameter",
        )
    if config.tool_call_parser is None:
        raise InvalidRequestError(
            "this server does not know how the model writes calls of tools; start it with --tool-call-parser "
            f"{'|'.join(TOOL_TAGS)}",
            field,
            "unsupported_parameter",
        )


def without_effect(
    context: ServerContext,
    fields: ChatRequest,
    options: ChatOptions,
    tools: ToolUse | None,
    messages: Sequence[Message],
) -> list[str]:
    """Names of fields that change nothing in this request, at this server."""
    has_media = any(isinstance(message["content"], list) for message in messages)
    is_unused = {
        "echo": fields.echo and messages[-1]["role"] != "assistant",
        "include_reasoning": fields.include_reasoning is False and context.config.reasoning_parser is None,
        "max_tokens": fields.max_tokens is not None and fields.max_completion_tokens not in (None, fields.max_tokens),
        "media_io_kwargs": fields.media_io_kwargs and not has_media,
        "mm_processor_kwargs": fields.mm_processor_kwargs and not has_media,
    }
    return [name for name, unused in is_unused.items() if unused] + _unused_tools(context, fields, options, tools)


def _unused_tools(
    context: ServerContext, fields: ChatRequest, options: ChatOptions, tools: ToolUse | None
) -> list[str]:
    if tools is None:
        return []
    has_format = fields.structured_outputs is not None or _is_structured(fields)
    if tools.is_forced:
        return ["response_format"] if has_format else []
    if "tools" not in options.template_variables:
        return [tools.field]
    if tools.choice == "auto" and _can_tag_calls(context):
        return []
    unused = ["tool_choice"] if has_format and tools.choice == "auto" else []
    return unused + [f"tools[{index}].function.strict" for index, name in tools.strict]


def with_grammar_of_calls(
    context: ServerContext, sampling: SamplingParams, fields: ChatRequest, tools: ToolUse | None
) -> SamplingParams:
    """With the grammar of calls: of those that the client wants in any case, of those that may take the place of a
    structured answer, of those of strict tools.

    Raises InvalidRequestError if the output is to look like something else as well.
    """
    wanted = sampling.structured_outputs
    if tools is None or tools.choice == "none":
        return sampling
    if tools.is_forced:
        if fields.structured_outputs is not None:
            raise InvalidRequestError(
                "structured_outputs contradict tool_choice, which forces the output to be calls; leave one out",
                "structured_outputs",
            )
        wanted = _forced_calls(tools)
    elif _can_tag_calls(context):
        parser = context.config.tool_call_parser or ""
        functions = Functions(tools.schemas, [name for _, name in tools.strict])
        if wanted is not None:
            wanted = answer_or_calls(wanted, parser, functions, parallel=tools.parallel)
        elif tools.strict:
            wanted = text_with_calls(parser, functions, tools.field)
    return msgspec.structs.replace(sampling, structured_outputs=wanted)


def _forced_calls(tools: ToolUse) -> StructuredOutputsParams:
    """Room for whitespace would be room for models that write nothing else."""
    if tools.function is not None:
        schema = arguments_schema(tools.schemas[tools.function])
    else:
        schema = calls_schema(tools.schemas.items(), parallel=tools.parallel)
    return StructuredOutputsParams(json=schema, disable_any_whitespace=True, param=tools.field)


def _is_structured(fields: ChatRequest) -> bool:
    return fields.response_format is not None and fields.response_format.get("type") != "text"


def _can_tag_calls(context: ServerContext) -> bool:
    """Whether calls can be told from text by a grammar."""
    return context.config.tool_call_parser in TAGGED_PARSERS


def plan_output(
    context: ServerContext, fields: ChatRequest, tools: ToolUse | None, messages: Sequence[Message], prompt: str
) -> OutputPlan | None:
    """None: the text is the answer. `prompt`: what the model goes on with.

    Raises InvalidRequestError for a limit of thinking where nobody looks for it.
    """
    parser = context.config.reasoning_parser
    budget = fields.max_reasoning_tokens()
    if budget is not None and parser is None:
        raise InvalidRequestError(
            "thinking_token_budget needs a server that was started with --reasoning-parser",
            "thinking_token_budget",
            "unsupported_parameter",
        )
    start: Start | None = None
    if parser is not None:
        if fields.continue_final_message:
            start = start_within(text_of_message(messages[-1]))
        else:
            start = start_after(prompt, always_thinks=parser in ALWAYS_THINKS)
    tool_plan = None if tools is None or tools.choice == "none" else _tool_plan(context, tools)
    if start is None and tool_plan is None:
        return None
    return OutputPlan(tool_plan, start, fields.include_reasoning is not False, budget)


def _tool_plan(context: ServerContext, tools: ToolUse) -> ToolPlan:
    parser = context.config.tool_call_parser
    return ToolPlan(
        schemas=tools.schemas,
        parser=parser,
        forced=tools.choice == "required",
        function=tools.function,
        parallel=tools.parallel,
        short_ids=parser == "mistral",
        as_functions=tools.as_functions,
    )


def fitted_to(plan: OutputPlan | None, sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """With special tokens in the text, if the parsers look for some, and with a grammar that begins after thinking, or
    ends it."""
    if plan is None:
        return sampling
    changes: dict[str, Any] = {}
    tags: tuple[str, ...] = ()
    if plan.reasoning is not None:
        tags = (OPEN, CLOSE)
        wanted = after_thinking(sampling.structured_outputs, plan.reasoning, plan.max_reasoning_tokens)
        if wanted is not sampling.structured_outputs:
            changes["structured_outputs"] = wanted
    if plan.tools is not None and plan.tools.parser is not None:
        tags += TOOL_TAGS[plan.tools.parser]
    if any(tokenizer.token_id(tag) in tokenizer.special_token_ids for tag in tags):
        changes["skip_special_tokens"] = False
    return msgspec.structs.replace(sampling, **changes) if changes else sampling

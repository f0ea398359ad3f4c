"""Flags about calls of tools and thinking in the output."""

from tokenmill_server.flags.flag import Arity, Flag, Group
from tokenmill_server.flags.parsers import boolean, one_of
from tokenmill_server.parsing.registry import REASONING_PARSERS, TOOL_PARSER_ALIASES, TOOL_PARSERS

PARSING = (
    Flag(
        "enable-auto-tool-choice",
        Group.FRONTEND,
        boolean,
        True,
        "Let models choose whether they call tools (tool_choice auto)",
        "server.enable_auto_tool_choice",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "tool-call-parser",
        Group.FRONTEND,
        one_of(*TOOL_PARSERS, "auto", "none", aliases=TOOL_PARSER_ALIASES),
        "auto",
        f"How the model writes calls of tools: {', '.join(TOOL_PARSERS)}, auto (what its chat template shows) or none",
        "server.tool_call_parser",
        metavar="NAME",
        offline=False,
    ),
    Flag(
        "exclude-tools-when-tool-choice-none",
        Group.FRONTEND,
        boolean,
        False,
        "Leave tools out of the prompt if tool_choice is none",
        "server.exclude_tools_when_tool_choice_none",
        arity=Arity.SWITCH,
        offline=False,
    ),
    Flag(
        "reasoning-parser",
        Group.FRONTEND,
        one_of(*REASONING_PARSERS, "auto", "none"),
        "none",
        f"Split what the model thinks from its answer: {', '.join(REASONING_PARSERS)}, auto (what its chat template "
        "shows) or none",
        "server.reasoning_parser",
        metavar="NAME",
        offline=False,
    ),
)

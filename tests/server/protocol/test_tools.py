"""Tools as clients send them: any JSON is taken or refused by name."""

import contextlib
import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from tokenmill_engine.errors import InvalidRequestError
from tokenmill_server.parsing.call_schema import calls_schema
from tokenmill_server.parsing.parameters import ToolSchemas, convert
from tokenmill_server.processing.tool_history import HistoryShape, check_history
from tokenmill_server.protocol.tools import read_tool_use

WORDS = st.sampled_from(
    ["type", "function", "name", "parameters", "properties", "$ref", "#", "#/$defs/a", "$defs", "a", "anyOf", "enum"]
) | st.sampled_from(["const", "definitions", "object", "string", "integer", "arguments", "{}", "auto", "required"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats(allow_nan=False, allow_infinity=False) | WORDS,
    lambda children: st.lists(children, max_size=3) | st.dictionaries(WORDS, children, max_size=4),
    max_leaves=12,
)
OBJECTS = st.dictionaries(WORDS, JSON, max_size=4)
FUNCTIONS = st.fixed_dictionaries({"name": WORDS}, optional={"parameters": OBJECTS, "strict": st.booleans()})
TOOLS = st.lists(st.fixed_dictionaries({"function": FUNCTIONS | JSON}) | OBJECTS, max_size=3)


@given(tools=st.none() | TOOLS, choice=st.none() | WORDS | OBJECTS, texts=st.lists(WORDS | st.text(max_size=4)))
def test_tools(tools: list[dict[str, Any]] | None, choice: Any, texts: list[str]) -> None:
    """Whatever is taken has schemas that can be written, and values that can be converted."""
    use = None
    with contextlib.suppress(InvalidRequestError):
        use = read_tool_use(tools, choice, None)
    if use is None:
        return
    assert use.choice in ("none", "auto", "required", "named")
    assert (use.function in use.schemas) == (use.choice == "named")
    json.dumps(calls_schema(use.schemas.items(), parallel=use.parallel))
    schemas = ToolSchemas(use.schemas)
    for name in use.schemas:
        for parameter in [*schemas.names(name), "other"]:
            for text in texts:
                json.loads(convert(text, schemas.types(name, parameter)))


@given(message=OBJECTS, role=st.sampled_from(["assistant", "user", "tool"]), shape=st.builds(HistoryShape))
def test_history(message: dict[str, Any], role: str, shape: HistoryShape) -> None:
    with contextlib.suppress(InvalidRequestError):
        json.dumps(shape.fit(check_history({**message, "role": role}, "messages[0]")))

"""--structured-outputs-config."""

import pytest

from tokenmill_engine.config.structured_output import StructuredOutputConfig
from tokenmill_server.flags.structured import parse_structured


def test_json_and_mappings() -> None:
    assert parse_structured("{}") == StructuredOutputConfig() == parse_structured({"backend": "auto"})
    parsed = parse_structured({"backend": "xgrammar", "disable_additional_properties": False})
    assert parsed == StructuredOutputConfig("xgrammar", additional_properties=True)
    assert parse_structured(parsed) is parsed
    assert not parse_structured({"disable_jump_forward": True}).jump_forward


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("guidance", "an object such as"),
        (5, "an object such as"),
        ({"backend": "outlines"}, "xgrammar, guidance"),
        ({"beckend": "auto"}, "'beckend' is not known"),
        ({"disable_any_whitespace": "yes"}, "disable_any_whitespace is true or false"),
        ({"disable_jump_forward": 1}, "disable_jump_forward is true or false"),
        ({"enable_in_reasoning": True}, "enable_in_reasoning is false"),
    ],
)
def test_what_it_cannot_be(value: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_structured(value)

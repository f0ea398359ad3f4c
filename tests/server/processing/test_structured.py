"""What users say of the output, before any grammar is made of it."""

import pytest

from tokenmill_engine.config.structured_output import StructuredOutputConfig
from tokenmill_engine.errors import InvalidRequestError
from tokenmill_engine.messages import StructuredOutputsParams
from tokenmill_server.processing.structured import spec_of


@pytest.mark.parametrize(
    "given",
    [
        StructuredOutputsParams(json='{"const": "\\ud800"}', param="response_format"),
        StructuredOutputsParams(
            structural_tag='{"format": {"type": "const_string", "value": "\\udc00"}}', param="response_format"
        ),
        StructuredOutputsParams(choice=("\ud800",), param="response_format"),
    ],
)
def test_halves_of_characters_are_refused(given: StructuredOutputsParams) -> None:
    """They cannot be sent to an engine, and no output can have them."""
    with pytest.raises(InvalidRequestError, match="lone surrogate") as refusal:
        spec_of(given, StructuredOutputConfig())
    assert refusal.value.param == "response_format"

"""What users say of the output, before any grammar is made of it."""

import json

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


@pytest.mark.parametrize("structures", [5, "x", None, [1], {"begin": 2}])
def test_malformed_tags_of_the_older_form_are_left_to_the_library(structures: object) -> None:
    tag = {"structures": structures, "triggers": 7}
    spec = spec_of(StructuredOutputsParams(structural_tag=tag), StructuredOutputConfig())
    assert json.loads(spec.text)["format"] == {"type": "triggered_tags", "triggers": 7, "tags": []}

"""The compatibility table is complete: no field of ours, of OpenAI's client or of vLLM's flags is missing."""

from collections.abc import Iterable
from typing import Any

import pytest
from openai.types.chat.completion_create_params import CompletionCreateParamsBase as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsBase as CompletionParams

from tests.support.compatibility.fields import FIELDS
from tests.support.compatibility.flags import VLLM_FLAGS
from tests.support.compatibility.methods import METHODS
from tests.support.compatibility.rows import ReplyRow, Status
from tokenmill import LLM
from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.unsupported import UNSUPPORTED
from tokenmill_server.protocol.chat import ChatRequest
from tokenmill_server.protocol.completions import CompletionRequest
from tokenmill_server.protocol.fields import UNSUPPORTED as UNSUPPORTED_FIELDS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NAMES = [name for names in VLLM_FLAGS.values() for name in names.split()]
OUR_OWN_METHODS = {"shutdown", "max_model_len"}
WITHOUT_EFFECT_ANYWHERE = {"trust-remote-code"}
"""Accepted with every value."""


@pytest.mark.parametrize(
    ("path", "names"),
    [
        (CHAT, [*ChatRequest.model_fields, *UNSUPPORTED_FIELDS, *ChatParams.__annotations__]),
        (COMPLETIONS, [*CompletionRequest.model_fields, *UNSUPPORTED_FIELDS, *CompletionParams.__annotations__]),
    ],
)
def test_every_field_has_one_row(path: str, names: Iterable[str]) -> None:
    rows = [row.name for row in FIELDS[path]]
    assert len(rows) == len(set(rows))
    assert set(names) - set(rows) == set()


@pytest.mark.parametrize(("path", "model"), [(CHAT, ChatRequest), (COMPLETIONS, CompletionRequest)])
def test_fields_of_ours_are_not_listed_as_unknown(path: str, model: Any) -> None:
    listed = {row.name for row in FIELDS[path] if row.status is Status.LISTED}
    assert listed & model.model_fields.keys() == set()


@pytest.mark.parametrize("row", METHODS, ids=lambda row: row.path)
def test_methods_are_there_or_not_as_they_are_listed(row: ReplyRow) -> None:
    assert hasattr(LLM, row.path) == (row.status is not Status.ABSENT)


def test_every_method_is_listed() -> None:
    ours = {name for name in vars(LLM) if not name.startswith("_")} - OUR_OWN_METHODS
    assert ours - {row.path for row in METHODS} == set()


def test_every_flag_of_vllm_is_known() -> None:
    assert len(NAMES) == len(set(NAMES))
    assert [name for name in NAMES if name.replace("-", "_") not in {**FLAGS, **UNSUPPORTED}] == []


@pytest.mark.parametrize("row", UNSUPPORTED.values(), ids=lambda row: row.name)
def test_what_is_not_supported_is_refused_by_name(row: Any) -> None:
    if row.name in WITHOUT_EFFECT_ANYWHERE:
        return
    given = [f"--{row.name}", "no-such-value"]
    if row.is_switch:
        given = [f"--no-{row.name}" if "true" in row.neutral else f"--{row.name}"]
    with pytest.raises(ConfigError, match=f"{given[0]} .*not supported"):
        read_flags(given, {})

import pytest

from tests.support.tool_outputs import TEMPLATES
from tokenmill_engine.errors import ConfigError
from tokenmill_server.config import ServerConfig
from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.command_line import read_flags


def configure(*arguments: str) -> ServerConfig:
    return build_configuration(read_flags(["--device", "cpu", *arguments], {})).server


@pytest.mark.parametrize(("name", "template"), TEMPLATES.items())
def test_the_template_tells_the_parser(name: str, template: str) -> None:
    assert configure("--chat-template", template).tool_call_parser == name
    assert configure("--chat-template", template, "--tool-call-parser", "auto").tool_call_parser == name
    assert configure("--chat-template", template, "--tool-call-parser", "none").tool_call_parser is None
    assert configure("--chat-template", template, "--tool-call-parser", "pythonic").tool_call_parser == "pythonic"


def test_templates_that_tell_nothing() -> None:
    """The embedded model knows no tools."""
    assert configure().tool_call_parser is None
    for flag in ("--tool-call-parser", "--reasoning-parser"):
        with pytest.raises(ConfigError, match=f"^{flag} auto: the model's chat template shows none"):
            configure(flag, "auto")
    with pytest.raises(ConfigError, match="must be one of hermes, llama3_json, mistral, pythonic, qwen3_coder"):
        configure("--tool-call-parser", "qwen")


@pytest.mark.parametrize(
    ("arguments", "parser"),
    [
        ((), None),
        (("--reasoning-parser", "auto"), "qwen3"),
        (("--reasoning-parser", "deepseek_r1"), "deepseek_r1"),
    ],
)
def test_reasoning_is_split_if_asked_for(arguments: tuple[str, ...], parser: str | None) -> None:
    template = "{{ messages[0].content.split('</think>')[-1] }}"
    assert configure("--chat-template", template, *arguments).reasoning_parser == parser


def test_the_template_of_deepseek() -> None:
    template = "{{ '<｜Assistant｜>' + messages[0].content.split('</think>')[-1] }}"
    assert configure("--chat-template", template, "--reasoning-parser", "auto").reasoning_parser == "deepseek_r1"


@pytest.mark.parametrize(("alias", "name"), [("qwen3_xml", "qwen3_coder"), ("llama4_pythonic", "pythonic")])
def test_names_of_vllm(alias: str, name: str) -> None:
    assert configure("--tool-call-parser", alias, "--enable-auto-tool-choice").tool_call_parser == name

import argparse
import os
from pathlib import Path

import pytest

from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench import cli, compare_cli
from tokenmill_server.bench.compare import PEER_DRIVER, PEER_SERVER, Compare


def parse(*arguments: str) -> Compare:
    parser = argparse.ArgumentParser()
    compare_cli.add_arguments(parser)
    return compare_cli.compare_of(parser.parse_args(["--group", "offline", *arguments]))


def test_defaults() -> None:
    compare = parse("--model-8b", "/a")
    assert (compare.models, compare.rounds, compare.dtype) == ({"8b": Path("/a")}, 3, "bfloat16")
    assert (compare.max_model_len, compare.time_limit_s, compare.selected) == (8192, 520.0, ())
    assert compare.output.name.startswith("compare-offline-")
    assert compare.peer is not None
    assert (compare.peer.name, compare.peer.python, compare.peer.environment) == ("vLLM", "python3", {})
    assert (compare.peer.server, compare.peer.driver) == (PEER_SERVER, PEER_DRIVER)


def test_everything_given(tmp_path: Path) -> None:
    file = tmp_path / "peer.env"
    file.write_text("# for the peer\n\nA=1\nB=two words=x\n")
    compare = parse(
        *["--model-1b", "/b", "--rounds", "2", "--time-limit", "60", "--select", "decode", "--select", "512"],
        *["--shrink", "4", "--dtype", "float16", "--max-model-len", "99", "--prompt-format", "text", "--seed", "5"],
        *["--args=--enforce-eager --seed 1", "--client-args=--temperature 1", "--output", "/o", "--peer", "other"],
        *["--model-70b", "/c", "--memory-bandwidth", "3350"],
        *["--peer-python", "/p/python", "--peer-env-file", str(file), "--peer-env", "B=3", "C=", "--peer-env", "D=4"],
        *["--peer-args=--x 'a b'", "--peer-command", "{python} {port}", "--peer-driver", "{driver} {model}"],
    )
    assert (compare.models, compare.bandwidth_gb_s) == ({"1b": Path("/b"), "70b": Path("/c")}, 3350.0)
    assert compare.flags == ("--enforce-eager", "--seed", "1")
    assert compare.load_options == ("--temperature", "1")
    assert (compare.selected, compare.divisor, compare.seed) == (("decode", "512"), 4, 5)
    assert (compare.output, compare.rounds, compare.time_limit_s) == (Path("/o"), 2, 60.0)
    assert (compare.dtype, compare.max_model_len, compare.prompt_format) == ("float16", 99, "text")
    peer = compare.peer
    assert peer is not None
    assert (peer.name, peer.python, peer.flags) == ("other", "/p/python", ("--x", "a b"))
    assert peer.environment == {"A": "1", "B": "3", "C": "", "D": "4"}
    assert (peer.server, peer.driver) == ("{python} {port}", "{driver} {model}")


def test_no_peer() -> None:
    assert parse("--peer", "none").peer is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer-env", "A"], '"A" is not NAME=VALUE'),
        (["--peer-env", "=x"], '"=x" is not NAME=VALUE'),
        (["--peer-env-file", "/no/file"], "cannot read --peer-env-file /no/file"),
        (["--peer-command", "{python} {nothing}"], "may use {python} {driver}"),
        (["--peer-command", "{python} 'x"], "is wrong"),
        (["--peer-driver", ""], "is empty"),
    ],
)
def test_mistakes_are_explained(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(*arguments)
    assert message in raised.value.message


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--group online8b needs --model-8b: a folder with config.json"),
        (["--model-8b", "/no/model"], "--model-8b /no/model does not exist; name a folder with config.json"),
        (["--model-8b", __file__], "is a file but not GGUF"),
        (["--select", "nothing like it"], "no load of the group online8b has nothing like it in its name"),
        (["--output", os.devnull + "/x"], "cannot write to --output"),
    ],
)
def test_what_cannot_be_compared_is_refused(arguments: list[str], message: str) -> None:
    model = ["--model-8b", str(cached_tiny_model("llama"))]
    given = arguments if not arguments or "--model-8b" in arguments else [*arguments, *model]
    with pytest.raises(ConfigError, match=message):
        cli.main(["compare", "--group", "online8b", *given])

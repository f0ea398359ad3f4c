"""`tokenmill run-batch` as users run it, with the embedded model; also killed in the middle."""

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.support.ports import free_port
from tests.support.server import PATIENCE_S, Server, wait_for
from tokenmill_engine.config.model_files import EMBEDDED_MODEL_NAME

pytestmark = pytest.mark.slow

COMMAND = [sys.executable, "-m", "tokenmill", "run-batch", "--disable-tqdm"]
OWN_SERVER = ["--device", "cpu", "--dtype", "float32", "--kv-cache-memory-bytes", "64M"]
REFERENCE: dict[str, Any] = json.loads(
    (Path(__file__).parent.parent / "data" / "smollm2_reference.json").read_text(encoding="utf-8")
)[0]


def line(custom_id: str, url: str = "/v1/completions", **body: Any) -> str:
    fields = {"model": EMBEDDED_MODEL_NAME, "temperature": 0, **body}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": url, "body": fields})


def chat_line(custom_id: str) -> str:
    """Whose greedy answer is known."""
    messages = [{"role": "user", "content": REFERENCE["prompt"]}]
    return line(custom_id, "/v1/chat/completions", messages=messages, max_tokens=len(REFERENCE["fp32_ids"]))


def write_input(folder: Path, lines: Sequence[str]) -> list[str]:
    """The arguments that name files."""
    (folder / "in.jsonl").write_text("\n".join(lines))
    return ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]


def answers(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (folder / "out.jsonl").read_bytes().splitlines()]


def num_answers(folder: Path) -> int:
    path = folder / "out.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def run(*arguments: str, **options: Any) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=4 * PATIENCE_S, check=False, **options
    )


def test_every_line_is_answered(smollm_server: Server, tmp_path: Path) -> None:
    lines = [
        chat_line("chat"),
        "nonsense",
        line("text", prompt="The capital of France is", max_tokens=4, n=2, seed=1),
        line("unknown", prompt="x", model="gpt"),
        line("wrong", prompt="x", temperature=-1),
        line("long", prompt="x " * 20_000),
        line("chat", prompt="x"),
    ]
    done = run(*write_input(tmp_path, lines), "--base-url", f"{smollm_server.url}/v1")
    assert (done.returncode, done.stderr) == (0, "7 lines are answered; 5 failed\n")
    chat, bad, text, *refused, twice = answers(tmp_path)
    assert chat["response"]["body"]["choices"][0]["message"]["content"] == REFERENCE["fp32_text"]
    assert chat["response"]["request_id"].startswith("batch-")
    known = smollm_server.text("The capital of France is", max_tokens=4)
    assert [choice["text"] for choice in text["response"]["body"]["choices"]] == [known] * 2
    assert [each["custom_id"] for each in refused] == ["unknown", "wrong", "long"]
    assert [each["response"]["status_code"] for each in refused] == [404, 400, 400]
    assert all(each["error"]["message"] == each["response"]["body"]["error"]["message"] for each in refused)
    assert [(each["custom_id"], each["response"], each["error"]["line"]) for each in (bad, twice)] == [
        (None, None, 2),
        (None, None, 7),
    ]


def test_killed_again_and_again_nothing_is_lost_or_done_twice(smollm_server: Server, tmp_path: Path) -> None:
    """SIGKILL whenever a few more answers are there; the last line is torn as well."""
    lines = [line(str(index), prompt=f"Number {index} is", max_tokens=1 + index % 9) for index in range(120)]
    files = write_input(tmp_path, lines)
    arguments = [*COMMAND, *files, "--base-url", smollm_server.url, "--max-concurrency", "3"]
    kept: list[bytes] = []
    for _ in range(3):
        before = num_answers(tmp_path)
        process = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
        wait_for(lambda before=before: num_answers(tmp_path) >= before + 8, PATIENCE_S, "answers", poll_s=0.002)
        process.kill()
        process.wait()
        kept = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
        assert before + 8 <= len(kept) < 120
        with (tmp_path / "out.jsonl").open("ab") as file:
            file.write(kept[0][:40])
    smollm_server.check_idle()
    served = smollm_server.metric("request_success_total")
    done = run(*files, "--base-url", smollm_server.url)
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith(f"120 lines are answered, {len(kept)} of them before; 0 failed\n")
    num_new = 120 - len(kept)
    wait_for(lambda: smollm_server.metric("request_success_total") - served >= num_new, PATIENCE_S, "counts")
    smollm_server.check_idle()
    assert smollm_server.metric("request_success_total") - served == num_new
    # What was there stays as it was.
    written = (tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)
    assert Counter(kept) <= Counter(written)
    texts = {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in answers(tmp_path)}
    assert list(texts) == [str(index) for index in range(120)]
    for index in (0, 17, 119):
        assert texts[str(index)] == smollm_server.text(f"Number {index} is", max_tokens=1 + index % 9)
    smollm_server.check_idle()


def test_a_server_of_its_own_ends_with_it(tiny_model: Path, tmp_path: Path) -> None:
    """Ended before the server is ready, killed in the middle, then to the end. Variables that are meant for servers
    change nothing."""
    lines = [line(str(index), prompt="Once", model="tiny", max_tokens=200, ignore_eos=True) for index in range(40)]
    environment = {**os.environ, "TOKENMILL_PORT": "1", "VLLM_API_KEY": "k", "TOKENMILL_MAX_NUM_QUEUED_REQS": "1"}
    arguments = [*write_input(tmp_path, lines), "--model", str(tiny_model), "--served-model-name", "tiny", *OWN_SERVER]
    port = free_port()
    for number, least, status in ((signal.SIGTERM, 0, 128 + signal.SIGTERM), (signal.SIGKILL, 2, -signal.SIGKILL)):
        command = [*COMMAND, *arguments, "--max-concurrency", "2", "--enable-metrics", "--port", str(port)]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
        self = psutil.Process(process.pid)
        wait_for(lambda self=self: len(self.children(recursive=True)) >= 2, PATIENCE_S, "a server", poll_s=0.005)
        wait_for(lambda least=least: num_answers(tmp_path) >= least, 2 * PATIENCE_S, "answers", poll_s=0.002)
        if least:
            assert "request_success_total" in httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S).text
        server = self.children(recursive=True)
        process.send_signal(number)
        assert process.wait(PATIENCE_S) == status
        _, alive = psutil.wait_procs(server, PATIENCE_S)
        assert alive == []
        assert num_answers(tmp_path) < len(lines)
    done = run(*arguments, env=environment)
    assert done.returncode == 0, done.stderr
    assert "40 lines are answered, " in done.stderr
    assert [each["custom_id"] for each in answers(tmp_path)] == [str(index) for index in range(40)]
    assert len({each["response"]["body"]["choices"][0]["text"] for each in answers(tmp_path)}) == 1
    # Nothing to send: no server is started, which could not.
    again = run(*arguments[:4], "--model", str(tmp_path))
    assert (again.returncode, again.stderr.splitlines()[-1:]) == (
        0,
        ["40 lines are answered, 40 of them before; 0 failed"],
    )


def test_a_server_that_cannot_start(tmp_path: Path) -> None:
    done = run(*write_input(tmp_path, [chat_line("a")]), "--model", str(tmp_path))
    assert done.returncode == 1
    assert "the server ended with status 1 before it was ready: see above" in done.stderr
    assert (tmp_path / "out.jsonl").read_bytes() == b""

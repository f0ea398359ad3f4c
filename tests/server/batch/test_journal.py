import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_server.batch.journal import Journal, Stream
from tokenmill_server.batch.lines import Answer, BadLineError, answered, read_request, unsent

ORDERED_AND_KILLED = """
import os, sys
from pathlib import Path
from tokenmill_server.batch.journal import Journal
from tokenmill_server.batch.lines import BadLineError, unsent

left = int(sys.argv[2])

def count_down(descriptor):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), 9)

os.fsync = count_down
journal = Journal(Path(sys.argv[1]))
if not len(journal):
    for index in (2, 0, 1):
        journal.append(unsent(index + 1, BadLineError("bad", str(index))))
journal.put_in_order(["0", "1", "2"])
"""
"""Arguments: the file, and at which synchronization of a file with the disk it is killed."""


def good(custom_id: str, text: str = "x") -> Answer:
    line = {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": {}}
    return answered(read_request(json.dumps(line).encode()), 200, "r", json.dumps({"text": text}).encode())


def failed(custom_id: str | None, number: int) -> Answer:
    return unsent(number, BadLineError("bad", custom_id))


def ids(path: Path) -> list[str | int]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line["custom_id"] or line["error"]["line"] for line in lines]


def test_answers_are_there_as_soon_as_they_are_appended(tmp_path: Path) -> None:
    path = tmp_path / "out"
    journal = Journal(path)
    for answer in (good("b"), failed(None, 2), good("a", "é\u2028")):
        journal.append(answer)
        assert path.read_bytes().endswith(msgspec.json.encode(answer) + b"\n")
    assert (len(journal), journal.num_failed) == (3, 1)
    assert "a" in journal
    assert 2 in journal
    assert 1 not in journal
    journal.close()


@given(cut=st.integers(1, 400))
def test_what_was_cut_off_anywhere_is_gone_on_with(cut: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("journal") / "out"
    answers = [good("first"), good("é" * 30, "long " * 20), failed(None, 9)]
    whole = [msgspec.json.encode(answer) + b"\n" for answer in answers]
    data = b"".join(whole)
    path.write_bytes(data[: max(0, len(data) - cut)])
    journal = Journal(path)
    kept = len(journal)
    # A line without its newline may be whole nevertheless.
    assert path.read_bytes() == b"".join(whole[:kept])
    assert len(data) - cut <= sum(map(len, whole[: kept + 1]))
    for answer in answers[kept:]:
        journal.append(answer)
    journal.close()
    assert path.read_bytes() == data


def test_a_tail_of_zeros_is_cut_off(tmp_path: Path) -> None:
    """What some file systems leave after a power failure."""
    path = tmp_path / "out"
    line = msgspec.json.encode(good("a")) + b"\n"
    path.write_bytes(line + b"\0" * 500)
    journal = Journal(path)
    assert len(journal) == 1
    journal.close()
    assert path.read_bytes() == line


@pytest.mark.parametrize("content", ["hello\n", "{}\n", '{"custom_id": "a", "method": "POST"}\n'])
def test_files_of_others_are_left_alone(tmp_path: Path, content: str) -> None:
    path = tmp_path / "out"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"line 1 of .* is no answer of a batch"):
        Journal(path)
    assert path.read_text() == content
    journal = Journal(path, overwrite=True)
    journal.close()
    assert path.read_text() == ""


def test_lines_come_into_order_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / "out"
    journal = Journal(path)
    path.chmod(0o640)
    for answer in (good("c"), good("old"), failed(None, 2), good("a")):
        journal.append(answer)
    journal.put_in_order(["a", 2, "c", "not there"])
    assert ids(path) == ["old", "a", 2, "c"]
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]
    journal.append(good("z"))
    inode = path.stat().st_ino
    journal.put_in_order(["a", 2, "c", "z"])
    assert ids(path) == ["old", "a", 2, "c", "z"]
    assert path.stat().st_ino == inode, "it was in order"
    journal.close()


def test_killed_while_lines_come_into_order_the_file_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "out"
    for number, order in ((1, ["2", "0", "1"]), (2, ["2", "0", "1"]), (9, ["0", "1", "2"])):
        done = subprocess.run([sys.executable, "-c", ORDERED_AND_KILLED, str(path), str(number)], check=False)
        assert done.returncode == (0 if number == 9 else -signal.SIGKILL)
        assert ids(path) == order
    assert list(tmp_path.iterdir()) == [path]


def test_failures_are_forgotten_on_request(tmp_path: Path) -> None:
    path = tmp_path / "out"
    journal = Journal(path)
    for answer in (failed("b", 1), good("c"), failed(None, 2)):
        journal.append(answer)
    journal.close()
    journal = Journal(path, retry_failed=True)
    assert ids(path) == ["c"]
    assert (len(journal), journal.num_failed) == (1, 0)
    journal.close()


def test_one_run_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "out"
    journal = Journal(path)
    journal.append(good("b"))
    journal.append(good("a"))
    for _ in range(2):
        with pytest.raises(ConfigError, match="another run writes to"):
            Journal(path)
        journal.put_in_order(["a", "b"])  # the lock goes with it
    journal.close()
    Journal(path).close()


@pytest.mark.parametrize("place", [".", "missing/out", "/dev/null"])
def test_places_that_are_no_files(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"is no file|cannot write"):
        Journal(Path(place))


def test_a_full_disk_ends_the_run_and_leaves_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out"
    journal = Journal(path)
    journal.append(good("a"))
    before = path.read_bytes()

    def write_some(descriptor: int, data: memoryview, write: "object" = os.write) -> int:
        if len(data) < 50:
            raise OSError(28, "No space left on device")
        return int(write(descriptor, data[:40]))  # type: ignore[operator]

    monkeypatch.setattr(os, "write", write_some)
    with pytest.raises(StartupError, match="No space left"):
        journal.append(good("b", "long " * 20))
    monkeypatch.undo()
    journal.close()
    assert path.stat().st_size > len(before)
    journal = Journal(path)
    assert len(journal) == 1
    journal.close()
    assert path.read_bytes() == before


def test_standard_output_takes_answers_as_they_come() -> None:
    file = io.BytesIO()
    stream = Stream(file)
    stream.append(good("b"))
    stream.append(failed(None, 1))
    stream.put_in_order([1, "b"])
    stream.close()
    assert "b" in stream
    assert (len(stream), stream.num_failed) == (2, 1)
    assert [json.loads(line)["custom_id"] for line in file.getvalue().splitlines()] == ["b", None]

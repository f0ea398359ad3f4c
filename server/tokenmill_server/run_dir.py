"""The private folder of one server (or one `LLM`): sockets between its processes, metric files, accept counts.

The owner holds a lock on the folder itself, so that the next start can tell one in use from one left by a killed
server. (systemd-tmpfiles, which ages /tmp, respects such locks too.) Where the lock says nothing, because the file
system or the owner's version of this program has none, the process that the name tells of decides.
"""

import fcntl
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

import psutil

from tokenmill_engine.errors import StartupError

_OURS = re.compile(r"tokenmill-(\d+)-[0-9a-f]{8}")
_METRICS = "metrics"
_MAX_SOCKET_PATH = 107
_LONGEST_FILE = "/engine-999.out"


class RunDir:
    """A fresh folder, removed on leaving the `with` block. Folders of dead owners are removed first.

    Raises:
        StartupError: the folder for temporary files is not usable.
    """

    def __init__(self) -> None:
        parent = Path(tempfile.gettempdir())
        self.path = parent / f"tokenmill-{os.getpid()}-{secrets.token_hex(4)}"
        if len(str(self.path)) + len(_LONGEST_FILE) > _MAX_SOCKET_PATH:
            raise StartupError(f"{parent} is too long a path for sockets; set TMPDIR to a shorter one, such as /tmp")
        remove_stale(parent)
        unlocked = parent / f".{self.path.name}"
        try:
            unlocked.mkdir(mode=0o700)
            (unlocked / _METRICS).mkdir()
            self._lock = os.open(unlocked, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            # Others look at the final name only, so they never see a folder that is not locked yet.
            unlocked.rename(self.path)
        except OSError as error:
            raise StartupError(
                f"cannot create {self.path}: {error.strerror}; set TMPDIR to a writable folder"
            ) from None

    @property
    def metrics(self) -> Path:
        """Where prometheus-client keeps one file per process and kind of metric."""
        return self.path / _METRICS

    def close(self) -> None:
        """Removes the folder. May be called twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def __enter__(self) -> "RunDir":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def remove_stale(parent: Path) -> None:
    """Removes the run folders in `parent` that are ours, that nobody holds and whose owner is gone."""
    for folder in parent.glob("tokenmill-*"):
        name = _OURS.fullmatch(folder.name)
        if name is None:
            continue
        try:
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError:
            continue
        try:
            status = os.fstat(lock)
            if status.st_uid == os.geteuid() and not _may_own(int(name[1]), status):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # somebody holds it, or this file system has no locks
            continue
        finally:
            os.close(lock)


def _may_own(pid: int, folder: os.stat_result) -> bool:
    """Whether process `pid` can be the one that created the folder: it runs for longer than the folder is unchanged.
    A younger process only has the number of an owner that is gone."""
    try:
        return psutil.Process(pid).create_time() <= folder.st_mtime
    except psutil.Error:
        return False

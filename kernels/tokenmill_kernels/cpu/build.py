"""Compiles the C++ library for this machine into the cache directory, once for all processes.

    python -m tokenmill_kernels.cpu.build        prints the path of the library

The file's name carries a hash of the sources and flags, of the processor, and of the compiler, so a stale library
is never loaded, and one cache can serve several machines. Knows nothing of torch or of what is in the library.
"""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

SOURCE_DIR = Path(__file__).parent / "csrc"
FLAGS = (
    "-std=c++20",
    "-O3",
    "-march=native",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-strict-aliasing",
    "-pthread",
    "-Wall",
    "-Wextra",
    "-Wno-psabi",
    "-Wno-uninitialized",
    "-Wno-maybe-uninitialized",
)
_COMPILERS = ("g++", "c++", "clang++")
_TIMEOUT_S = 600


class BuildError(Exception):
    """There is no compiler, or it refused the sources. The message is one line."""


def cache_dir() -> Path:
    """Where built libraries are kept: TOKENMILL_CACHE_DIR, or `tokenmill` in the user's cache directory.

    Raises:
        BuildError: the user has no home directory and names no other place.
    """
    chosen = os.environ.get("TOKENMILL_CACHE_DIR")
    if chosen:
        return Path(chosen)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tokenmill"
    except RuntimeError as error:
        raise BuildError("no home directory to keep the library in; set TOKENMILL_CACHE_DIR") from error


def find_compiler() -> str | None:
    """Path of the C++ compiler: $CXX when it is set, else the first one on the PATH."""
    chosen = os.environ.get("CXX")
    for name in (chosen,) if chosen else _COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    return None


def build() -> Path:
    """Path of a library that fits the sources and this processor; compiled now if there is none yet.

    Without a compiler, a library that an earlier one left in the cache still serves.

    Raises:
        BuildError: no library and no way to make one.
    """
    stem = f"libtokenmill-{_digest(_source_parts())}-{_digest([_processor().encode()])}"
    compiler = find_compiler()
    if compiler is None:
        for library in sorted(cache_dir().glob(f"{stem}-*.so")):
            return library
        raise BuildError("no C++ compiler found (tried $CXX, g++, c++, clang++)")
    library = cache_dir() / f"{stem}-{_digest([_compiler_version(compiler).encode()])}.so"
    if library.exists():
        return library
    try:
        library.parent.mkdir(parents=True, exist_ok=True)
        with _lock(library.with_suffix(".lock")):
            if not library.exists():
                _compile(compiler, library)
    except OSError as error:
        raise BuildError(f"cannot write to the cache directory {library.parent}: {error}") from error
    return library


def _sources() -> list[Path]:
    return sorted(path for path in SOURCE_DIR.iterdir() if path.suffix in {".cpp", ".hpp", ".h"})


def _source_parts() -> list[bytes]:
    parts = [" ".join(FLAGS).encode()]
    for path in _sources():
        parts += [path.name.encode(), path.read_bytes()]
    return parts


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:12]


def _processor() -> str:
    """What decides the meaning of -march=native: the instruction sets, as far as the system tells."""
    lines = [platform.machine()]
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return "\n".join([*lines, platform.processor()])
    for key in ("vendor_id", "cpu family", "model", "flags", "Features"):
        lines += [line for line in text.splitlines() if line.split("\t")[0].rstrip() == key][:1]
    return "\n".join(lines)


def _compiler_version(compiler: str) -> str:
    result = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if result.returncode != 0:
        raise BuildError(f"{compiler} --version failed: {_first_line(result.stderr)}")
    return result.stdout


def _compile(compiler: str, library: Path) -> None:
    """Compiles every source at once, links them, and moves the result into place in one step."""
    logger.info("Compiling the CPU kernels with %s (once; a few seconds)", compiler)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
        sources = [path for path in _sources() if path.suffix == ".cpp"]
        objects = [f"{folder}/{source.stem}.o" for source in sources]
        _run_all(
            [[compiler, *FLAGS, "-c", str(source), "-o", out] for source, out in zip(sources, objects, strict=True)]
        )
        linked = f"{folder}/{library.name}"
        _run_all([[compiler, "-shared", "-pthread", *objects, "-o", linked]])
        os.replace(linked, library)


def _run_all(commands: list[list[str]]) -> None:
    """Runs compiler commands side by side and waits for all of them.

    Raises:
        BuildError: one of them failed.
    """
    running = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for command in commands]
    try:
        errors = [process.communicate(timeout=_TIMEOUT_S)[1] for process in running]
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{commands[0][0]} took more than {_TIMEOUT_S} seconds") from error
    finally:
        for process in running:
            if process.poll() is None:
                process.kill()
                process.wait()
    for process, message in zip(running, errors, strict=True):
        if process.returncode != 0:
            raise BuildError(f"{commands[0][0]} refused the CPU kernels: {_first_error(message)}")


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no message")


def _first_error(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if "error" in line), _first_line(text))


_process_lock = threading.Lock()


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Held by one thread of one process at a time; the system frees it if the process dies."""
    with _process_lock, path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main() -> int:
    """Builds and prints the path; exit status 1 with the reason when that fails."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        library = build()
    except BuildError as error:
        logger.error("The CPU kernels were not built: %s", error)
        return 1
    sys.stdout.write(f"{library}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

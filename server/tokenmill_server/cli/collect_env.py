"""`tokenmill collect-env`: what a report of a fault needs to say about the machine. Secrets are not shown."""

import argparse
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

import tokenmill_server
from tokenmill_engine.config.cache_dir import cache_dir
from tokenmill_engine.config.device import available_host_bytes, cpu_threads, host_memory_bytes, usable_cpus
from tokenmill_engine.errors import ConfigError
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.values import FlagValues, offer_environment
from tokenmill_server.version import __version__

_DEVICE_MODULE = "tokenmill_engine.worker.machine_report"
_TIMEOUT_S = 300.0
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "asimd", "sve", "bf16")
_VARIABLES = re.compile(
    r"(TOKENMILL|VLLM|CUDA|NVIDIA|NCCL|TORCH|PYTORCH|TRITON|OMP|MKL|KMP|GOMP|HF|HUGGING_?FACE|TRANSFORMERS|TOKENIZERS"
    r"|PROMETHEUS|OPENAI|XDG_CACHE|LD|PYTHON|MALLOC)(_.*)?|PYTHON\w+|CXX|\w+_proxy|\w+_PROXY"
)
"""Those that may change what we do."""
_SECRET = re.compile(r"KEY|TOKEN(?![A-Z])|SECRET|PASS|CREDENTIAL|AUTH", re.IGNORECASE)
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+(?=@)")
_HIDDEN = "(not shown)"

Report = dict[str, dict[str, Any]]
"""Heading -> name -> value; a value that is a list has a line for each member."""


def main(arguments: Sequence[str]) -> int:
    """Prints the report; returns the exit status."""
    parser = argparse.ArgumentParser(
        "tokenmill collect-env", description="Says what this machine has, for a report of a fault.", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    options = parser.parse_args(arguments)
    report = {heading: masked(facts, os.environ) for heading, facts in collect().items()}
    sys.stdout.write(json.dumps(report, indent=2) + "\n" if options.json else _text(report))
    return 0


def collect() -> Report:
    """Everything, secrets included."""
    return {
        "Tokenmill": {
            "version": __version__,
            "folder": str(Path(tokenmill_server.__file__).parent),
            "cache": _cache(),
        },
        "System": _system(),
        "Memory and limits": _limits(),
        "Device": _device(),
        "Packages": _packages(),
        "Flags from the environment": _flags(os.environ),
        "Environment": {name: value for name, value in sorted(os.environ.items()) if _VARIABLES.fullmatch(name)},
    }


def masked(facts: Mapping[str, Any], environment: Mapping[str, str]) -> dict[str, Any]:
    """`facts` without what variables of `environment` keep secret, wherever it stands, and without what addresses have
    before their hosts."""
    secrets = {text for name, text in environment.items() if text and _SECRET.search(name)}
    # An empty or very short "secret" would blank out half of the report; under its own name it is hidden anyway.
    ordered = sorted((text for text in secrets if len(text) >= 4), key=len, reverse=True)

    def hide(value: Any) -> Any:
        if isinstance(value, list):
            return [hide(member) for member in value]
        if not isinstance(value, str):
            return value
        for secret in ordered:
            value = value.replace(secret, _HIDDEN)
        return _CREDENTIALS.sub(_HIDDEN, value)

    return {name: _HIDDEN if value and _SECRET.search(name) else hide(value) for name, value in facts.items()}


def _system() -> dict[str, Any]:
    instructions = set(_first_line_of("/proc/cpuinfo", r"(?:flags|Features)\s*:\s*(.*)").split())
    return {
        "system": _first_line_of("/etc/os-release", r'PRETTY_NAME="?(.*?)"?$') or platform.system(),
        "kernel": platform.platform(),
        "Python": f"{platform.python_version()} ({sys.executable})",
        "processor": _first_line_of("/proc/cpuinfo", r"model name\s*:\s*(.*)") or platform.machine(),
        "instructions": " ".join(name for name in _INSTRUCTIONS if name in instructions),
        "CPUs": f"{psutil.cpu_count()}, of which usable: {usable_cpus()}, at full speed: {cpu_threads()}",
        "in a container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
    }


def _limits() -> dict[str, Any]:
    shared = shutil.disk_usage("/dev/shm") if Path("/dev/shm").is_dir() else None
    return {
        "memory": f"{_gib(available_host_bytes())} of {_gib(host_memory_bytes())} available",
        "shared memory (/dev/shm)": None if shared is None else f"{_gib(shared.free)} of {_gib(shared.total)} free",
        "open files": _limit(resource.RLIMIT_NOFILE),
        "locked memory": _limit(resource.RLIMIT_MEMLOCK),
        "processes": _limit(resource.RLIMIT_NPROC),
    }


def _device() -> dict[str, Any]:
    """What torch says, in a process that may crash, and what the driver's own tool says, if it is there."""
    facts: dict[str, Any] = {}
    answer = _output([sys.executable, "-m", _DEVICE_MODULE])
    try:
        facts = json.loads(answer)
    except ValueError:
        facts["torch"] = f"failed: {answer.strip()}"
    if shutil.which("nvidia-smi"):
        facts["driver"] = _output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]).splitlines()
        facts["connections"] = _output(["nvidia-smi", "topo", "-m"]).splitlines()
    return facts


def _packages() -> dict[str, Any]:
    """Versions of what we need, and of the libraries that torch brings."""
    found = {}
    for distribution in importlib.metadata.distributions():
        name = _normal(distribution.metadata["Name"] or "")
        found[name] = distribution.version
    wanted = {name for name in found if name.startswith("nvidia-")} | set(_requirements())
    return {name: found.get(name, "not installed") for name in sorted(wanted)}


def _requirements() -> Iterator[str]:
    try:
        requirements = importlib.metadata.requires("tokenmill") or []
    except importlib.metadata.PackageNotFoundError:
        return
    for requirement in requirements:
        if "extra ==" not in requirement:
            yield _normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0])


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _flags(environment: Mapping[str, str]) -> dict[str, Any]:
    """Flags of `tokenmill serve` that variables set."""
    values = FlagValues()
    facts: dict[str, Any] = {}
    try:
        offer_environment(values, environment)
    except ConfigError as error:
        facts["error"] = error.message
    for key, origin in values.given.items():
        facts[f"--{FLAGS[key].name}"] = f"{values[key]} ({origin})"
    return facts


def _cache() -> str:
    try:
        return str(cache_dir())
    except RuntimeError as error:
        return f"none: {error}"


def _output(command: Sequence[str]) -> str:
    """What a program says, or why it says nothing."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_TIMEOUT_S:g} s"
    except OSError as error:
        return str(error)
    if done.returncode != 0:
        last = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        return f"status {done.returncode}: {last}"
    return done.stdout


def _first_line_of(path: str, pattern: str) -> str:
    """What the group of `pattern` is in the first line that matches; empty if none does."""
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    match = re.search(f"^{pattern}", text, re.MULTILINE)
    return match[1].strip() if match else ""


def _limit(number: int) -> str:
    return " of ".join(
        "unlimited" if each == resource.RLIM_INFINITY else str(each) for each in resource.getrlimit(number)
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _text(report: Report) -> str:
    lines = []
    for heading, facts in report.items():
        lines.append(f"{heading}:")
        for name, value in facts.items():
            if isinstance(value, list):
                lines.append(f"  {name}:{'' if value else ' none'}")
                lines += [f"    {member}" for member in value]
            else:
                lines.append(f"  {name}: {_word(value)}")
        if not facts:
            lines.append("  none")
    return "\n".join(lines) + "\n"


def _word(value: object) -> str:
    """In a line of text."""
    if value is None:
        return "none"
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)

"""What a comparison prints: medians of both sides beside each other, their ratio, and the device that gave them."""

import os
import shutil
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenmill_server.bench.compare_plan import Row, Side

_NVIDIA_SMI_S = 10.0


@dataclass(slots=True, frozen=True)
class Measurement:
    """Figures of one load in one round."""

    side: Side
    variant: str
    load: str
    round: int
    figures: dict[str, float]
    command: str = ""
    """What was run, or the task that the driver got."""


def format_table(rows: Sequence[Row], measurements: Sequence[Measurement], peer_name: str | None) -> str:
    """A Markdown table: the median of the rounds, with the extremes where they differ, and ours by the peer's.
    Rows without any figure are left out."""
    lines = [f"| | Tokenmill | {peer_name} | ratio |", "|---|---|---|---|"]
    if peer_name is None:
        lines = ["| | Tokenmill |", "|---|---|"]
    for row in rows:
        ours = _row_values(measurements, "ours", row)
        peer = _row_values(measurements, "peer", row)
        if not ours and not peer:
            continue
        cells = [row.title, _cell(ours)]
        if peer_name is not None:
            cells += [_cell(peer), _ratio(ours, peer)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _row_values(measurements: Sequence[Measurement], side: Side, row: Row) -> list[float]:
    """One figure of each round; where the row has a base, how many times its median each of them is."""
    values = _values(measurements, side, row.ours if side == "ours" else row.peer, row.load, row.metric)
    if row.base is None:
        return values
    variant = row.base.ours if side == "ours" else row.base.peer
    base = _values(measurements, side, variant, row.base.load, row.metric)
    whole = row.base.times * statistics.median(base) if base else 0.0
    return [value / whole for value in values] if whole else []


def _values(
    measurements: Sequence[Measurement], side: Side, variant: str | None, load: str, metric: str
) -> list[float]:
    return [
        each.figures[metric]
        for each in measurements
        if (each.side, each.variant, each.load) == (side, variant, load) and metric in each.figures
    ]


def _cell(values: Sequence[float]) -> str:
    if not values:
        return ""
    text = _number(statistics.median(values))
    return text if len(values) == 1 else f"{text} ({_number(min(values))} to {_number(max(values))})"


def _ratio(ours: Sequence[float], peer: Sequence[float]) -> str:
    if not ours or not peer or statistics.median(peer) == 0:
        return ""
    return f"{statistics.median(ours) / statistics.median(peer):.3f}"


def _number(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def card_name() -> str:
    """The GPU's name, power limit and driver, or the CPU's name."""
    gpu = _nvidia_smi("name,power.limit,driver_version")
    if gpu is not None:
        return gpu
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "an unknown CPU")


def card_state() -> str | None:
    """Clocks, power, temperature and memory in use right now; None without an NVIDIA GPU."""
    return _nvidia_smi("clocks.sm,clocks.mem,power.draw,temperature.gpu,memory.used")


def memory_used_mib() -> float | None:
    """Of all NVIDIA GPUs that the sides see, together; None without any."""
    used = _nvidia_smi("memory.used")
    try:
        return sum(float(each.split()[0]) for each in used.split(";")) if used is not None else None
    except (ValueError, IndexError):  # a card that does not tell
        return None


def _nvidia_smi(fields: str) -> str | None:
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    command = [program, f"--query-gpu={fields}", "--format=csv,noheader"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_NVIDIA_SMI_S, check=True)
    except (subprocess.SubprocessError, OSError):
        return None
    return "; ".join(done.stdout.split("\n")).strip("; ") or None

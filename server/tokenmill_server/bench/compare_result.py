"""What a comparison has found so far. It is written to disk after every step, so that whatever ends the comparison
leaves what was measured."""

import dataclasses
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenmill_server.bench.compare_plan import Row, Session, Side
from tokenmill_server.bench.compare_report import Measurement, card_name, format_table
from tokenmill_server.bench.compare_sides import Deadline

_EXPECTED_START_S: dict[tuple[Side, str], float] = {
    ("ours", "8b"): 20.0,
    ("ours", "1b"): 10.0,
    ("ours", "70b"): 60.0,
    ("ours", "vl7b"): 25.0,
    ("peer", "8b"): 110.0,
    ("peer", "1b"): 65.0,
    ("peer", "70b"): 180.0,
    ("peer", "vl7b"): 130.0,
}
"""On an H100, until it has been seen here. Of 70B and of images nobody has seen any: guesses."""
_KEPT_SHARE = 0.75
"""Most that a start with caches takes of one without."""
_END_S = 4.0


@dataclass(slots=True)
class Result:
    """Figures, commands and failures, and what decides whether more rounds fit."""

    path: Path
    group: str
    rounds: int
    divisor: int
    rows: list[Row]
    peer_name: str | None
    deadline: Deadline
    card: str = field(default_factory=card_name)
    date: str = field(default_factory=lambda: datetime.now().isoformat(timespec="seconds"))
    measurements: list[Measurement] = field(default_factory=list)
    sessions: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    start_times_s: dict[tuple[Side, str], float] = field(default_factory=dict)
    load_times_s: dict[tuple[Side, str], float] = field(default_factory=dict)

    def add(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        self.save()

    def fail(self, what: str) -> None:
        self.failures.append(what)
        self.save()

    def round_s(self, session: Session) -> float:
        """What a round of `session` takes, as far as is known."""
        return sum(self.load_times_s.get((session.side, load.name), load.expected_s) for load in session.loads)

    def needed_s(self, sessions: Sequence[Session]) -> float:
        """What these sessions take with one round each."""
        return sum(self._start_s(each) + _END_S + (self.round_s(each) if each.rounds else 0.0) for each in sessions)

    def _start_s(self, session: Session) -> float:
        key = (session.side, session.model)
        seen_s = self.start_times_s.get(key, _EXPECTED_START_S[key])
        return seen_s * _KEPT_SHARE if session.cache == "kept" else seen_s

    def table(self) -> str:
        """In Markdown."""
        return format_table(self.rows, self.measurements, self.peer_name)

    def save(self) -> None:
        """Replaces the file."""
        content = {
            "date": self.date,
            "group": self.group,
            "card": self.card,
            "rounds": self.rounds,
            "divisor": self.divisor,
            "sessions": self.sessions,
            "measurements": [dataclasses.asdict(each) for each in self.measurements],
            "failures": self.failures,
            "table": self.table().splitlines(),
        }
        written = self.path.with_suffix(".tmp")
        written.write_text(json.dumps(content, indent=1) + "\n")
        os.replace(written, self.path)

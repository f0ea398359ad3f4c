"""Writes docs/flags.md and docs/metrics.md from the code, and docs/compatibility.md from the rows that tests try: `make
pages`. Tests compare the pages with what they are made from.

What the pages say in prose is in `flags.head.md` and others beside them.
"""

import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry, Metric, PlatformCollector

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.compatibility.fields import FIELDS
from tests.support.compatibility.flags import VLLM_FLAGS
from tests.support.compatibility.methods import METHODS
from tests.support.compatibility.replies import REPLIES
from tests.support.compatibility.routes import ROUTES
from tests.support.compatibility.rows import FieldRow, RouteRow, Status
from tokenmill_engine.metric_files import ProcessCollector, ProcessFacts
from tokenmill_engine.metrics import EngineMetrics, FrontendMetrics, LauncherMetrics
from tokenmill_server.flags.flag import Arity, Flag, Group
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.unsupported import UNSUPPORTED

DOCS = Path(__file__).parent
ABSENT = Status.ABSENT


def flags_page() -> Iterator[str]:
    """Chunks of docs/flags.md."""
    yield (DOCS / "flags.head.md").read_text()
    for group in Group:
        yield f"\n## {group}\n\n| flag | default | meaning |\n|---|---|---|\n"
        for flag in FLAGS.values():
            if flag.group is group:
                yield f"| {_flag_names(flag)} | {_flag_default(flag)} | {_flag_meaning(flag)} |\n"
    yield "\n## Not supported yet\n\n"
    yield "These flags of vLLM are known by name. Many accept the value that asks for what Tokenmill does anyway; any "
    yield "other\nis refused with a sentence that says so.\n\n"
    yield ", ".join(f"`--{row.name}`" for row in sorted(UNSUPPORTED.values(), key=lambda row: row.name)) + "\n"


def _flag_names(flag: Flag) -> str:
    value = {Arity.SWITCH: "", Arity.MANY: f" {flag.metavar} ..."}.get(flag.arity, f" {flag.metavar}")
    names = [f"`--{flag.name}{value}`", *(f"`{short}`" for short in flag.short)]
    if flag.arity is Arity.SWITCH:
        names.append(f"`--no-{flag.name}`")
    return ", ".join(names).replace("|", "\\|") + ("" if flag.offline else " *")


def _flag_default(flag: Flag) -> str:
    if flag.default is None or flag.default == ():
        return ""
    if isinstance(flag.default, bool):
        return "on" if flag.default else "off"
    return ", ".join(flag.default) if isinstance(flag.default, tuple) else str(flag.default)


def _flag_meaning(flag: Flag) -> str:
    aliases = [f"`{alias.name}`" + (" (in GiB)" if alias.unit == 2**30 else "") for alias in flag.env]
    text = flag.help.replace("|", "\\|").replace("<", "&lt;")
    return f"{text}. Also {' and '.join(aliases)}" if aliases else text


def metrics_page() -> Iterator[str]:
    """Chunks of docs/metrics.md."""
    yield (DOCS / "metrics.head.md").read_text()
    engine, frontend, launcher = CollectorRegistry(), CollectorRegistry(), CollectorRegistry()
    metrics = EngineMetrics("m", 0, 8192, registry=engine)
    metrics.set_startup({"load": 0.0})
    metrics.set_cache_config({})
    FrontendMetrics("m", 1, 8192, registry=frontend).observe_http("/health", "GET", 200, 0.0)
    LauncherMetrics("m", [0], registry=launcher)
    processes = CollectorRegistry()
    processes.register(ProcessCollector(lambda: [ProcessFacts("launcher", 0, 0, 0.0, 0.0, 0, 0)]))
    PlatformCollector(processes)
    sections = {
        "From the engine cores": engine,
        "From the API servers": frontend,
        "From the launcher": launcher,
        "Of the processes": processes,
    }
    for title, registry in sections.items():
        yield f"\n## {title}\n\n| metric | type | labels | meaning |\n|---|---|---|---|\n"
        for metric in registry.collect():
            yield f"| `{_scraped_name(metric)}` | {metric.type} | {_labels(metric)} | {metric.documentation} |\n"


def _scraped_name(metric: Metric) -> str:
    return f"{metric.name}_total" if metric.type == "counter" else metric.name


def _labels(metric: Metric) -> str:
    if metric.name.endswith("cache_config_info"):
        return "engine, one per setting of the cache"
    names = {name for sample in metric.samples for name in sample.labels} - {"le"}
    return ", ".join(sorted(names))


def compatibility_page() -> Iterator[str]:
    """Chunks of docs/compatibility.md."""
    yield (DOCS / "compatibility.head.md").read_text()
    yield "\n## Routes\n\n"
    yield from _table(("route", "", "remarks"), (_route_cells(row) for row in ROUTES))
    for path, rows in FIELDS.items():
        yield f"\n## Fields of `{path}`\n\n"
        yield from _table(
            ("field", "", "remarks"), (_field_cells(row) for row in sorted(rows, key=lambda row: row.name))
        )
    yield "\n## Fields of answers\n\nNo answer has others.\n"
    for kind, replies in REPLIES.items():
        yield f"\n### {kind.capitalize()}\n\n"
        there = [f"`{row.path}`" + (f" ({row.note})" if row.note else "") for row in replies if row.status != ABSENT]
        yield "; ".join(there) + ".\n\nNot there: "
        yield ", ".join(f"`{row.path}`" for row in replies if row.status == ABSENT) + ".\n"
    yield "\n## Methods of `LLM`\n\n"
    yield from _table(("method", "", "remarks"), ((f"`{row.path}`", row.status, row.note) for row in METHODS))
    yield "\n## Flags of `vllm serve`\n"
    for group, names in VLLM_FLAGS.items():
        yield f"\n### {group}\n\n"
        yield from _table(("flag", "", "remarks"), (_flag_cells(name) for name in names.split()))


def _table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    head = list(head)
    yield f"| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
    for cells in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def _route_cells(row: RouteRow) -> tuple[str, str, str]:
    remarks = [f"with `{row.needs}`"] if row.needs else []
    return f"`{row.method} {row.path}`", row.status, "; ".join([*remarks, *([row.note] if row.note else [])])


def _field_cells(row: FieldRow) -> tuple[str, str, str]:
    remarks = [f"with `{row.needs}`, else refused"] if row.needs else []
    return f"`{row.name}`", row.status, "; ".join([*remarks, *([row.note] if row.note else [])])


def _flag_cells(name: str) -> tuple[str, str, str]:
    key = name.replace("-", "_")
    if key in FLAGS:
        return f"`--{name}`", "works", ""
    row = UNSUPPORTED[key]
    neutral = " or ".join(f"`{value}`" for value in sorted(row.neutral - {""}))
    return f"`--{name}`", f"only {neutral}, else a start error" if neutral else "a start error", row.remark


def main() -> None:
    (DOCS / "compatibility.md").write_text("".join(compatibility_page()))
    (DOCS / "flags.md").write_text("".join(flags_page()))
    (DOCS / "metrics.md").write_text("".join(metrics_page()))


if __name__ == "__main__":
    main()

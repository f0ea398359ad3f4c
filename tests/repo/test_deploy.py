"""The files under deploy/ and the container files agree with each other and with the series that exist."""

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry

from tokenmill_engine.metrics import EngineMetrics, FrontendMetrics, LauncherMetrics
from tokenmill_server.flags.table import FLAGS

REPO = Path(__file__).parents[2]
DASHBOARD = REPO / "deploy/grafana/dashboards/tokenmill.json"
METRIC = re.compile(r"\b(?:tokenmill:[a-z0-9_]+|http_[a-z_]+)")


@pytest.fixture(scope="module")
def series() -> set[str]:
    """Every sample name that a server exports."""
    registries = [CollectorRegistry() for _ in range(3)]
    engine = EngineMetrics("m", 0, 8192, registry=registries[0])
    engine.set_cache_config({"block_size": 16})
    FrontendMetrics("m", 1, 8192, registry=registries[1]).observe_http("/health", "GET", 200, 0.1)
    LauncherMetrics("m", [0], registry=registries[2])
    return {sample.name for registry in registries for metric in registry.collect() for sample in metric.samples}


def load(path: str) -> Any:
    return yaml.safe_load((REPO / path).read_text())


def dashboard_expressions() -> Iterator[str]:
    dashboard = json.loads(DASHBOARD.read_text())
    for panel in dashboard["panels"]:
        yield from (target["expr"] for target in panel.get("targets", []))
    yield from (v["definition"] for v in dashboard["templating"]["list"] if v["type"] == "query")


def test_dashboard_uses_only_series_that_exist(series: set[str]) -> None:
    used = {name for expression in dashboard_expressions() for name in METRIC.findall(expression)}
    assert used - series == set()
    assert len(used) > 25
    assert used >= {f"tokenmill:{name}" for name in ("mm_cache_hits_total", "encoder_time_seconds_bucket")}


def test_dashboard_panels_have_unique_ids_and_do_not_overlap() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        for x in range(place["x"], place["x"] + place["w"]):
            for y in range(place["y"], place["y"] + place["h"]):
                assert (x, y) not in cells, panel["title"]
                cells.add((x, y))
        assert place["x"] + place["w"] <= 24


def test_dashboard_variables_are_defined() -> None:
    dashboard = json.loads(DASHBOARD.read_text())
    defined = {variable["name"] for variable in dashboard["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$\{?(\w+)", json.dumps(dashboard["panels"]))) <= defined


def test_alerts_use_only_series_that_exist(series: set[str]) -> None:
    rules = load("deploy/prometheus/alerts.yml")["groups"][0]["rules"]
    used = {name for rule in rules for name in METRIC.findall(rule["expr"])}
    assert used - series == set()
    assert len(used) == 8


def test_prometheus_accepts_its_configuration() -> None:
    run_promtool("check", "config", str(REPO / "deploy/prometheus/prometheus.yml"))


def test_alerts_fire_when_they_should() -> None:
    run_promtool("test", "rules", str(REPO / "tests/repo/alerts_test.yml"))


def run_promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_scrapes_the_compose_service() -> None:
    services = load("docker-compose.yml")["services"]
    (job,) = load("deploy/prometheus/prometheus.yml")["scrape_configs"]
    host, _, port = job["static_configs"][0]["targets"][0].partition(":")
    assert host in services
    assert any(mapping.endswith(f":{port}") for mapping in services[host]["ports"])
    assert int(port) == FLAGS["port"].default


def test_grafana_finds_prometheus_and_the_dashboard() -> None:
    services = load("docker-compose.yml")["services"]
    (source,) = load("deploy/grafana/provisioning/datasources/prometheus.yml")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    assert "prometheus" in services
    variables = json.loads(DASHBOARD.read_text())["templating"]["list"]
    assert variables[0]["current"]["value"] == source["uid"]
    (provider,) = load("deploy/grafana/provisioning/dashboards/tokenmill.yml")["providers"]
    mounts = dict(mount.split(":")[:2] for mount in services["grafana"]["volumes"] if mount.startswith("./"))
    folder = {target: source for source, target in mounts.items()}[provider["options"]["path"]]
    assert (REPO / folder / DASHBOARD.name).is_file()


def test_compose_paths_exist_and_ports_stay_on_this_machine() -> None:
    compose = load("docker-compose.yml")
    for service in compose["services"].values():
        for mount in service["volumes"]:
            source = mount.split(":")[0]
            assert (REPO / source).exists() if source.startswith(".") else source in compose["volumes"]
        assert all(mapping.startswith("127.0.0.1:") for mapping in service["ports"])


@pytest.mark.parametrize("file", ["docker-compose.yml", "docker-compose.gpu.yml"])
def test_compose_builds_a_target_that_exists(file: str) -> None:
    service = load(file)["services"]["tokenmill"]
    assert service["build"]["target"] in dockerfile_stages()
    assert service["image"] == f"tokenmill:{service['build']['target']}"


def test_variables_in_container_files_belong_to_flags() -> None:
    names = set(re.findall(r"\bTOKENMILL_[A-Z_]+", (REPO / "Dockerfile").read_text()))
    known = {flag.environment_variable for flag in FLAGS.values()} | {"TOKENMILL_CACHE_DIR"}
    assert names
    assert names <= known


def test_compose_passes_every_flag_on_that_the_image_does_not_decide() -> None:
    environment = load("docker-compose.yml")["services"]["tokenmill"]["environment"]
    decided = {"host", "port", "uds", "device"}
    flags = {flag.environment_variable for flag in FLAGS.values() if flag.key not in decided}
    assert set(environment) == flags | {"HF_TOKEN", "HF_ENDPOINT", "HF_HUB_OFFLINE"}
    assert set(environment.values()) == {None}, "a value here would win over the one of the shell"


def test_compose_passes_build_arguments_that_exist() -> None:
    passed = load("docker-compose.yml")["services"]["tokenmill"]["build"]["args"]
    declared = set(re.findall(r"^ARG (\w+)", (REPO / "Dockerfile").read_text(), re.MULTILINE))
    assert set(passed) == declared


def dockerfile_stages() -> dict[str, list[str]]:
    """Stage name -> its instructions, with continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", (REPO / "Dockerfile").read_text())
    stages: dict[str, list[str]] = {}
    current: list[str] = []
    for line in text.splitlines():
        if match := re.match(r"FROM \S+ AS (\S+)", line):
            current = stages.setdefault(match[1], [line])
        elif line and not line.startswith("#"):
            current.append(line)
    return stages


@pytest.mark.parametrize("target", ["cpu", "cuda"])
def test_images_run_unprivileged_with_a_health_check(target: str) -> None:
    stages = dockerfile_stages()
    instructions = stages["runtime"] + stages[target][1:]
    assert stages[target][0].startswith("FROM runtime ")
    assert "USER tokenmill" in instructions
    assert "USER root" not in instructions
    assert any(line.startswith("HEALTHCHECK") and "/health" in line for line in instructions)
    assert 'ENTRYPOINT ["tokenmill", "serve"]' in instructions
    assert f"TOKENMILL_DEVICE={target}" in " ".join(instructions)


def test_dockerfile_copies_what_the_build_context_has() -> None:
    allowed = {line[1:] for line in (REPO / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for instructions in dockerfile_stages().values():
        for line in instructions:
            if line.startswith("COPY") and "--from" not in line:
                sources = line.split()[1:-1]
                assert set(sources) <= allowed
                assert all((REPO / source).exists() for source in sources)

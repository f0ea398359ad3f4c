import pytest

from tokenmill_server.flags.api_servers import default_api_servers


@pytest.mark.parametrize(
    ("num_cpus", "num_engines", "count"),
    [
        (1, 1, 1),
        (2, 1, 1),
        (7, 1, 1),
        (8, 1, 2),
        (16, 1, 4),
        (64, 1, 4),
        (64, 8, 16),
        (16, 8, 4),
    ],
)
def test_gpu(num_cpus: int, num_engines: int, count: int) -> None:
    assert default_api_servers(num_cpus, num_engines, computes_on_cpu=False) == count


def test_cpu() -> None:
    assert {default_api_servers(cpus, engines, computes_on_cpu=True) for cpus in (2, 64) for engines in (1, 4)} == {1}

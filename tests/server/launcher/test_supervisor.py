"""What an engine core is started with."""

import pytest

from tokenmill_server.supervisor import _engine_environment


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["0", "1", "2"]),
        ("4,GPU-5,6", ["4", "GPU-5", "6"]),
        ("", ["", "", ""]),
        ("4,5", ["4", "5", ""]),
    ],
)
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_each_rank_sees_a_gpu_of_its_own(visible: str | None, expected: list[str], device: str) -> None:
    """Too few are an error of the configuration, which is checked meanwhile."""
    environment = {"A": "b"} | ({} if visible is None else {"CUDA_VISIBLE_DEVICES": visible})
    seen = [_engine_environment(environment, device, 3, rank) for rank in range(3)]
    assert [each["CUDA_VISIBLE_DEVICES"] for each in seen] == expected
    assert all(each["A"] == "b" for each in seen)


def test_a_single_engine_core_sees_what_we_see() -> None:
    assert _engine_environment({"CUDA_VISIBLE_DEVICES": "3,4"}, "cuda", 1, 0) == {"CUDA_VISIBLE_DEVICES": "3,4"}
    assert _engine_environment({}, "cuda", 1, 0) == {}


@pytest.mark.parametrize("environment", [{}, {"CUDA_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "3,4"}])
def test_on_the_cpu_nobody_needs_a_gpu_of_its_own(environment: dict[str, str]) -> None:
    assert [_engine_environment(environment, "cpu", 2, rank) for rank in range(2)] == [environment] * 2

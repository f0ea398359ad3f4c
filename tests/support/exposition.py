"""Prometheus' text format, read strictly."""


def samples(text: str) -> dict[str, float]:
    """Value by series; fails if one appears twice."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    pairs = [line.rsplit(" ", 1) for line in lines]
    result = {name: float(value) for name, value in pairs}
    assert len(result) == len(pairs)
    return result

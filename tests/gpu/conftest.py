"""Tests that need a GPU are skipped where there is none. One that does not work fails them."""

import glob

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of all folders."""
    if glob.glob("/dev/nvidia*"):
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a GPU"))

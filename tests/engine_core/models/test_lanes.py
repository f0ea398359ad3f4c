"""Lanes fill tensors of any type and memory order from any source, with and without buffers in between."""

import gc
import sys
import threading
from concurrent.futures import CancelledError
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.support.model_loading import CPU, model_config
from tests.support.tiny_models import cached_tiny_model, make_tiny_model
from tokenmill_engine.config.engine import LoadFormat
from tokenmill_engine.errors import ConfigError
from tokenmill_engine.models.lanes import Lane
from tokenmill_engine.models.loader import WeightLoading, build_model, load_weights
from tokenmill_engine.models.weights import SafetensorsSource, WeightSource

ROWS, COLUMNS = 12, 10
BUFFER_BYTES = 512


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def stored(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[WeightSource, torch.Tensor]:
    """A file with one tensor `w` [12, 10], and its values."""
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).to(request.param)
    save_file({"w": values}, tmp_path / "model.safetensors")
    return SafetensorsSource(tmp_path), values


def targets() -> dict[str, torch.Tensor]:
    """Places for 12 rows: plain ones in two types, and one whose memory holds pairs of rows in another order."""
    rows_apart = torch.zeros(2, 2, 3, COLUMNS).transpose(1, 2)
    return {
        "float32": torch.zeros(ROWS, COLUMNS),
        "bfloat16": torch.zeros(ROWS, COLUMNS, dtype=torch.bfloat16),
        "another order": rows_apart,
    }


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("buffer_bytes", [BUFFER_BYTES, 16])
def test_every_place_is_filled(stored: tuple[WeightSource, torch.Tensor], staged: bool, buffer_bytes: int) -> None:
    """Buffers that are too small cost memory, not values."""
    source, values = stored
    lane = Lane(CPU, buffer_bytes, staged=staged)
    for name, target in targets().items():
        slab = values.numel() // len(target)
        for first in range(len(target)):
            lane.copy(source, "w", first * slab, target[first : first + 1])
        lane.finish()
        torch.testing.assert_close(target.reshape(ROWS, COLUMNS), values.to(target.dtype), atol=0, rtol=0, msg=name)


def test_what_needs_no_conversion_is_read_straight_to_its_place(tmp_path: Path) -> None:
    save_file({"w": torch.ones(ROWS, COLUMNS)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    target = torch.zeros(ROWS, COLUMNS)
    read = source.read("w", 0, target.numel(), target.view(-1).view(torch.uint8))
    assert read.data_ptr() == target.data_ptr()
    assert target.sum() == ROWS * COLUMNS


def test_loading_goes_on_behind_the_caller_and_ends_with_finish() -> None:
    config = model_config(cached_tiny_model("llama"))
    model, expected = build_model(config, CPU), build_model(config, CPU)
    load_weights(expected, config)
    with WeightLoading(model, config) as loading:
        # Views of the matrices as they are before `finish` packs them.
        loaded = model.targets()
        loading.finish(allow_fused=False)
    for name, target in expected.targets().items():
        np.testing.assert_array_equal(loaded[name].view.numpy(), target.view.numpy(), err_msg=name)


def test_errors_come_with_finish(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "llama")
    config = model_config(folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with WeightLoading(build_model(config, CPU), config) as loading, pytest.raises(ConfigError, match="truncated"):
        loading.finish()


@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_loading_that_is_cancelled_stops(load_format: LoadFormat) -> None:
    config = model_config(cached_tiny_model("llama"), load_format=load_format)
    model, cancelled = build_model(config, CPU), threading.Event()
    cancelled.set()
    with pytest.raises(CancelledError):
        load_weights(model, config, cancelled)


def test_no_lane_outlives_a_load() -> None:
    """What they hold can be given back as soon as the weights are there."""
    config = model_config(cached_tiny_model("llama"))
    model = build_model(config, CPU)
    gc.collect()
    gc.disable()
    try:
        load_weights(model, config)
        assert not any(type(each) is Lane for each in gc.get_objects())
    finally:
        gc.enable()


def test_leaving_the_block_leaves_no_thread() -> None:
    config = model_config(cached_tiny_model("llama"))
    threads, interval_s = set(threading.enumerate()), sys.getswitchinterval()
    with WeightLoading(build_model(config, CPU), config):
        pass
    assert set(threading.enumerate()) <= threads
    assert sys.getswitchinterval() == interval_s

"""Processes that have vision encoders between them, each on a GPU of its own: what they make of the same images. They
are started once for any number of models: starting takes longer than all that they compute."""

import multiprocessing
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

import torch

from tests.support.media_forward import random_image
from tests.support.model_loading import model_config
from tokenmill_engine.config.engine import DtypeName
from tokenmill_engine.config.media import EncoderMode
from tokenmill_engine.distributed import nccl_group
from tokenmill_engine.distributed.group import ALONE, Group
from tokenmill_engine.distributed.torch_group import join
from tokenmill_engine.models.loader import build_model, load_weights
from tokenmill_engine.models.media_decoder import MediaDecoder
from tokenmill_engine.mrope import Grid
from tokenmill_kernels.gpu.compilation import keep_compiled_kernels

_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Encoding:
    """What to encode with what."""

    folder: Path
    grids: tuple[Grid, ...]
    dtype: DtypeName = "float32"
    mode: EncoderMode = "weights"
    use_peer_memory: bool = True

    def rows(self, device: torch.device, group: Group = ALONE) -> list[torch.Tensor]:
        """The rows of each image, encoded one by one, float32 on the CPU: those of one member of `group`."""
        config = model_config(self.folder, dtype=self.dtype, encoder_mode=self.mode)
        assert config.media is not None
        model = build_model(config, device, group=group)
        assert isinstance(model, MediaDecoder)
        load_weights(model, config)
        model.finalize()
        images = [random_image(config.media, grid, seed) for seed, grid in enumerate(self.grids)]
        return [model.encode([image])[0].float().cpu() for image in images]


class EncoderMembers:
    """`size` processes, until the end of the `with` block."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._folder = tempfile.TemporaryDirectory()
        self._connections: list[Connection] = []
        self._processes: list[multiprocessing.context.SpawnProcess] = []

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        for rank in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_member, args=(rank, self._size, self._folder.name, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._folder.cleanup()

    def rows(self, encoding: Encoding) -> list[list[torch.Tensor]]:
        """As `Encoding.rows`, of each member. Raises AssertionError if one is stuck, EOFError if one has failed."""
        for connection in self._connections:
            connection.send(encoding)
        return [_received(connection) for connection in self._connections]


def _received(connection: Connection) -> list[torch.Tensor]:
    assert connection.poll(_DEADLINE_S), "a member is stuck"
    return [torch.tensor(values) for values in connection.recv()]


def _member(rank: int, size: int, folder: str, connection: Connection) -> None:
    keep_compiled_kernels()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    host = join(rank, size, Path(folder) / "store")
    groups: dict[bool, Group] = {}
    while True:
        encoding: Encoding = connection.recv()
        uses = encoding.use_peer_memory
        if uses not in groups:
            groups[uses] = nccl_group.connect(host, device, use_peer_memory=uses)
        connection.send([each.tolist() for each in encoding.rows(device, groups[uses])])

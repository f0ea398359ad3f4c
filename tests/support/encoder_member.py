"""Processes that have a vision encoder between them, each on a GPU of its own: what it makes of the same images."""

import multiprocessing
import tempfile
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

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

_DEADLINE_S = 120.0


@dataclass(frozen=True, slots=True)
class Encoding:
    """What to encode with what, on how many GPUs."""

    folder: Path
    grids: tuple[Grid, ...]
    size: int
    dtype: DtypeName = "float32"
    mode: EncoderMode = "weights"
    use_peer_memory: bool = True

    def run(self) -> list[list[torch.Tensor]]:
        """The rows of each image, float32, of each member. Raises AssertionError if one fails or is stuck."""
        context = multiprocessing.get_context("spawn")
        with tempfile.TemporaryDirectory() as folder:
            connections, processes = [], []
            for rank in range(self.size):
                receiving, sending = context.Pipe(duplex=False)
                process = context.Process(target=_member, args=(self, rank, folder, sending), daemon=True)
                process.start()
                sending.close()
                connections.append(receiving)
                processes.append(process)
            try:
                return [_received(connection) for connection in connections]
            finally:
                for process in processes:
                    process.kill()
                    process.join()


def _received(connection: Connection) -> list[torch.Tensor]:
    assert connection.poll(_DEADLINE_S), "a member is stuck"
    return [torch.tensor(values) for values in connection.recv()]


def _member(encoding: Encoding, rank: int, folder: str, results: Connection) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group: Group = ALONE
    if encoding.size > 1:
        host = join(rank, encoding.size, Path(folder) / "store")
        group = nccl_group.connect(host, device, use_peer_memory=encoding.use_peer_memory)
    config = model_config(encoding.folder, dtype=encoding.dtype, encoder_mode=encoding.mode)
    assert config.media is not None
    model = build_model(config, device, group=group)
    assert isinstance(model, MediaDecoder)
    load_weights(model, config)
    model.finalize()
    images = [random_image(config.media, grid, seed) for seed, grid in enumerate(encoding.grids)]
    rows = [row for image in images for row in model.encode([image])]
    results.send([each.float().cpu().tolist() for each in rows])
    group.agree_min(0)  # nobody leaves before all are done

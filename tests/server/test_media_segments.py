"""The memory that API servers share: how much, for whom, and what is told if it is not there."""

import errno
import os
from dataclasses import replace

import pytest

from tests.support.shared_media import key_of, same, tensors_of
from tests.support.tiny_media_models import cached_tiny_media_model
from tests.support.tiny_models import cached_tiny_model
from tokenmill_engine.errors import StartupError
from tokenmill_engine.ipc.shared_objects import SharedObjects
from tokenmill_server import media_segments
from tokenmill_server.config import Configuration
from tokenmill_server.flags.build import build_configuration
from tokenmill_server.flags.command_line import read_flags
from tokenmill_server.media_segments import create_segments, may_share, open_store
from tokenmill_server.multimodal.settings import GIB, MIB

SHARED = ("--mm-processor-cache-type", "shm", "--mm-processor-cache-gb", "0.5")


def configure(*flags: str, model: str | None = None) -> Configuration:
    folder = model or str(cached_tiny_media_model("qwen2_vl"))
    return build_configuration(read_flags(["--model", folder, "--device", "cpu", *flags], {}))


def test_one_for_each_api_server_of_its_size_without_the_names() -> None:
    with create_segments(configure(*SHARED, "--api-server-count", "3")) as segments:
        assert [os.fstat(fd).st_size for fd in segments] == [GIB // 2 - GIB // 32] * 3
        assert [os.fstat(fd).st_blocks for fd in segments] == [0, 0, 0], "memory is taken when it is used"
        assert not any(map(os.get_inheritable, segments))
    for fd in segments:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)


@pytest.mark.parametrize(
    "flags",
    [(), ("--mm-processor-cache-type", "lru"), (*SHARED[:3], "0"), (*SHARED, "text")],
)
def test_none_where_nothing_is_shared(flags: tuple[str, ...]) -> None:
    text = str(cached_tiny_model("llama")) if "text" in flags else None
    configuration = configure(*(flag for flag in flags if flag != "text"), model=text)
    with create_segments(configuration) as segments:
        assert segments == ()


def test_flags_tell_early_whether_there_may_be_any() -> None:
    assert may_share(read_flags([*SHARED], {}))
    assert not may_share(read_flags([], {}))
    assert not may_share(read_flags([*SHARED[:3], "0"], {}))


def test_less_memory_than_all_of_them_may_take_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_segments, "available_host_bytes", lambda: GIB)
    with create_segments(configure(*SHARED, "--api-server-count", "2")) as segments:
        assert len(segments) == 2
    message = r"may take 1\.50 GiB of shared memory, --mm-processor-cache-gb for each of 3 API servers, and 1\.00 GiB"
    with pytest.raises(StartupError, match=message), create_segments(configure(*SHARED, "--api-server-count", "3")):
        pass


def test_a_file_that_may_not_be_so_large_is_a_start_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with `ulimit -f`; what was made before is closed."""
    before = set(os.listdir("/proc/self/fd"))
    sizes = []

    def ftruncate(fd: int, num_bytes: int) -> None:
        sizes.append(num_bytes)
        if len(sizes) == 2:
            raise OSError(errno.EFBIG, os.strerror(errno.EFBIG))

    monkeypatch.setattr(os, "ftruncate", ftruncate)
    with (
        pytest.raises(StartupError, match=r"no memory of 0\.5 GiB can be shared: .*too large"),
        create_segments(configure(*SHARED, "--api-server-count", "2")),
    ):
        pass
    assert set(os.listdir("/proc/self/fd")) == before


def test_an_api_server_writes_what_others_read_and_nothing_too_large() -> None:
    configuration = configure(*SHARED, "--mm-shm-cache-max-object-size-mb", "1", "--api-server-count", "2")
    with create_segments(configuration) as segments:
        stores = [open_store(fd, client, configuration.server.media) for client, fd in enumerate(segments)]
        readers = SharedObjects(segments)
        for number, store in enumerate(stores):
            tensors = tensors_of(number, 5000)
            lease = store.put(key_of(number), tensors)
            assert lease is not None
            assert lease.shared.segment == number
            assert same(readers.read(lease.shared, lease.key, lease.tensors), tensors)
        large = replace(configuration.server.media, max_shared_object_mb=2)
        assert stores[1].put(key_of(2), tensors_of(2, MIB)) is None
        assert open_store(segments[1], 1, large).put(key_of(2), tensors_of(2, MIB)) is not None

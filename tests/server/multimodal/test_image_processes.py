"""Large images are prepared in processes of their own: the same as in threads, whatever becomes of the processes."""

import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.support.image_helpers import ASKING, FILE, PLAIN, helpers, in_thread, nothing, processor_of
from tests.support.pictures import encoded, noise
from tests.support.prepared_items import made_up
from tests.support.processes import wait_for_end
from tests.support.server import PATIENCE_S, wait_for
from tokenmill_engine.errors import OverloadedError
from tokenmill_engine.ipc import stopped
from tokenmill_server.multimodal import image_processes
from tokenmill_server.multimodal.asking import Asking
from tokenmill_server.multimodal.errors import DecoderKilledError, MediaError
from tokenmill_server.multimodal.image_item import WantedImage
from tokenmill_server.multimodal.image_processes import CannotStartError, ImageFile, ImageProcesses
from tokenmill_server.multimodal.items import PreparedItem
from tokenmill_server.multimodal.processor import Detail, ImageProcessor
from tokenmill_server.multimodal.processor_kwargs import NOTHING_SAID, ProcessorKwargs


@pytest.fixture(scope="module")
def processor() -> ImageProcessor:
    return processor_of()


@pytest.fixture
def pool(processor: ImageProcessor) -> Iterator[ImageProcesses]:
    pool = ImageProcesses(processor, 1, timeout_s=PATIENCE_S)
    yield pool
    pool.close()
    wait_for(lambda: not helpers(), PATIENCE_S, "the processes are gone")


def prepare(
    pool: ImageProcesses,
    data: bytes = FILE,
    reserve: Callable[[int], None] = nothing,
    admit: Callable[[int], None] = nothing,
    find: Callable[[bytes], PreparedItem | None] = nothing,
    wanted: WantedImage = PLAIN,
    check: Callable[[], None] = nothing,
) -> PreparedItem:
    with Image.open(io.BytesIO(data)) as image:
        file = ImageFile(data, image.height, image.width, 10**8)
    return pool.prepare(file, wanted, reserve, Asking(admit, find, check))


def turned() -> bytes:
    exif = Image.Exif()
    exif[0x112] = 6
    return encoded(noise(60, 90), "JPEG", exif=exif)


@pytest.mark.parametrize("kind", ["qwen2_vl", "llava", "llava_onevision"])
def test_the_same_as_in_threads(kind: str) -> None:
    """Bit for bit, the key included."""
    processor = processor_of(kind)
    pool = ImageProcesses(processor, 1)
    pixels = noise(60, 90)
    files = [encoded(pixels, each) for each in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")]
    files += [turned(), encoded(Image.fromarray(pixels).convert("RGBA")), encoded(noise(300, 1000))]
    said: list[tuple[Detail, ProcessorKwargs]] = [("low", NOTHING_SAID), ("auto", ProcessorKwargs(max_pixels=4000))]
    for wanted in (PLAIN, *(WantedImage(*each) for each in said)):
        for data in files:
            counted: list[int] = []
            item = prepare(pool, data, admit=counted.append, wanted=wanted)
            assert item == in_thread(processor, data, wanted)
            assert counted == [item.num_tokens]
    assert len(helpers()) == 1
    pool.close()


def broken(data: bytes) -> bytes:
    return data[: len(data) // 2]


@pytest.mark.parametrize("data", [broken(FILE), broken(encoded(noise(60, 90), "JPEG")), encoded(noise(2, 900))])
def test_what_is_wrong_with_an_image(processor: ImageProcessor, pool: ImageProcesses, data: bytes) -> None:
    """The client hears the same, and the process is there for the next one."""
    prepare(pool)
    before = helpers()
    with pytest.raises(MediaError) as wanted:
        in_thread(processor, data)
    with pytest.raises(MediaError) as heard:
        prepare(pool, data)
    assert str(heard.value) == str(wanted.value)
    assert prepare(pool) == in_thread(processor)
    assert helpers() == before


def test_too_many_pixels(processor: ImageProcessor, pool: ImageProcesses) -> None:
    """A decoder may find more than the header said."""
    with pytest.raises(MediaError, match=r"90 x 60 pixels, more than the 5399 that --max-image-pixels"):
        pool.prepare(ImageFile(FILE, 60, 89, 5399), PLAIN, nothing, ASKING)


def test_an_image_that_is_not_wanted(processor: ImageProcessor, pool: ImageProcesses) -> None:
    """Since there is no room for it, or it is known."""

    def refuse(num_tokens: int) -> None:
        raise MediaError(f"{num_tokens} are too many")

    num_tokens, known = in_thread(processor).num_tokens, made_up(7)
    prepare(pool)
    before = helpers()
    with pytest.raises(MediaError, match=f"{num_tokens} are too many"):
        prepare(pool, admit=refuse)
    keys: list[bytes] = []
    assert prepare(pool, find=lambda key: keys.append(key) or known) is known
    assert keys == [in_thread(processor).key]
    assert prepare(pool) == in_thread(processor)
    assert helpers() == before


def kill(number: int) -> Callable[..., None]:
    """It has ended when this returns."""

    def act(*_arguments: object) -> None:
        (helper,) = helpers()
        helper.send_signal(number)
        wait_for(lambda: helper.status() == psutil.STATUS_ZOMBIE, PATIENCE_S, "the process has ended")

    return act


@pytest.mark.parametrize("moment", ["reserve", "admit", "find"])
def test_a_process_that_is_killed(processor: ImageProcessor, pool: ImageProcesses, moment: str) -> None:
    """That is nobody's fault. Another takes its place."""
    at: dict[str, Callable[..., None]] = {moment: kill(signal.SIGKILL)}
    with pytest.raises(OverloadedError, match="was killed; send it again"):
        prepare(pool, **at)  # type: ignore[arg-type]
    assert helpers() == []
    assert prepare(pool) == in_thread(processor)


def gone_when(is_gone: threading.Event) -> Callable[[], None]:
    def check() -> None:
        if is_gone.is_set():
            raise LookupError("nobody is there")

    return check


def test_an_image_that_nobody_wants_while_it_is_decoded(processor: ImageProcessor, pool: ImageProcesses) -> None:
    """Its process does not go on for long."""
    prepare(pool)
    (before,) = helpers()
    is_gone = threading.Event()

    def stop(*_arguments: object) -> None:
        before.suspend()
        is_gone.set()

    with pytest.raises(LookupError, match="nobody is there"):
        prepare(pool, reserve=stop, check=gone_when(is_gone))
    assert helpers() == []
    assert prepare(pool) == in_thread(processor)


def test_a_process_that_asks_soon_stays(processor: ImageProcessor, pool: ImageProcesses) -> None:
    prepare(pool)
    (before,) = helpers()
    is_gone = threading.Event()

    def stop(*_arguments: object) -> None:
        before.suspend()
        is_gone.set()

    def check() -> None:
        if is_gone.is_set():
            before.resume()
            raise LookupError("nobody is there")

    with pytest.raises(LookupError, match="nobody is there"):
        prepare(pool, reserve=stop, check=check)
    assert helpers() == [before]
    assert prepare(pool) == in_thread(processor)


def test_who_is_gone_waits_for_no_process(pool: ImageProcesses) -> None:
    is_gone, may_end, begun = threading.Event(), threading.Event(), threading.Event()

    def hold(*_arguments: object) -> None:
        begun.set()
        may_end.wait(PATIENCE_S)

    with ThreadPoolExecutor(2) as threads:
        try:
            first = threads.submit(prepare, pool, reserve=hold)
            assert begun.wait(PATIENCE_S)
            second = threads.submit(prepare, pool, check=gone_when(is_gone))
            is_gone.set()
            with pytest.raises(LookupError, match="nobody is there"):
                second.result(PATIENCE_S)
            assert not first.done()
        finally:
            may_end.set()
        first.result(PATIENCE_S)


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT])
def test_a_decoder_that_crashes(processor: ImageProcessor, pool: ImageProcesses, number: int) -> None:
    with pytest.raises(MediaError, match="makes its decoder crash"):
        prepare(pool, admit=kill(number))
    assert prepare(pool) == in_thread(processor)


def test_a_process_that_is_killed_while_idle(processor: ImageProcessor, pool: ImageProcesses) -> None:
    """Nobody notices."""
    prepare(pool)
    kill(signal.SIGKILL)()
    assert prepare(pool) == in_thread(processor)


@pytest.mark.slow
def test_killed_at_any_moment(processor: ImageProcessor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every image is prepared or refused with a reason, and nothing is left behind."""
    monkeypatch.setattr(image_processes, "_RETRY_S", 0.0)
    pool, wanted, over = ImageProcesses(processor, 2), in_thread(processor), threading.Event()
    num_open = len(os.listdir("/proc/self/fd"))

    def work() -> tuple[int, int]:
        num_prepared = num_failed = 0
        while not over.is_set():
            try:
                assert prepare(pool) == wanted
                num_prepared += 1
            except (OverloadedError, CannotStartError):
                num_failed += 1
        return num_prepared, num_failed

    random = np.random.default_rng(0)
    with ThreadPoolExecutor(3) as threads:
        running = [threads.submit(work) for _ in range(3)]
        try:
            for _ in range(20):
                wait_for(lambda: bool(helpers()), PATIENCE_S, "a process")
                over.wait(random.uniform(0, 0.3))
                for helper in helpers()[:1]:
                    helper.kill()
        finally:
            over.set()
        prepared, failed = (sum(each) for each in zip(*(each.result() for each in running), strict=True))
    assert prepared > 0
    assert 0 < failed <= 20
    pool.close()
    wait_for(lambda: not helpers(), PATIENCE_S, "the processes are gone")
    assert len(os.listdir("/proc/self/fd")) == num_open


@pytest.mark.slow
def test_a_process_that_hangs(processor: ImageProcessor) -> None:
    pool = ImageProcesses(processor, 1, timeout_s=3.0)
    wait_for(lambda: starts(pool), PATIENCE_S, "a process that starts in time")

    def stop(*_arguments: object) -> None:
        (helper,) = helpers()
        helper.suspend()

    with pytest.raises(MediaError, match="not decoded within 3 s"):
        prepare(pool, admit=stop)
    assert helpers() == []
    pool.close()


@pytest.mark.slow
def test_a_process_that_is_stopped(
    processor: ImageProcessor, pool: ImageProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By somebody outside: the image is not to blame, and another process has it done."""
    monkeypatch.setattr(stopped, "STOPPED_S", 1.0)

    def stop(*_arguments: object) -> None:
        (helper,) = helpers()
        helper.suspend()

    with pytest.raises(DecoderKilledError, match=r"was stopped .* send it again"):
        prepare(pool, admit=stop)
    assert helpers() == []
    assert prepare(pool) == in_thread(processor)


def starts(pool: ImageProcesses) -> bool:
    try:
        prepare(pool)
    except CannotStartError:
        pool._retry_at = 0.0
        return False
    return True


@pytest.mark.slow
def test_memory(pool: ImageProcesses) -> None:
    """A file cannot make its decoder take more than was reserved for it."""
    prepare(pool)
    with pytest.raises(MediaError, match=r"takes more memory to decode than it may, \d+ MiB for its size"):
        pool.prepare(ImageFile(encoded(np.zeros((8000, 8000, 3), np.uint8)), 1, 1, 10**8), PLAIN, nothing, ASKING)
    prepare(pool)


def test_it_is_not_for_a_process_to_end(processor: ImageProcessor, pool: ImageProcesses) -> None:
    """Signals that a whole group of processes gets are the server's affair."""
    prepare(pool)
    before = helpers()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        before[0].send_signal(number)
    assert prepare(pool) == in_thread(processor)
    assert helpers() == before


def test_idle_processes_end(processor: ImageProcessor) -> None:
    pool = ImageProcesses(processor, 2, idle_s=0.2)
    num_open = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        prepare(pool)
        wait_for(lambda: not helpers(), PATIENCE_S, "the process has ended")
    wait_for(lambda: len(os.listdir("/proc/self/fd")) == num_open, PATIENCE_S, "nothing of it is left")
    pool.close()


def test_closing_waits_for_nothing(pool: ImageProcesses) -> None:
    """Not even for an image that is being prepared, nor for who waits for a process."""
    begun = threading.Event()

    def stop(*_arguments: object) -> None:
        (helper,) = helpers()
        helper.suspend()
        begun.set()

    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(prepare, pool, admit=stop)
        begun.wait(PATIENCE_S)
        second = threads.submit(prepare, pool)
        pool.close()
        for each in (first, second):
            with pytest.raises(OverloadedError):
                each.result(PATIENCE_S)
    with pytest.raises(OverloadedError, match="shutting down"):
        prepare(pool)


def test_they_end_with_the_server() -> None:
    """Even if that is killed."""
    program = (
        "import tests.server.multimodal.test_image_processes as each\n"
        "def tell(*_):\n"
        "    print(each.helpers()[0].pid, flush=True)\n"
        "    each.threading.Event().wait()\n"
        "each.prepare(each.ImageProcesses(each.processor_of(), 1), admit=tell)\n"
    )
    path = os.pathsep.join([os.getcwd(), *sys.path])
    server = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert server.stdout is not None
    helper = psutil.Process(int(server.stdout.readline()))
    server.kill()
    server.wait()
    server.stdout.close()
    wait_for_end(helper)


def test_no_more_than_there_may_be(processor: ImageProcessor) -> None:
    pool, most = ImageProcesses(processor, 2), 0

    def count(*_arguments: object) -> None:
        nonlocal most
        most = max(most, len(helpers()))

    with ThreadPoolExecutor(6) as threads:
        files = [encoded(noise(60, 90, seed)) for seed in range(12)]
        items = list(threads.map(lambda data: prepare(pool, data, admit=count), files))
    assert items == [in_thread(processor, data) for data in files]
    assert most <= 2
    pool.close()

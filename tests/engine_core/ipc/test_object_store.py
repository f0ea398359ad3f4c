"""What is kept in shared memory: what is leased stays, what was asked for last stays longest, nobody reads what is not
there any more."""

import errno
import os
import threading
from collections import OrderedDict

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from tests.support.server import PATIENCE_S
from tests.support.shared_media import key_of, object_store, same, segment, tensors_of
from tokenmill_engine.ipc.arena import GRAIN_BYTES
from tokenmill_engine.ipc.object_store import Lease, ObjectStore
from tokenmill_engine.ipc.shared_objects import FIRST_OBJECT, SegmentReader, SharedObjects
from tokenmill_engine.messages import MediaTensor

NUM_GRAINS = 12


class Model:
    """An object store, and what must be true of it."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self.sizes: dict[int, int] = {}
        """Pixels of each number that was ever put."""
        self.leases: list[tuple[int, Lease]] = []
        self.old: list[tuple[int, Lease]] = []
        """Released ones."""
        self.used: OrderedDict[int, None] = OrderedDict()
        """Numbers by when they were last let go."""

    def put(self, number: int, num_pixels: int) -> None:
        num_pixels = self.sizes.setdefault(number, num_pixels)
        before = {each for each in self.sizes if key_of(each) in self.store}
        lease = self.store.put(key_of(number), tensors_of(number, num_pixels))
        after = {each for each in self.sizes if key_of(each) in self.store}
        if lease is None:
            assert before == after
        else:
            assert after <= before | {number}
            self.leases.append((number, lease))
            gone = before - after
            idle = [each for each in self.used if each in before and not self.is_leased(each)]
            assert set(idle[: len(gone)]) == gone, "the least recently used go first"

    def acquire(self, number: int) -> None:
        is_there = key_of(number) in self.store
        lease = self.store.acquire(key_of(number))
        assert (lease is not None) == is_there
        if lease is not None:
            self.leases.append((number, lease))

    def release(self, index: int) -> None:
        if self.leases:
            number, lease = self.leases.pop(index % len(self.leases))
            lease.release()
            lease.release()
            self.used.pop(number, None)
            self.used[number] = None
            self.old.append((number, lease))

    def is_leased(self, number: int) -> bool:
        return any(number == each for each, _ in self.leases)

    def check(self) -> None:
        self.store.check_invariants()
        for number, lease in self.leases:
            assert key_of(number) in self.store
            assert same(lease.read(), tensors_of(number, self.sizes[number]))
        for number, lease in self.old:
            found = lease.read()
            assert found is None or same(found, tensors_of(number, self.sizes[number]))
            if key_of(number) not in self.store:
                assert found is None
        assert self.store.num_leased == len({number for number, _ in self.leases})


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "put", "acquire", "release", "release", "clear"]),
            st.integers(0, 7),
            st.integers(0, 6 * GRAIN_BYTES),
        ),
        max_size=40,
    )
)
def test_what_is_leased_stays_and_nothing_wrong_is_read(steps: list[tuple[str, int, int]]) -> None:
    with object_store(NUM_GRAINS) as store:
        model = Model(store)
        for what, number, num_pixels in steps:
            match what:
                case "put":
                    model.put(number, num_pixels)
                case "acquire":
                    model.acquire(number)
                case "release":
                    model.release(number)
                case "clear":
                    store.clear()
                    assert store.num_objects == store.num_leased
            model.check()


def put(store: ObjectStore, number: int, num_grains: int) -> Lease | None:
    return store.put(key_of(number), pixels(number, num_grains))


def pixels(number: int, num_grains: int) -> dict[str, MediaTensor]:
    """Tensors that take so many grains, with their head."""
    return tensors_of(number, (num_grains - 1) * GRAIN_BYTES)


def leased(store: ObjectStore, number: int, num_grains: int) -> Lease:
    lease = put(store, number, num_grains)
    assert lease is not None
    return lease


def test_what_is_leased_is_no_room() -> None:
    with object_store(4) as store:
        first, second = leased(store, 1, 2), leased(store, 2, 2)
        assert put(store, 3, 2) is None
        assert same(first.read(), pixels(1, 2))
        second.release()
        assert same(leased(store, 3, 2).read(), pixels(3, 2))
        assert second.read() is None
        assert key_of(2) not in store


def test_nothing_goes_for_what_will_not_fit_anyway() -> None:
    """Two free ranges of two grains, with a leased one between them."""
    with object_store(5) as store:
        leases = [leased(store, 1, 2), leased(store, 2, 1), leased(store, 3, 2)]
        leases[0].release()
        leases[2].release()
        assert put(store, 4, 3) is None
        assert all(key_of(number) in store for number in (1, 2, 3))
        leases[1].release()
        assert put(store, 4, 3) is not None


def test_a_lease_that_nobody_has_any_more_is_none() -> None:
    with object_store(4) as store:
        lease = leased(store, 1, 4)
        assert put(store, 2, 2) is None
        del lease
        assert store.num_leased == 0
        first = store.acquire(key_of(1))
        assert first is not None
        first.release()
        del first
        assert store.num_leased == 0
        store.check_invariants()
        assert put(store, 2, 2) is not None


def test_who_asks_for_it_keeps_it_longest() -> None:
    with object_store(4) as store:
        leased(store, 1, 2).release()
        leased(store, 2, 2).release()
        again = store.acquire(key_of(1))
        assert again is not None
        again.release()
        leased(store, 3, 2)
        assert key_of(1) in store
        assert key_of(2) not in store


def test_an_object_larger_than_allowed_or_than_everything_is_not_kept() -> None:
    with object_store(4, max_object_bytes=2 * GRAIN_BYTES) as store:
        assert put(store, 1, 3) is None
        assert put(store, 2, 2) is not None
    with object_store(4) as store:
        assert put(store, 1, 5) is None
        assert put(store, 2, 4) is not None


def test_tensors_without_bytes_and_of_many_dimensions_are_kept() -> None:
    tensors = {
        "empty": MediaTensor("float32", (0, 3), b""),
        "pixel_values": MediaTensor("uint8", (2, 3, 5), bytes(range(30))),
        "seconds": MediaTensor("float32", (), b"\0\0\x80?"),
    }
    with object_store(2) as store:
        lease = store.put(key_of(0), tensors)
        assert lease is not None
        assert same(lease.read(), tensors)


def test_readers_find_it_by_its_segment() -> None:
    with segment(4) as one, segment(4) as other:
        stores = [ObjectStore(fd, number, 1 << 30) for number, fd in enumerate((one, other))]
        leases = [leased(store, number, 2) for number, store in enumerate(stores)]
        everything = SharedObjects((one, other))
        for number, lease in enumerate(leases):
            assert same(everything.read(lease.shared, lease.key, lease.tensors), pixels(number, 2))
        assert SharedObjects(()).read(leases[0].shared, leases[0].key, leases[0].tensors) is None
        assert SharedObjects((one,)).read(leases[1].shared, leases[1].key, leases[1].tensors) is None


def test_the_next_writer_makes_everything_unreadable() -> None:
    """Without looking for it: the one before may have ended at any moment."""
    with segment(4) as fd:
        before = leased(ObjectStore(fd, 0, 1 << 30), 1, 2)
        assert before.read() is not None
        after = ObjectStore(fd, 0, 1 << 30)
        assert before.read() is None
        assert after.acquire(key_of(1)) is None
        again = leased(after, 1, 2)
        assert again.shared.offset == before.shared.offset
        assert before.read() is None
        assert same(again.read(), pixels(1, 2))


def test_what_is_being_overwritten_is_missing() -> None:
    """Whatever of it is there already: the head goes first and comes last."""
    with segment(4) as fd:
        store = ObjectStore(fd, 0, 1 << 30)
        lease = leased(store, 1, 2)
        lease.release()
        reader = SegmentReader(fd)
        seen = []
        write = os.pwrite

        def pwrite(target: int, data: bytes, offset: int) -> int:
            seen.append(reader.read(lease.shared, lease.key, lease.tensors))
            return write(target, data, offset)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "pwrite", pwrite)
            leased(store, 2, 4)
        assert same(seen[0], pixels(1, 2))
        assert len(seen) == 4
        assert seen[1:] == [None, None, None]


@pytest.mark.parametrize("offset", [-4096, 0, 1, FIRST_OBJECT + 1, 1 << 20, 1 << 62])
def test_a_reference_to_nowhere_finds_nothing(offset: int) -> None:
    with object_store(4) as store:
        lease = leased(store, 1, 2)
        assert store.reader.read(replace(lease.shared, offset=offset), lease.key, lease.tensors) is None
        assert store.reader.read(lease.shared, key_of(2), lease.tensors) is None
        assert store.reader.read(lease.shared, lease.key, pixels(1, 3)) is None


def test_a_machine_without_memory_keeps_nothing_and_loses_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with object_store(4) as store, pytest.MonkeyPatch.context() as patch:
        before = leased(store, 1, 2)

        def pwrite(fd: int, data: bytes, offset: int) -> int:
            raise OSError(errno.ENOSPC, "no space left")

        patch.setattr(os, "pwrite", pwrite)
        assert put(store, 2, 2) is None
        assert put(store, 2, 2) is None
        store.check_invariants()
        assert same(before.read(), pixels(1, 2))
        patch.undo()
        assert put(store, 2, 2) is not None
    assert len([record for record in caplog.records if "no memory for prepared media" in record.getMessage()]) == 1


def test_who_comes_while_it_is_written_waits_for_it() -> None:
    """It is written once; who only looks does not wait."""
    with object_store(4) as store, pytest.MonkeyPatch.context() as patch:
        begun, may_go_on = threading.Event(), threading.Event()
        write, num_writes = os.pwrite, 0

        def pwrite(fd: int, data: bytes, offset: int) -> int:
            nonlocal num_writes
            num_writes += 1
            begun.set()
            assert may_go_on.wait(PATIENCE_S)
            return write(fd, data, offset)

        patch.setattr(os, "pwrite", pwrite)
        leases: list[Lease | None] = []
        threads = [threading.Thread(target=lambda: leases.append(put(store, 1, 2))) for _ in range(3)]
        for thread in threads:
            thread.start()
        assert begun.wait(PATIENCE_S)
        assert store.acquire(key_of(1)) is None
        may_go_on.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert num_writes == 3, "two tensors and a head"
        assert [lease is not None and same(lease.read(), pixels(1, 2)) for lease in leases] == [True] * 3
        assert store.num_leased == 1


def test_a_segment_cannot_be_made_smaller() -> None:
    """Nobody who reads it can be made to fail."""
    with segment(4) as fd:
        for num_bytes in (0, 1 << 30):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, num_bytes)

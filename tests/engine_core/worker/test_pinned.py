"""Buffers that are used again and again; who waits for the device is tested on one."""

from tokenmill_engine.worker.pinned import PinnedRing


def test_a_ring_hands_its_buffers_out_in_turn() -> None:
    numbers = iter(range(10))
    ring = PinnedRing(3, lambda: next(numbers), on_cuda=False)
    taken = []
    for _ in range(5):
        taken.append(ring.take())
        assert ring.take() == taken[-1]  # it is not in use before it is marked
        ring.mark_used()
    assert taken == [0, 1, 2, 0, 1]

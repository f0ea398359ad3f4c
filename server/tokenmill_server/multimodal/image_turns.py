"""Images that a program hands over, decoded by one thread at a time.

Pillow reads a file when its pixels are first wanted, and two threads that want those of one image get damaged ones, or
errors. Several prompts may show the same image, and are prepared beside each other.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from PIL import Image

_busy: set[int] = set()
_changed = threading.Condition()


@contextmanager
def alone_with(image: Image.Image) -> Iterator[None]:
    """While the context lasts, no other thread is in one with the same image. May wait."""
    with _changed:
        _changed.wait_for(lambda: id(image) not in _busy)
        _busy.add(id(image))
    try:
        yield
    finally:
        with _changed:
            _busy.remove(id(image))
            _changed.notify_all()

"""What comes and goes with media beside plans and results: bytes from memory that API servers share, and news of images
that a worker lacks. Torch-free."""

import logging
from collections.abc import Callable, Mapping

from tokenmill_engine.ipc.shared_objects import NOTHING_SHARED, SharedObjects
from tokenmill_engine.messages import MediaTensor
from tokenmill_engine.outputs import EncoderInput, MissingImages

logger = logging.getLogger(__name__)


class MediaLinks:
    """Those of one worker."""

    def __init__(self, shared: SharedObjects = NOTHING_SHARED) -> None:
        self._shared = shared
        self.tell_missing: Callable[[MissingImages], None] = lambda missing: None
        """Called for images that a step goes on without, before it does."""

    def tensors(self, image: EncoderInput) -> Mapping[str, MediaTensor] | None:
        """The tensors to encode, with their bytes. None if these were in shared memory and are there no more: the
        request that had them there has ended. Others with the same image have it encoded again."""
        if image.shared is None:
            return image.tensors
        tensors = self._shared.read(image.shared, image.key, image.tensors)
        if tensors is None:
            logger.warning("an image of %d tokens was gone from shared memory, as is its request", image.num_tokens)
        return tensors

"""What a process that may compute on a GPU does before it knows its configuration: importing libraries takes seconds,
and so does setting up the device."""

import importlib
import threading

from tokenmill_engine.config.device import open_cuda_context


def begin_context(index: int) -> None:
    """Sets up a visible device, in a thread of its own."""
    threading.Thread(target=open_cuda_context, args=(index,), name="context", daemon=True).start()


def import_cuda() -> None:
    """Imports what only GPUs need. Raises what goes wrong with that."""
    import triton

    # Part of the name of every compiled kernel: a hash of all of Triton, computed beside the next imports.
    hash_all = getattr(triton.runtime.cache, "triton_key", int)
    threading.Thread(target=hash_all, name="hash", daemon=True).start()
    importlib.import_module("tokenmill_engine.worker.cuda")

"""Imports xgrammar without what it does not need here: a third of a second and not five, 50 MB and not 250.

It imports transformers and, for type annotations and for kernels that are not used here, torch. Where torch is not
loaded anyway, stand-ins take the place of both while it is imported.
"""

import importlib
import os
import sys
import threading
from types import ModuleType
from typing import Any

_importing = threading.Lock()


class _StandIn(ModuleType):
    """Has a class of any name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})

    @staticmethod
    def tensor(*_args: object, **_kwargs: object) -> None:
        """Of the constants of kernels."""


def import_xgrammar() -> Any:
    """The module `xgrammar`."""
    with _importing:
        if "xgrammar" in sys.modules:
            return sys.modules["xgrammar"]
        # It would look for a compiler to build a bridge that nobody crosses.
        os.environ.setdefault("TVM_FFI_DISABLE_TORCH_C_DLPACK", "1")
        absent = [name for name in ("torch", "transformers") if name not in sys.modules]
        if "torch" in absent:
            sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            importlib.import_module("tvm_ffi")
            sys.modules.update({name: _StandIn(name) for name in absent})
            return importlib.import_module("xgrammar")
        finally:
            for name in absent:
                sys.modules.pop(name, None)

"""What an engine core is told of an exception in a step."""

import torch

from tokenmill_engine.errors import EngineDeadError, EngineError


def as_engine_error(error: Exception, step: int) -> EngineError:
    """EngineDeadError if no later step can work either."""
    if isinstance(error, EngineError):
        return error
    kind = EngineDeadError if isinstance(error, torch.AcceleratorError) else EngineError
    failure = kind(f"step {step} failed: {type(error).__name__}: {error}")
    failure.__cause__ = error
    return failure

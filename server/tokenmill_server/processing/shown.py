"""How values that clients sent are quoted in messages: short, whatever their size."""

import reprlib

_MAX_CHARS = 200


class _Short(reprlib.Repr):
    """Looks at the beginning of a value only."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel = 3
        self.maxstring = self.maxlong = self.maxother = _MAX_CHARS


def shown(value: object) -> str:
    """Like `repr`, cut in the middle. Costs the same for a value of any size."""
    text = _SHORT.repr(value)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}..."


_SHORT = _Short()

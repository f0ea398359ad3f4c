"""Columns of the tables of sampling parameters. A table has one row per slot."""

from typing import Final

# float32
TEMPERATURE: Final = 0
"""0 takes the most likely token."""
TOP_P: Final = 1
"""1 keeps all."""
MIN_P: Final = 2
"""0 keeps all."""
REPETITION: Final = 3
FREQUENCY: Final = 4
PRESENCE: Final = 5
NUM_FLOATS: Final = 6

# int64
TOP_K: Final = 0
"""The vocabulary size, or more, keeps all."""
SEED: Final = 1
NUM_INTEGERS: Final = 2

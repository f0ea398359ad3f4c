"""Plans and answers as bytes, between an engine core and its workers on the same machine. Torch-free.

They are pickled: both ends are processes of one program, one the child of the other. The small dataclasses of which a
plan has many go as tuples, in half the time.
"""

import pickle
from dataclasses import dataclass, fields

from tokenmill_engine.outputs import BlockAppend, MissingImages, StepPlan, StepResult

_PROTOCOL = 5
_PLAN_FIELDS = tuple(field.name for field in fields(StepPlan))
_APPENDS = _PLAN_FIELDS.index("appends")


@dataclass(slots=True, frozen=True)
class StepFailure:
    """Instead of a result: a worker could not carry out its plan number `number`, from 0."""

    number: int
    message: str
    at: float
    """Of the monotonic clock."""
    is_final: bool
    """The device is lost; no later plan can be carried out."""
    is_after_others: bool = False
    """The stages before this worker's are done with the step, and know nothing of the failure."""


Answer = StepResult | StepFailure | MissingImages
"""The last comes in front of a result, from workers that send none."""


def encode_plan(plan: StepPlan) -> bytes:
    values = [getattr(plan, name) for name in _PLAN_FIELDS]
    values[_APPENDS] = [(each.slot, each.group, each.start, each.block_ids) for each in plan.appends]
    return pickle.dumps(values, _PROTOCOL)


def decode_plan(data: bytes | bytearray) -> StepPlan:
    values = pickle.loads(data)
    values[_APPENDS] = [BlockAppend(*each) for each in values[_APPENDS]]
    return StepPlan(*values)


def encode_answer(answer: Answer) -> bytes:
    return pickle.dumps(answer, _PROTOCOL)


def decode_answer(data: bytes | bytearray) -> Answer:
    answer: Answer = pickle.loads(data)
    return answer

"""Plans and answers as bytes, between an engine core and its workers on the same machine. Torch-free.

They are pickled: both ends are processes of one program, one the child of the other. The small dataclasses of which a
plan has many go as tuples, in half the time. The pixels of images follow in messages of their own (PEP 574): they are
copied into the ring and out of it, and nowhere else.
"""

import pickle
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import msgspec

from tokenmill_engine.ipc.shared_ring import Message
from tokenmill_engine.outputs import BlockAppend, EncoderInput, MissingImages, StepPlan, StepResult, TokenMasks

_PROTOCOL = 5
_PLAN_FIELDS = tuple(field.name for field in fields(StepPlan))
_APPENDS, _MEDIA = _PLAN_FIELDS.index("appends"), _PLAN_FIELDS.index("media")
_OWN_MESSAGE_BYTES = 4096
"""Buffers from this size on follow their plan in messages of their own."""


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


def encode_plan(plan: StepPlan) -> list[Message]:
    """Messages to send one after another."""
    values = [getattr(plan, name) for name in _PLAN_FIELDS]
    values[_APPENDS] = [(each.slot, each.group, each.start, each.block_ids) for each in plan.appends]
    if plan.media is None or not plan.media.encode:
        return [pickle.dumps(values, _PROTOCOL)]
    values[_MEDIA] = replace(plan.media, encode=[_picklable(image) for image in plan.media.encode])
    following: list[Message] = []

    def stays(buffer: pickle.PickleBuffer) -> bool:
        data = buffer.raw()
        if data.nbytes >= _OWN_MESSAGE_BYTES:
            following.append(data)
        return data.nbytes < _OWN_MESSAGE_BYTES

    return [pickle.dumps(values, _PROTOCOL, buffer_callback=stays), *following]


def decode_plan(data: Message, following: Iterable[Message] = ()) -> StepPlan:
    """`following`: the messages behind the first, of which as many are taken as belong to the plan."""
    values = pickle.loads(data, buffers=following)
    values[_APPENDS] = [BlockAppend(*each) for each in values[_APPENDS]]
    return StepPlan(*values)


def encode_masks(masks: TokenMasks | None) -> bytes:
    """What follows a plan by `StepPlan.masks_follow`."""
    return pickle.dumps(None if masks is None else (masks.rows, masks.bits), _PROTOCOL)


def decode_masks(data: Message) -> TokenMasks | None:
    values = pickle.loads(data)
    return None if values is None else TokenMasks(*values)


def _picklable(image: EncoderInput) -> EncoderInput:
    """Its bytes so that pickle need not copy them, and can if they are a view."""
    tensors = {
        name: msgspec.structs.replace(tensor, data=pickle.PickleBuffer(tensor.data))
        for name, tensor in image.tensors.items()
    }
    return replace(image, tensors=tensors)


def encode_answer(answer: Answer) -> bytes:
    return pickle.dumps(answer, _PROTOCOL)


def decode_answer(data: bytes | bytearray) -> Answer:
    answer: Answer = pickle.loads(data)
    return answer

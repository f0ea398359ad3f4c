"""What a GPU runs before the first request, so that no request waits for a kernel that is compiled or loaded."""

from collections.abc import Callable
from functools import partial

import torch

from tokenmill_engine.worker.cuda_graphs import Call
from tokenmill_engine.worker.cuda_stages import CudaRelay
from tokenmill_engine.worker.cuda_steps import CudaSteps
from tokenmill_engine.worker.media_rehearsal import MediaRehearsal
from tokenmill_engine.worker.rehearsal import RehearsalPlans
from tokenmill_engine.worker.runner import Runner
from tokenmill_engine.worker.shapes import Ladder, chunk_shapes, exact_shape
from tokenmill_kernels.gpu.linear_choice import TOKEN_BLOCKS


class CudaRehearsal:
    """Calls that enqueue steps of all kinds, on few layers and no requests. The ring of the inputs must be clear before
    any are made, and be cleared when they were."""

    def __init__(
        self,
        steps: CudaSteps | CudaRelay,
        ladder: Ladder,
        plans: RehearsalPlans,
        media: MediaRehearsal | None = None,
    ) -> None:
        """The sizes of `ladder` are taken as examples of all sizes, even if `steps` has no graphs. `media`: of a model
        that looks at images."""
        self._few = steps.excerpt(ladder)
        self._runner: Runner = self._few.runner()
        self._has_graphs = steps.ladder is not None
        self._plans = plans
        self._media = media

    def to_compile(self) -> list[Callable[[], object]]:
        """These launch every variant of every kernel. What takes longest to compile comes first."""
        plans = self._plans
        with_media = [self._media.step()] if self._media is not None else []
        whole_steps = [partial(self._runner.execute, plan) for plan in (plans.largest(), *plans.unusual(), *with_media)]
        shapes = chunk_shapes(plans.max_num_seqs, plans.max_num_batched_tokens)
        scored = [partial(self._few.score_all, shape) for shape in shapes]
        # Where no request is yet, anything may be written.
        written = partial(self._few.inputs.write_apart, [(0, [0])])
        encoded = [self._encode_all] if self._media is not None else []
        return [*self._prefills(), *whole_steps, *encoded, *reversed(self._padded()), *scored, written]

    def to_run(self) -> list[Call]:
        """These use libraries as captured steps and large ones do."""
        return [*(self._padded() if self._has_graphs else ()), *self._prefills()]

    def run_unusual(self) -> None:
        """Runs steps with all that graphs cannot sample, which takes operators of torch that nothing else does."""
        for plan in self._plans.unusual():
            self._runner.execute(plan).wait()
        if self._media is not None:
            self._runner.execute(self._media.step()).wait()
            self._encode_all()

    @torch.inference_mode()
    def _encode_all(self) -> None:
        """Images of all sizes and numbers that need kernels of their own."""
        if self._media is not None and self._few.media is not None:
            self._few.media.rehearse(self._media.batches(TOKEN_BLOCKS))

    def _padded(self) -> list[Call]:
        return [call for _, call in self._few.graph_calls()]

    def _prefills(self) -> list[Call]:
        return [partial(self._few.forward, exact_shape(plan, plan.num_reqs)) for plan in self._plans.prefills()]

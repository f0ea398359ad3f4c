"""Runs prompts through `LLM` once, and tells what its engine core logged meanwhile."""

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from tokenmill import LLM, SamplingParams
from tokenmill_server.llm_outputs import RequestOutput


@dataclass(frozen=True, slots=True)
class Run:
    """Outputs in the order of the prompts, and the engine core's log."""

    outputs: list[RequestOutput]
    log: str

    @property
    def token_ids(self) -> list[list[int]]:
        return [output.outputs[0].token_ids for output in self.outputs]

    @property
    def num_preemptions(self) -> int:
        counts = re.findall(r"total_cumulative_preemption_cnt=(\d+)", self.log)
        return int(counts[-1]) if counts else 0


def run_offline(prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams], **flags: Any) -> Run:
    """One `generate` by an `LLM` with these flags, which is shut down then."""
    with _standard_error() as file:
        with LLM(**flags) as llm:
            outputs = llm.generate(list(prompts), list(sampling), use_tqdm=False)
        file.seek(0)
        log = file.read().decode(errors="replace")
    return Run(outputs, log)


@contextmanager
def _standard_error() -> Iterator[BinaryIO]:
    """A file that takes what this process and its children write to standard error; it is passed on at the end."""
    saved = os.dup(2)
    with tempfile.TemporaryFile() as file:
        sys.stderr.flush()
        os.dup2(file.fileno(), 2)
        try:
            yield file
        finally:
            sys.stderr.flush()
            os.dup2(saved, 2)
            os.close(saved)
            file.seek(0)
            os.write(2, file.read())

"""Writes a package `vllm` that answers like the peer's public classes, with known times: what the offline driver makes
of a peer can be checked where the real one is not installed."""

from pathlib import Path

_PACKAGE = '''
import sys
import time
from dataclasses import dataclass, field

from vllm.sampling_params import RequestOutputKind

assert "tokenmill_server" not in sys.modules
print("noise on standard output")


@dataclass
class SamplingParams:
    max_tokens: int
    temperature: float
    ignore_eos: bool
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.FINAL_ONLY


@dataclass
class Completion:
    token_ids: list


@dataclass
class Output:
    request_id: str
    outputs: list


class Engine:
    """Up to eight requests begin in a step, all that have begun decode; it takes 2 ms and 1 ms for each request."""

    def __init__(self):
        self.open = {}

    def add_request(self, request_id, prompt, params):
        assert params.output_kind is RequestOutputKind.DELTA and params.ignore_eos and params.temperature == 0.0
        self.open[request_id] = [params.max_tokens, False]

    def has_unfinished_requests(self):
        return bool(self.open)

    def step(self):
        running = [key for key, state in self.open.items() if state[1]]
        waiting = [key for key, state in self.open.items() if not state[1]]
        for key in waiting[:8]:
            self.open[key][1] = True
            running.append(key)
        time.sleep(0.002 + 0.001 * len(running))
        for key in running:
            self.open[key][0] -= 1
            if self.open[key][0] == 0:
                del self.open[key]
        return [Output(key + "-suffix", [Completion([7])]) for key in running]


class LLM:
    def __init__(self, model, load_format, dtype, max_model_len, seed, **more):
        assert load_format == "dummy"
        self.arguments = dict(model=model, dtype=dtype, max_model_len=max_model_len, **more)
        print("arguments", self.arguments, file=sys.stderr)
        self.llm_engine = Engine()

    def generate(self, prompts, params, use_tqdm):
        if more := self.arguments.get("lost_tokens"):
            params.max_tokens -= more
        time.sleep(0.01)
        assert all(set(prompt) == {"prompt_token_ids"} for prompt in prompts)
        return [Output(str(number), [Completion([7] * params.max_tokens)]) for number, _ in enumerate(prompts)]
'''

_SAMPLING_PARAMS = """
from enum import Enum


class RequestOutputKind(Enum):
    FINAL_ONLY = 0
    DELTA = 1
"""


def write_scripted_peer(folder: Path) -> Path:
    """Puts the package into `folder`, for PYTHONPATH; returns it."""
    package = folder / "vllm"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_PACKAGE)
    (package / "sampling_params.py").write_text(_SAMPLING_PARAMS)
    facts = folder / "vllm-9.9.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
    return folder

"""vLLM's environment variables that change nothing here, and what to do instead.

Those that mean a flag of ours are aliases in its row. There are hundreds of others, most of them about vLLM's insides.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class IgnoredVariable:
    """`reason` is the end of a sentence; `neutral` are the values that ask for what happens anyway."""

    reason: str
    neutral: frozenset[str] = frozenset()


def _ignored(reason: str, *neutral: str) -> IgnoredVariable:
    return IgnoredVariable(reason, frozenset(neutral))


IGNORED: Mapping[str, IgnoredVariable] = MappingProxyType(
    {
        "VLLM_USE_V1": _ignored("there is one engine"),
        "VLLM_WORKER_MULTIPROC_METHOD": _ignored("every process is started anew, none is forked"),
        "VLLM_CPU_OMP_THREADS_BIND": _ignored(
            "the number of threads follows from the cores this process may use", "auto"
        ),
        "VLLM_BATCH_INVARIANT": _ignored(
            "use --dtype float32 for output that does not depend on the batch", "0", "false"
        ),
        "VLLM_CACHE_ROOT": _ignored("set TOKENMILL_CACHE_DIR"),
        "VLLM_HOST_IP": _ignored("use --data-parallel-address for launchers that find each other, --host for clients"),
        "VLLM_PORT": _ignored("use --port for clients, --data-parallel-rpc-port for launchers"),
        "VLLM_ENGINE_READY_TIMEOUT_S": _ignored("a start takes as long as it needs, and says what it waits for"),
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": _ignored("idle connections stay open for 75 s"),
        "VLLM_SERVER_DEV_MODE": _ignored("there are no routes for development", "0", "false"),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": _ignored("there are no LoRA adapters", "0", "false"),
        "VLLM_ALLOW_LONG_MAX_MODEL_LEN": _ignored(
            "a request is never longer than the model has positions", "0", "false"
        ),
        "VLLM_NO_USAGE_STATS": _ignored("nothing is ever sent anywhere", "1", "true"),
        "VLLM_MAX_STOP_STRINGS": _ignored("a request has four at most", "4"),
        "VLLM_MAX_N_SEQUENCES": _ignored("a request has as many choices as the API allows"),
        "VLLM_AUDIO_FETCH_TIMEOUT": _ignored("no model takes audio"),
        "VLLM_USE_RUST_FRONTEND": _ignored("there is one front end", "0", "false"),
        "VLLM_USE_MODELSCOPE": _ignored("models come from folders, files or the Hugging Face hub", "0", "false"),
        "VLLM_REGEX_COMPILATION_TIMEOUT_S": _ignored("a grammar has one second of a processor's time"),
    }
)


def sentences(variables: Mapping[str, str]) -> list[str]:
    """One for each that is known here and asks for something else than what happens."""
    return [
        f"{name} has no effect: {IGNORED[name].reason}"
        for name, value in variables.items()
        if name in IGNORED and value.lower() not in IGNORED[name].neutral
    ]

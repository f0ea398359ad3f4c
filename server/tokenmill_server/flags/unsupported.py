"""vLLM's flags that this version knows by name only.

Many accept the value that asks for what Tokenmill does anyway; any other is refused with a clear sentence, so that
nobody's setting is silently dropped.
"""

from dataclasses import dataclass
from types import MappingProxyType


@dataclass(frozen=True, slots=True)
class UnsupportedFlag:
    """`neutral` are the values (in lower case) that describe what happens anyway."""

    name: str
    neutral: frozenset[str] = frozenset()
    short: tuple[str, ...] = ()
    is_switch: bool = False
    remark: str = ""
    """What to do instead, the end of a sentence."""
    notice: str = ""
    """Why it does nothing to turn this switch on, which is allowed; the end of a sentence."""

    @property
    def key(self) -> str:
        return self.name.replace("-", "_")

    @property
    def environment_variable(self) -> str:
        return f"TOKENMILL_{self.key.upper()}"


def _switches(neutral: str, *names: str) -> list[UnsupportedFlag]:
    return [UnsupportedFlag(name, frozenset({neutral}), is_switch=True) for name in names]


def _values(*names: str) -> list[UnsupportedFlag]:
    return [UnsupportedFlag(name) for name in names]


def _value(name: str, *neutral: str, short: str | None = None, remark: str = "") -> UnsupportedFlag:
    return UnsupportedFlag(name, frozenset(neutral), () if short is None else (short,), remark=remark)


def _switch(name: str, neutral: str, short: str | None = None, remark: str = "") -> UnsupportedFlag:
    return UnsupportedFlag(name, frozenset({neutral}), () if short is None else (short,), True, remark)


_ROWS = [
    # Parallel
    _value("decode-context-parallel-size", "1", short="-dcp"),
    _value("prefill-context-parallel-size", "1", short="-pcp"),
    _switch("enable-expert-parallel", "false", short="-ep"),
    _value("data-parallel-backend", "mp", short="-dpb"),
    _switch("data-parallel-multi-port-external-lb", "false", short="-dpm"),
    _value("nnodes", "1", remark="for ranks on several machines start launchers with --headless"),
    _value("node-rank", "0"),
    *_values("master-addr", "master-port", "max-parallel-loading-workers", "worker-cls", "worker-extension-cls"),
    *_values(
        "device-ids", "distributed-timeout-seconds", "all2all-backend", "eplb-config", "expert-placement-strategy"
    ),
    *_values("dp-sync-interval", "numa-bind-nodes", "numa-bind-cpus"),
    *_switches("false", "enable-eplb", "enable-dbo", "numa-bind"),
    # Model and loading
    _value("quantization", "none", short="-q"),
    _value("tokenizer-mode", "auto", "hf", "slow", "fast"),
    UnsupportedFlag(
        "trust-remote-code",
        frozenset({"false", "true"}),
        is_switch=True,
        notice="supported models are native, no code of theirs is ever run",
    ),
    _value("model-impl", "auto", "vllm"),
    _value("logprobs-mode", "raw_logprobs"),
    _value("hf-overrides", "{}"),
    _value("override-generation-config", "{}"),
    _value("cpu-offload-gb", "0"),
    _value("hf-token", remark="set the variable HF_TOKEN"),
    _switch("use-tqdm-on-load", "true"),
    *_values("code-revision", "tokenizer-revision", "hf-config-path", "logits-processors", "pooler-config"),
    *_values("safetensors-load-strategy", "model-loader-extra-config", "ignore-patterns", "renderer-num-workers"),
    *_values("revision", "download-dir"),
    *_switches("false", "enable-prompt-embeds", "skip-tokenizer-init", "disable-sliding-window", "enable-sleep-mode"),
    # Cache
    _value("kv-cache-dtype", "auto"),
    _value("prefix-caching-hash-algo", "sha256"),
    _value("swap-space", "0", remark="preempted requests are recomputed"),
    _value("preemption-mode", "recompute", remark="preempted requests are recomputed"),
    *_values("kv-offloading-size", "kv-offloading-backend", "kv-transfer-config", "kv-events-config"),
    *_switches("false", "kv-sharing-fast-prefill"),
    # Scheduler
    _switch(
        "enable-chunked-prefill",
        "true",
        remark="prefill is always chunked and never holds up running requests, leave it out",
    ),
    _switch("scheduler-reserve-full-isl", "true"),
    _switch("disable-hybrid-kv-cache-manager", "false"),
    _switch("long-prefill-token-threshold-adaptive", "false"),
    _value("long-prefill-token-threshold", "0"),
    _value("prefill-schedule-interval", "1"),
    _value("watermark", "0", "0.0"),
    _value("scheduler-delay-factor", "0", "0.0"),
    *_values("max-num-active-seqs", "max-num-scheduled-tokens"),
    *_values("scheduler-cls", "max-num-partial-prefills", "max-long-partial-prefills"),
    # Multimodal, LoRA, speculation, structured output
    _value("mm-hasher-algorithm", "blake3"),
    *_values("video-pruning-rate", "mm-encoder-attn-backend", "default-mm-loras"),
    *_switches("false", "enable-mm-embeds", "interleave-mm-strings"),
    *_switches("false", "enable-lora", "fully-sharded-loras"),
    *_values("max-loras", "max-lora-rank", "max-cpu-loras", "lora-dtype", "lora-modules", "lora-target-modules"),
    _value("speculative-config", short="-sc"),
    *_values("spec-method", "spec-model", "spec-tokens", "guided-decoding-backend"),
    # Compilation and kernels
    _value("optimization-level", short="-O"),
    _value("compilation-config", short="-cc"),
    _value("performance-mode", "balanced"),
    *_values("attention-config", "linear-backend", "moe-backend", "kernel-config"),
    *_values("max-cudagraph-capture-size", "cuda-graph-sizes"),
    # Frontend
    _value("chat-template-content-format", "auto"),
    _value("response-role", "assistant"),
    _value("reasoning-effort-map"),
    _value("tool-strict-level", "auto", remark="set `strict` of the tools"),
    _switch("enable-log-deltas", "true", remark="no text of answers is logged"),
    _value("uvicorn-log-level", "info", remark="use --log-level"),
    *_switches("false", "log-error-stack", "grpc"),
    *_switches("false", "enable-offline-docs", "tokens-only", "enable-scale-out"),
    *_switches("true", "disable-log-requests", "disable-uvicorn-access-log", "enable-prompt-tokens-details"),
    *_switches("true", "enable-request-id-headers"),
    *_values("tool-parser-plugin", "tool-server", "reasoning-parser-plugin"),
    *_values("grpc-port"),
    # Observability
    *_switches("false", "aggregate-engine-logging", "kv-cache-metrics", "enable-mfu-metrics", "cudagraph-metrics"),
    *_values("otlp-traces-endpoint", "collect-detailed-traces", "show-hidden-metrics-for-version"),
    *_values("custom-histogram-buckets", "profiler-config", "additional-config", "kv-cache-metrics-sample"),
    _switch("enable-logging-iteration-details", "false"),
    _value("per-request-spec-decode-metrics", "none"),
]

UNSUPPORTED = MappingProxyType({row.key: row for row in _ROWS})
"""By Python name."""

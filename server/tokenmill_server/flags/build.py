"""From flag values to the frozen configuration of every process. Everything that can be checked without loading
weights is checked here: the model folder, the tokenizer, the device, lengths and sizes against each other."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from tokenmill_engine.config.attention import resolve_attention_backend
from tokenmill_engine.config.device import DeviceInfo, cpu_threads, detect_device, resolve_dtype, usable_cpus
from tokenmill_engine.config.engine import (
    CacheConfig,
    DeviceConfig,
    DtypeName,
    EngineConfig,
    LoadFormat,
    ModelConfig,
    ObservabilityConfig,
    SchedulerConfig,
)
from tokenmill_engine.config.hf_folder import read_generation_defaults
from tokenmill_engine.config.model_files import ModelFiles, check_weights, resolve_model
from tokenmill_engine.config.parallel import ParallelConfig
from tokenmill_engine.config.structured_output import StructuredOutputConfig
from tokenmill_engine.errors import ConfigError, StartupError
from tokenmill_server.config import Configuration, DataParallelConfig, FaultConfig, LoadBalancing, ServerConfig
from tokenmill_server.flags.api_servers import default_api_servers
from tokenmill_server.flags.data_parallel import resolve_data_parallel
from tokenmill_server.flags.encoder import check_encoder, with_wanted_media
from tokenmill_server.flags.media_settings import resolve_media, resolve_placement
from tokenmill_server.flags.parser_choice import resolve_parsers
from tokenmill_server.flags.pooling_choice import check_text_encoder, fit_whole_prompts, resolve_pooling
from tokenmill_server.flags.serving_check import check_serving
from tokenmill_server.flags.table import FLAGS
from tokenmill_server.flags.values import FlagValues
from tokenmill_server.flags.workers import engines_flag, resolve_workers
from tokenmill_server.tls import make_tls_context

logger = logging.getLogger(__name__)

_GIB = 2**30
_LARGE_DEVICE_BYTES = 70 * _GIB
_SHORTEST_STEP_MS = 1.0
_RESTARTS = 3
_STALL_TIMEOUT_S = {"cuda": 60.0, "cpu": 300.0}
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def build_configuration(values: FlagValues, *, offline: bool = False) -> Configuration:
    """Resolves every flag. `offline` is for `LLM(...)`, which prefers throughput to latency.

    Raises:
        ConfigError: a value is impossible for this model, or contradicts another.
        StartupError: this machine has not got the device or the memory.
    """
    _check_contradictions(values)
    check_serving(values)
    parallel = resolve_data_parallel(values)
    files = with_wanted_media(resolve_model(values["model"], values["tokenizer"]), values)
    device = detect_device(values["device"])
    workers = resolve_workers(values, files.architecture, device, parallel.size_local)
    check_encoder(files, values)
    check_text_encoder(values, files, workers)
    if device.kind == "cpu" and values.is_given("gpu_memory_utilization"):
        logger.warning(
            "%s has no effect on the CPU; use --kv-cache-memory-bytes to size the KV cache",
            values.written("gpu_memory_utilization"),
        )
    dtype = resolve_dtype(values["dtype"], files.architecture, device)
    load_format = _load_format(values, files)
    if load_format != "dummy":
        check_weights(files)
    _check_tokenizer(files)
    _check_memory(values, files, device, dtype, (parallel.size_local, workers))
    names = values["served_model_name"] or (files.name,)
    api_servers = _api_servers(values, device, parallel, offline=offline)
    server = _server_config(values, files, names, api_servers)
    make_tls_context(server)  # whatever is wrong with it is a start error
    caches = resolve_placement(server.media, files, api_servers, len(parallel.served_ranks))
    model, scheduler, cache = fit_whole_prompts(
        values,
        _model_config(values, files, load_format, dtype),
        _scheduler_config(values, device, offline=offline),
        CacheConfig(**_section(values, "cache")),
    )
    engine = EngineConfig(
        model=model,
        cache=cache,
        scheduler=scheduler,
        device=_device_config(values, files, device, dtype, parallel.size_local * workers.world_size),
        observability=_observability_config(values, names[0]),
        parallel=workers,
        structured_output=values["structured_outputs_config"] or StructuredOutputConfig(),
        media_store_bytes=0 if caches is None else caches.engine_bytes,
        data_parallel_size=len(parallel.served_ranks),
        data_parallel_size_local=parallel.size_local,
        data_parallel_first_rank=parallel.served_ranks.start,
    )
    return Configuration(engine, server, parallel, _fault_config(values, device, len(parallel.served_ranks)))


def _api_servers(values: FlagValues, device: DeviceInfo, parallel: DataParallelConfig, *, offline: bool) -> int:
    given: int | None = values["api_server_count"]
    alone = offline or parallel.headless or parallel.load_balancing is LoadBalancing.EXTERNAL
    if given is not None or alone:
        return given or 1
    cpus, engines = usable_cpus(), len(parallel.served_ranks)
    count = default_api_servers(cpus, engines, computes_on_cpu=device.kind == "cpu")
    if count > 1:
        logger.info(
            "API servers: %d, for %d CPUs and engine cores: %d; --api-server-count changes that", count, cpus, engines
        )
    return count


def _section(values: FlagValues, section: str, **resolved: Any) -> dict[str, Any]:
    """Fields of one configuration section: the flags that end there, with `resolved` ones in their place.
    Flags without a value are left to the section's own default."""
    fields: dict[str, Any] = {}
    for key, flag in FLAGS.items():
        owner, _, name = flag.destination.partition(".")
        if owner == section and values[key] is not None:
            fields[name] = values[key]
    return fields | resolved


def _check_contradictions(values: FlagValues) -> None:
    """Pairs of flags that cannot both hold; one from the environment yields to the other."""
    for first, second, advice in (
        ("uds", "port", "a server listens on a Unix socket or on a port"),
        ("uds", "host", "a server listens on a Unix socket or on an address"),
        ("num_gpu_blocks_override", "kv_cache_memory_bytes", "both set the size of the KV cache"),
    ):
        if values.is_given(first) and values.is_given(second):
            values.settle(first, second, advice)
    if values["disable_log_stats"] and values.is_given("metrics_namespace"):
        raise ConfigError(
            f"{values.written('disable_log_stats')} contradicts {values.written('metrics_namespace')}: "
            "there are no metrics to name; leave one out"
        )


def _load_format(values: FlagValues, files: ModelFiles) -> LoadFormat:
    native: LoadFormat = "gguf" if files.kind == "gguf" else "safetensors"
    wanted = values["load_format"]
    if wanted == "dummy":
        return "dummy"
    if wanted not in ("auto", native):
        raise ConfigError(
            f"{values.stated('load_format')} does not fit {files.path}, which holds {native}; "
            f"use --load-format {native} or auto"
        )
    return native


def _check_tokenizer(files: ModelFiles) -> None:
    path = Path(files.tokenizer_path)
    if path.is_dir() and not (path / "tokenizer.json").is_file():
        raise ConfigError(f"{path} has no tokenizer.json; name a folder that has one with --tokenizer")


def _check_memory(
    values: FlagValues, files: ModelFiles, device: DeviceInfo, dtype: DtypeName, copies: tuple[int, ParallelConfig]
) -> None:
    """Weights alone must fit: into this machine once for each of its engine cores, the first of `copies`, or into a GPU
    with as much of them as each worker has, of whom each engine core has those that come second. What is left for the
    KV cache is measured after loading, unless its bytes for each worker are given."""
    engines, parallel = copies
    workers, members = parallel.world_size, parallel.tensor_parallel_size
    if engines == 0:
        return
    weights = files.architecture.num_parameters * _DTYPE_BYTES[dtype]
    # The workers of the first stage have the vision encoder, together or each.
    num_encoders = members if values["mm_encoder_tp_mode"] == "data" else 1
    encoder = files.media.vision.num_parameters * _DTYPE_BYTES[dtype] if files.media is not None else 0
    if device.kind == "cuda":
        room, owner = int(device.total_memory_bytes * values["gpu_memory_utilization"]), "each GPU"
        needed = weights // workers + num_encoders * encoder // members
        remedy = "a smaller model, or more GPUs for each copy of it (--tensor-parallel-size)"
    else:
        room, owner = device.total_memory_bytes, "this machine"
        weights += num_encoders * encoder
        needed = engines * (weights + workers * (values["kv_cache_memory_bytes"] or 0))
        remedy = "a smaller model" if engines == 1 else f"a smaller --{FLAGS[engines_flag(values)].name} than {engines}"
        if values["kv_cache_memory_bytes"] and engines * weights < room:
            remedy = f"--kv-cache-memory-bytes {(room // engines - weights) // workers // 2}"
    if needed > room:
        raise StartupError(
            f"weights and KV cache need {needed / _GIB:.1f} GiB, {owner} has {room / _GIB:.1f} GiB to give; "
            f"use {remedy}"
        )


def _model_config(values: FlagValues, files: ModelFiles, load_format: LoadFormat, dtype: DtypeName) -> ModelConfig:
    vectors, architecture = resolve_pooling(values, files), files.architecture
    most = files.max_position
    if vectors is not None and vectors.max_tokens is not None:
        most = min(most, vectors.max_tokens)
    wanted = values["max_model_len"]
    explicit = isinstance(wanted, int)
    if explicit and wanted > most:
        raise ConfigError(
            f"{values.stated('max_model_len')} is more than the {most} positions of {files.name}; use at most {most}, "
            "or auto"
        )
    if vectors is not None and files.kind == "hf":
        architecture = replace(architecture, tie_word_embeddings=True)  # nothing needs the others
    return ModelConfig(
        name=files.name,
        path=files.path,
        tokenizer_path=files.tokenizer_path,
        architecture=architecture,
        load_format=load_format,
        dtype=dtype,
        seed=values["seed"],
        max_model_len=wanted if explicit else most,
        max_model_len_explicit=explicit,
        eos_token_ids=files.eos_token_ids,
        max_logprobs=values["max_logprobs"],
        media=files.media,
        pooling=None if vectors is None else vectors.pooling,
        encoder_mode=values["mm_encoder_tp_mode"],
    )


def _scheduler_config(values: FlagValues, device: DeviceInfo, *, offline: bool) -> SchedulerConfig:
    large = device.kind == "cuda" and device.total_memory_bytes >= _LARGE_DEVICE_BYTES
    default_tokens = (16384 if offline else 8192) if large else 2048
    max_num_batched_tokens = values["max_num_batched_tokens"] or default_tokens
    max_num_seqs = values["max_num_seqs"] or min(1024 if large else 256, max_num_batched_tokens)
    if max_num_seqs > max_num_batched_tokens:
        raise ConfigError(
            f"--max-num-seqs {max_num_seqs} is more than --max-num-batched-tokens {max_num_batched_tokens}, so not "
            f"every sequence could get a token per step; use at most --max-num-seqs {max_num_batched_tokens}"
        )
    target_ms = values["target_itl_ms"]
    if target_ms is not None and target_ms < _SHORTEST_STEP_MS:
        logger.warning(
            "%s is shorter than the steps of nearly every model and device: running streams will not keep it, "
            "and prompts get the fewest tokens per step; the unit is milliseconds",
            values.stated("target_itl_ms"),
        )
    return SchedulerConfig(
        **_section(
            values,
            "scheduler",
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            # Nobody watches the tokens of an `LLM` arrive; on a CPU smaller steps are quicker per token as well.
            explicit_budget=values.is_given("max_num_batched_tokens") or (offline and device.kind == "cuda"),
        )
    )


def _device_config(
    values: FlagValues, files: ModelFiles, device: DeviceInfo, dtype: DtypeName, num_workers: int
) -> DeviceConfig:
    """`num_workers` of all engine cores share the cores of this machine."""
    threads = max(1, cpu_threads() // max(1, num_workers)) if device.kind == "cpu" else 1
    requested, origin = values["attention_backend"], values.written("attention_backend")
    backend = resolve_attention_backend(requested, origin, device, files.architecture.head_dim, dtype)
    return DeviceConfig(**_section(values, "device", kind=device.kind, num_threads=threads, attention_backend=backend))


def _observability_config(values: FlagValues, model_name: str) -> ObservabilityConfig:
    log_stats = not values["disable_log_stats"]
    fields = _section(values, "observability", model_name=model_name, log_stats=log_stats)
    if not log_stats:
        fields["metrics_namespaces"] = ()
    return ObservabilityConfig(**fields)


def _server_config(
    values: FlagValues, files: ModelFiles, names: tuple[str, ...], api_server_count: int
) -> ServerConfig:
    template = _chat_template(values)
    return ServerConfig(
        **_section(
            values,
            "server",
            **resolve_parsers(values, files.chat_template if template is None else template),
            served_model_names=names,
            api_server_count=api_server_count,
            chat_template=template,
            default_sampling=_default_sampling(values, files),
            log_level=values["log_level"],
            media=resolve_media(_section(values, "media"), files, values.stated("allowed_local_media_path")),
        )
    )


def _fault_config(values: FlagValues, device: DeviceInfo, num_engines: int) -> FaultConfig:
    """A server with one engine core ends with it: whoever watches the server starts it again. A step on a CPU may take
    minutes, one on a GPU only while kernels are compiled."""
    restarts, timeout_s = values["max_engine_restarts"], values["engine_stall_timeout"]
    return FaultConfig(
        max_engine_restarts=(_RESTARTS if num_engines > 1 else 0) if restarts is None else restarts,
        engine_stall_timeout_s=_STALL_TIMEOUT_S[device.kind] if timeout_s is None else timeout_s,
    )


def _chat_template(values: FlagValues) -> str | None:
    given = values["chat_template"]
    if given is None:
        return None
    if "{{" in given or "{%" in given or "\n" in given:
        return cast(str, given)
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(
            f"{values.stated('chat_template')}: {reason}; name a readable file or give the template itself"
        ) from None


def _default_sampling(values: FlagValues, files: ModelFiles) -> dict[str, float | int]:
    source = values["generation_config"]
    if source == "vllm":
        return {}
    if source == "auto":
        return dict(files.generation_defaults)
    folder = Path(source).expanduser()
    if not (folder / "generation_config.json").is_file():
        raise ConfigError(
            f"{values.stated('generation_config')} has no generation_config.json; "
            "name a folder that has one, auto or vllm"
        )
    return dict(read_generation_defaults(folder))

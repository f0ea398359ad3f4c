"""What the launchers of a deployment must have in common, and the sentence that tells where they differ."""

import hashlib
from pathlib import Path

import msgspec

from tokenmill_engine.config.engine import EngineConfig, ModelConfig
from tokenmill_server.config import DataParallelConfig
from tokenmill_server.data_parallel.messages import Facts, legible

_SAMPLE_BYTES = 64 * 1024


def facts_of(config: EngineConfig, parallel: DataParallelConfig) -> Facts:
    """Reads a little of every file of weights, which tells models of one architecture apart."""
    model, scheduler, observability = config.model, config.scheduler, config.observability
    flags = {
        "--data-parallel-size": parallel.size,
        "--dtype": model.dtype,
        "--seed": model.seed,
        "--max-model-len": model.max_model_len
        if model.max_model_len_explicit
        else f"{model.max_model_len} (not given)",
        "--block-size": config.cache.block_size,
        "--enable-prefix-caching": config.cache.enable_prefix_caching,
        "--max-num-seqs": scheduler.max_num_seqs,  # API servers ask who has room
        "--served-model-name": observability.model_name,
        "--disable-log-stats": not observability.log_stats,
        "--metrics-namespace": ",".join(observability.metrics_namespaces),
    }
    engine_flags = {
        "--device": config.device.kind,
        "--tensor-parallel-size": config.parallel.tensor_parallel_size,
        "--pipeline-parallel-size": config.parallel.pipeline_parallel_size,
        "--enforce-eager": config.device.enforce_eager,
        "--attention-backend": config.device.attention_backend,
        "--max-num-batched-tokens": f"{scheduler.max_num_batched_tokens}"
        + ("" if scheduler.explicit_budget else " (not given)"),
        "--target-itl-ms": scheduler.target_itl_ms,
        "--scheduling-policy": scheduler.policy,
        "--async-scheduling": scheduler.async_scheduling,
    }
    return Facts(
        model_name=Path(model.name).name,
        model_digest=_model_digest(model),
        flags={name: str(value) for name, value in flags.items()},
        engine_flags={name: str(value) for name, value in engine_flags.items()} if parallel.size_local else {},
    )


def difference(head: Facts, other: Facts) -> str | None:
    """Where a headless launcher differs from the head, and what to do; None if they agree."""
    if head.model_digest != other.model_digest:
        return (
            f"the head serves {_model(head)} and this launcher has {_model(other)}, which is another model; give both "
            "the same"
        )
    for of_head, of_other in ((head.flags, other.flags), (head.engine_flags, other.engine_flags)):
        for name, value in of_head.items():
            if of_other and of_other.get(name) != value:
                theirs = legible(of_other.get(name, "without it"))
                return f"the head has {name} {value} and this launcher {theirs}; give both the same"
    return None


def _model(facts: Facts) -> str:
    return f"{legible(facts.model_name)} ({legible(facts.model_digest[:8])})"


def _model_digest(model: ModelConfig) -> str:
    digest = hashlib.sha256(msgspec.json.encode((model.architecture, model.load_format, model.eos_token_ids)))
    if model.load_format != "dummy":
        path = Path(model.path)
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            _add_sample(digest, file)
    return digest.hexdigest()


def _add_sample(digest: "hashlib._Hash", file: Path) -> None:
    """The size of a file, and what is at its beginning, in its middle and at its end."""
    size = file.stat().st_size
    digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as stream:
        for offset in (0, size // 2, max(0, size - _SAMPLE_BYTES)):
            stream.seek(offset)
            digest.update(stream.read(_SAMPLE_BYTES))

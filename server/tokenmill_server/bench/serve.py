"""The serving benchmark: sends a workload to any OpenAI-compatible server and reports what its users would see."""

import asyncio
import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

import msgspec
import uvloop
from tokenizers import Tokenizer
from tqdm import tqdm

from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench.client_process import Target
from tokenmill_server.bench.clients import Run, default_processes, run_load
from tokenmill_server.bench.datasets import Dataset, PromptMaker
from tokenmill_server.bench.http_client import HttpClient
from tokenmill_server.bench.load import Job
from tokenmill_server.bench.metrics import RequestRecord, SentBytes, Summary, summarize
from tokenmill_server.bench.random_images import ImageShape, RandomImage, draw_images
from tokenmill_server.bench.report import format_summary
from tokenmill_server.bench.tokenizer import load_tokenizer
from tokenmill_server.bench.workload import (
    Prompt,
    RandomShape,
    arrival_times,
    id_prompts,
    text_prompts,
)

Backend = Literal["openai", "openai-chat", "vllm"]
DEFAULT_ENDPOINTS: dict[Backend, str] = {
    "openai": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
    "vllm": "/v1/completions",
}
"""`vllm` is another name of `openai`."""

_WARMUP_SEED = 1 << 32


@dataclass(slots=True, frozen=True)
class ServeBench:
    """One run of the serving benchmark."""

    base_url: str
    backend: Backend
    endpoint: str
    model: str | None
    tokenizer: str | None
    shape: RandomShape
    num_prompts: int
    images: ImageShape | None = None
    dataset: Dataset | None = None
    """Instead of random prompts of `shape`."""
    self_timed: bool = False
    """Whether requests of a recorded run are sent at its times."""
    num_warmups: int = 0
    prompt_format: Literal["text", "ids"] = "text"
    vocab_size: int | None = None
    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    num_processes: int | None = None
    """Load generator processes; None: by the cores of this machine."""
    seed: int = 0
    ignore_eos: bool = False
    temperature: float = 0.0
    extra_body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    ready_timeout_s: float = 0.0
    percentile_metrics: tuple[str, ...] = ("ttft", "tpot", "itl")
    percentiles: tuple[float, ...] = (99.0,)
    goals_ms: dict[str, float] = field(default_factory=dict)
    save_result: bool = False
    save_detailed: bool = False
    result_dir: Path = Path()
    result_filename: str | None = None
    show_progress: bool = True


def run(bench: ServeBench) -> int:
    """Run, print the report, write the result file if asked. Returns the exit code: 1 if no request succeeded.

    Raises: ConfigError.
    """
    model = uvloop.run(_find_model(bench))
    tokenizer = _tokenizer(bench, model)
    prompts = _prompts(bench, tokenizer)
    images = _images(bench, len(prompts) - bench.num_warmups)
    jobs = _jobs(bench, model, prompts, images)
    done = _send(bench, jobs[: bench.num_warmups], jobs[bench.num_warmups :])
    records = done.records
    _count_missing_tokens(records, tokenizer)
    summary = summarize(records, done.duration_s, bench.percentiles, bench.goals_ms)
    summary = replace(summary, sent=_sent(jobs[bench.num_warmups :], images[bench.num_warmups :], records))
    sys.stdout.write(format_summary(summary, bench.percentile_metrics, bench.request_rate, bench.max_concurrency))
    errors = [record.error for record in records if record.error is not None]
    if errors:
        sys.stderr.write(f"{len(errors)} of {len(records)} requests failed; the first: {errors[0]}\n")
    if bench.save_result:
        sys.stdout.write(f"Result written to {_save(bench, model, summary, records)}\n")
    return 0 if summary.completed else 1


async def _find_model(bench: ServeBench) -> str:
    """Waits until the server is ready, if that is wanted, and finds out the name of its model."""
    client = HttpClient(bench.base_url, bench.headers)
    try:
        await _wait_until_ready(client, bench)
        return bench.model or await _first_model(client, bench)
    finally:
        client.close()


async def _wait_until_ready(client: HttpClient, bench: ServeBench) -> None:
    """Poll the model list for up to `ready_timeout_s`; 0 skips the check."""
    deadline_s = time.monotonic() + bench.ready_timeout_s
    problem = ""
    while time.monotonic() < deadline_s:
        try:
            status, _ = await client.get("/v1/models")
        except OSError as error:
            problem = str(error)
        else:
            if status == 200 and await _serves(client):
                return
            problem = f"HTTP {status}"
        await asyncio.sleep(0.25)
    if bench.ready_timeout_s > 0:
        raise ConfigError(
            f"{bench.base_url} was not ready within --ready-check-timeout-sec {bench.ready_timeout_s:g} ({problem})"
        )


async def _serves(client: HttpClient) -> bool:
    """Whether the health route, where there is one, says that requests are taken."""
    status, _ = await client.get("/health")
    return status in {200, 404, 405}


async def _first_model(client: HttpClient, bench: ServeBench) -> str:
    """Raises: ConfigError."""
    try:
        status, body = await client.get("/v1/models")
    except OSError as error:
        raise ConfigError(f"no server answers at {bench.base_url} ({error}); see --base-url, --host, --port") from None
    try:
        return str(msgspec.json.decode(body)["data"][0]["id"])
    except (msgspec.MsgspecError, KeyError, IndexError, TypeError):
        raise ConfigError(
            f"{bench.base_url}/v1/models names no model (HTTP {status}); give --model, and a key if one is needed"
        ) from None


def _tokenizer(bench: ServeBench, model: str) -> Tokenizer | None:
    if bench.prompt_format == "ids" and bench.vocab_size is not None:
        return None
    return load_tokenizer(bench.tokenizer or model)


def _prompts(bench: ServeBench, tokenizer: Tokenizer | None) -> list[Prompt]:
    """Warm-up prompts first; they differ from the measured ones, so a prefix cache gains nothing from them."""
    if bench.dataset is None:
        return _random_prompts(bench, tokenizer, bench.shape, bench.num_warmups + bench.num_prompts, bench.seed)
    maker = PromptMaker(tokenizer, bench.vocab_size, as_ids=bench.prompt_format == "ids")
    prompts = bench.dataset.prompts(bench.num_prompts, maker, bench.seed)
    mean_lens = [
        max(1, round(sum(lengths) / len(prompts)))
        for lengths in zip(*((prompt.num_tokens, prompt.output_len) for prompt in prompts), strict=True)
    ]
    warmups = _random_prompts(bench, tokenizer, RandomShape(*mean_lens), bench.num_warmups, bench.seed + _WARMUP_SEED)
    return [*warmups, *prompts]


def _random_prompts(
    bench: ServeBench, tokenizer: Tokenizer | None, shape: RandomShape, count: int, seed: int
) -> list[Prompt]:
    if tokenizer is None or bench.prompt_format == "ids":
        vocab_size = bench.vocab_size or (tokenizer.get_vocab_size(with_added_tokens=False) if tokenizer else 0)
        return id_prompts(shape, count, vocab_size, seed)
    return text_prompts(shape, count, tokenizer, seed)


def _images(bench: ServeBench, num_measured: int) -> list[list[RandomImage]]:
    """Those of each prompt. Nothing that is measured was sent by the warm-up."""
    if bench.images is None:
        return [[]] * (bench.num_warmups + num_measured)
    warmups = draw_images(bench.images, bench.num_warmups, bench.seed + _WARMUP_SEED)
    return warmups + draw_images(bench.images, num_measured, bench.seed)


def _body(bench: ServeBench, model: str, prompt: Prompt, images: Sequence[RandomImage]) -> bytes:
    body: dict[str, Any] = {"model": model}
    if bench.backend == "openai-chat":
        parts = [{"type": "image_url", "image_url": {"url": image.url}} for image in images]
        content = [{"type": "text", "text": prompt.content}, *parts] if parts else prompt.content
        body["messages"] = [{"role": "user", "content": content}]
        body["max_completion_tokens"] = prompt.output_len
    else:
        body["prompt"] = prompt.content
        body["max_tokens"] = prompt.output_len
    body["temperature"] = bench.temperature
    body["stream"] = True
    body["stream_options"] = {"include_usage": True}
    if bench.ignore_eos:
        body["ignore_eos"] = True
    return msgspec.json.encode(body | bench.extra_body)


def _jobs(
    bench: ServeBench, model: str, prompts: Sequence[Prompt], images: Sequence[Sequence[RandomImage]]
) -> list[Job]:
    """A request for each prompt. Those of the warm-up, which come first, leave all at once."""
    if bench.self_timed:
        offsets_s = [prompt.offset_s or 0.0 for prompt in prompts[bench.num_warmups :]]
    else:
        num_measured = len(prompts) - bench.num_warmups
        offsets_s = arrival_times(num_measured, bench.request_rate, bench.burstiness, bench.seed).tolist()
    return [
        Job(_body(bench, model, prompt, parts), prompt.num_tokens, prompt.output_len, offset_s)
        for prompt, parts, offset_s in zip(prompts, images, [0.0] * bench.num_warmups + offsets_s, strict=True)
    ]


def _sent(
    jobs: Sequence[Job], images: Sequence[Sequence[RandomImage]], records: Sequence[RequestRecord]
) -> SentBytes | None:
    """What the requests that were answered had in them; None without images."""
    done = [(job, parts) for job, parts, record in zip(jobs, images, records, strict=True) if record.error is None]
    sent = [image for _, parts in done for image in parts]
    if not any(images):
        return None
    return SentBytes(
        num_images=len(sent),
        num_different_images=len({id(image) for image in sent}),
        image_bytes=sum(image.num_file_bytes for image in sent),
        image_pixels=sum(image.size[0] * image.size[1] for image in sent),
        body_bytes=sum(len(job.body) for job, _ in done),
    )


def _send(bench: ServeBench, warmups: Sequence[Job], jobs: Sequence[Job]) -> Run:
    target = Target(bench.base_url, bench.headers, bench.endpoint, bench.max_concurrency)
    processes = bench.num_processes or default_processes(bench.max_concurrency or len(jobs))
    with tqdm(total=len(jobs), disable=not bench.show_progress, unit="req") as progress:
        return run_load(target, warmups, jobs, processes, progress.update)


def _count_missing_tokens(records: Sequence[RequestRecord], tokenizer: Tokenizer | None) -> None:
    """For servers that send no usage: count the text's tokens, or the chunks if there is no tokenizer."""
    for record in records:
        if record.error is None and not record.output_tokens:
            if tokenizer is None:
                record.output_tokens = record.num_chunks
            else:
                record.output_tokens = len(tokenizer.encode_batch([record.text], add_special_tokens=False)[0].ids)


def _save(bench: ServeBench, model: str, summary: Summary, records: Sequence[RequestRecord]) -> Path:
    now = datetime.now()
    result: dict[str, Any] = {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": bench.backend,
        "backend": bench.backend,
        "label": None,
        "model_id": model,
        "tokenizer_id": bench.tokenizer or model,
        "num_prompts": len(records),
        "request_rate": "inf" if math.isinf(bench.request_rate) else bench.request_rate,
        "burstiness": bench.burstiness,
        "max_concurrency": bench.max_concurrency,
        **summary.to_json(),
    }
    if bench.save_detailed:
        result |= _details(records)
    return _write_json(bench, model, now, result)


def _details(records: Sequence[RequestRecord]) -> Mapping[str, Any]:
    done = [record for record in records if record.error is None]
    return {
        "input_lens": [record.prompt_tokens for record in done],
        "output_lens": [record.output_tokens for record in done],
        "ttfts": [record.ttft_s for record in done],
        "itls": [record.itl_s for record in done],
        "start_times": [record.start_s for record in done],
        "generated_texts": [record.text for record in done],
        "errors": [record.error or "" for record in records],
    }


def _write_json(bench: ServeBench, model: str, now: datetime, result: Mapping[str, Any]) -> Path:
    """Raises: ConfigError when the folder cannot be written."""
    concurrency = f"-concurrency{bench.max_concurrency}" if bench.max_concurrency else ""
    default = f"{bench.backend}-{bench.request_rate:g}qps{concurrency}-{Path(model).name}-{now:%Y%m%d-%H%M%S}.json"
    path = bench.result_dir / (bench.result_filename or default)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=None) + "\n")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; see --result-dir and --result-filename") from None
    return path

"""`tokenmill bench serve | throughput | latency | scheduler | compare`: the command lines of the benchmarks."""

import argparse
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tokenmill_engine.errors import ConfigError
from tokenmill_server.bench import (
    compare,
    compare_cli,
    dataset_options,
    image_options,
    latency,
    scheduler,
    serve,
    throughput,
)
from tokenmill_server.bench.values import (
    count,
    goal,
    header,
    json_object,
    metric_names,
    not_negative,
    percentiles,
    positive,
    positive_number,
    ratio,
)
from tokenmill_server.bench.workload import RandomShape


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that `argv` (what follows `tokenmill bench`) describes and return the exit code.

    Raises: TokenmillError.
    """
    parser = _build_parser()
    options, rest = parser.parse_known_args(argv)
    if options.benchmark in ("serve", "scheduler", "compare") and rest:
        parser.error(f"unknown argument {rest[0]}")
    if options.benchmark == "serve":
        return serve.run(_serve_bench(options))
    if options.benchmark == "scheduler":
        return scheduler.run(scheduler.bench_of(options))
    if options.benchmark == "compare":
        return compare.run(compare_cli.compare_of(options))
    if options.benchmark == "throughput":
        return throughput.run(_throughput_bench(options, rest))
    return latency.run(_latency_bench(options, rest))


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tokenmill bench", description="Measure a server or the offline engine.")
    commands = parser.add_subparsers(
        dest="benchmark", required=True, metavar="{serve,throughput,latency,scheduler,compare}"
    )
    _add_serve(commands.add_parser("serve", allow_abbrev=False, help="online: latencies and throughput of a server"))
    engine_flags = "Every other flag is an engine flag of `tokenmill serve`, for example --dtype or --max-num-seqs."
    offline = commands.add_parser(
        "throughput", allow_abbrev=False, help="offline: tokens per second of one batch", epilog=engine_flags
    )
    _add_throughput(offline)
    single = commands.add_parser(
        "latency", allow_abbrev=False, help="offline: seconds per fixed batch", epilog=engine_flags
    )
    _add_latency(single)
    host = commands.add_parser("scheduler", allow_abbrev=False, help="what a step costs the engine core's host")
    scheduler.add_arguments(host)
    both = commands.add_parser("compare", allow_abbrev=False, help="us and a peer in turn on this machine")
    compare_cli.add_arguments(both)
    return parser


def _add_serve(parser: argparse.ArgumentParser) -> None:
    _add_target(parser)
    _add_workload(parser)
    dataset_options.add_arguments(parser)
    image_options.add_arguments(parser)
    _add_pace(parser)
    _add_output(parser)


def _add_target(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    add = group.add_argument
    add(
        "--backend",
        choices=list(serve.DEFAULT_ENDPOINTS),
        help="completions or chat. Default: openai, and openai-chat for images",
    )
    add("--base-url", metavar="URL", help="http://HOST:PORT; overrides --host and --port")
    add("--host", default="127.0.0.1")
    add("--port", type=positive, default=8000)
    add("--endpoint", metavar="PATH", help="default: that of the backend")
    add("--model", metavar="NAME", help="model in the requests; default: the first that the server lists")
    add("--api-key", metavar="KEY", help="sent as a bearer token; default: OPENAI_API_KEY from the environment")
    add("--header", action="append", default=[], type=header, metavar="NAME=VALUE", help="may be repeated")
    add(
        "--ready-check-timeout-sec",
        type=not_negative,
        default=0.0,
        metavar="S",
        help="wait this long for the server to become ready; 0: do not check",
    )


def _add_workload(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    add = group.add_argument
    add("--dataset-name", choices=["random", image_options.DATASET, *dataset_options.DATASETS], default="random")
    add("--num-prompts", type=positive, default=1000)
    add("--random-input-len", "--input-len", type=positive, default=1024, metavar="TOKENS")
    add("--random-output-len", "--output-len", type=positive, default=128, metavar="TOKENS")
    add("--random-range-ratio", type=ratio, default=0.0, help="lengths vary evenly by this share, 0 to below 1")
    add("--random-prefix-len", type=count, default=0, metavar="TOKENS", help="shared by all prompts, before the input")
    add("--tokenizer", metavar="NAME|PATH", help="makes prompts of exact length; default: the model's")
    add("--prompt-format", choices=["text", "ids"], default="text", help="ids: token ids, completions only")
    add("--vocab-size", type=positive, metavar="N", help="with --prompt-format ids: no tokenizer is needed")
    add("--num-warmups", type=count, default=0, help="requests sent and finished before measuring starts")
    add("--seed", type=count, default=0)
    add("--ignore-eos", action="store_true", help="send ignore_eos, so that every output has its full length")
    add("--temperature", type=not_negative, default=0.0)
    add("--extra-body", type=json_object, default={}, metavar="JSON", help="merged into every request's body")


def _add_pace(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("pace")
    add = group.add_argument
    add("--request-rate", type=positive_number, default=math.inf, metavar="PER_S", help="inf: everything at once")
    add("--burstiness", type=positive_number, default=1.0, help="1: Poisson; below 1 burstier, above more even")
    add("--max-concurrency", type=positive, metavar="N", help="most requests in flight")
    add(
        "--num-client-processes",
        type=positive,
        metavar="N",
        help="processes that share the load. Default: one for every four CPUs, at least 32 streams each, at most 8",
    )


def _add_output(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("result")
    add = group.add_argument
    add("--percentile-metrics", type=metric_names, default=("ttft", "tpot", "itl"), help="which of ttft,tpot,itl,e2el")
    add("--metric-percentiles", type=percentiles, default=(99.0,), help="for example 50,90,99")
    add("--goodput", nargs="+", default=[], type=goal, metavar="NAME:MS", help="ttft, tpot, e2el limits in ms")
    add("--save-result", action="store_true", help="write a JSON file")
    add("--save-detailed", action="store_true", help="with every request's times and text in it")
    add("--result-dir", type=Path, default=Path(), metavar="DIR")
    add("--result-filename", metavar="NAME")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _add_throughput(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--dataset-name", choices=["random"], default="random")
    add("--num-prompts", type=positive, default=1000)
    add("--input-len", "--random-input-len", type=positive, default=1024, metavar="TOKENS")
    add("--output-len", "--random-output-len", type=positive, default=128, metavar="TOKENS")
    add("--random-range-ratio", type=ratio, default=0.0, help="lengths vary evenly by this share, 0 to below 1")
    add("--random-prefix-len", type=count, default=0, metavar="TOKENS", help="shared by all prompts, before the input")
    add("--n", type=positive, default=1, help="outputs per prompt")
    add("--output-json", type=Path, metavar="FILE")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _add_latency(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--input-len", type=positive, default=32, metavar="TOKENS")
    add("--output-len", type=positive, default=128, metavar="TOKENS")
    add("--batch-size", type=positive, default=8)
    add("--n", type=positive, default=1, help="outputs per prompt")
    add("--num-iters-warmup", type=count, default=10)
    add("--num-iters", type=positive, default=30)
    add("--output-json", type=Path, metavar="FILE")
    add("--disable-tqdm", action="store_true", help="no progress bar")


def _serve_bench(options: argparse.Namespace) -> serve.ServeBench:
    """Raises: ConfigError."""
    images = image_options.image_shape(options)
    backend: serve.Backend = options.backend or ("openai" if images is None else "openai-chat")
    if images is not None and backend != "openai-chat":
        raise ConfigError(
            f"--dataset-name {options.dataset_name} needs --backend openai-chat: images are parts of chats"
        )
    if options.prompt_format == "ids" and backend == "openai-chat":
        raise ConfigError("--prompt-format ids needs --backend openai: chat messages are text")
    if options.vocab_size is not None and options.prompt_format != "ids":
        raise ConfigError("--vocab-size is for --prompt-format ids")
    key = options.api_key or os.environ.get("OPENAI_API_KEY")
    headers = dict(options.header)
    if key:
        headers.setdefault("Authorization", f"Bearer {key}")
    return serve.ServeBench(
        base_url=options.base_url or f"http://{options.host}:{options.port}",
        backend=backend,
        endpoint=options.endpoint or serve.DEFAULT_ENDPOINTS[backend],
        model=options.model,
        tokenizer=options.tokenizer,
        shape=RandomShape(
            options.random_input_len, options.random_output_len, options.random_range_ratio, options.random_prefix_len
        ),
        images=images,
        dataset=dataset_options.dataset_of(options),
        self_timed=options.self_timed,
        num_prompts=options.num_prompts,
        num_warmups=options.num_warmups,
        prompt_format=options.prompt_format,
        vocab_size=options.vocab_size,
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        max_concurrency=options.max_concurrency,
        num_processes=options.num_client_processes,
        seed=options.seed,
        ignore_eos=options.ignore_eos,
        temperature=options.temperature,
        extra_body=options.extra_body,
        headers=headers,
        ready_timeout_s=options.ready_check_timeout_sec,
        percentile_metrics=options.percentile_metrics,
        percentiles=options.metric_percentiles,
        goals_ms=dict(options.goodput),
        save_result=options.save_result or options.save_detailed or options.result_filename is not None,
        save_detailed=options.save_detailed,
        result_dir=options.result_dir,
        result_filename=options.result_filename,
        show_progress=not options.disable_tqdm and sys.stderr.isatty(),
    )


def _throughput_bench(options: argparse.Namespace, engine_flags: Sequence[str]) -> throughput.ThroughputBench:
    return throughput.ThroughputBench(
        engine_flags=tuple(engine_flags),
        shape=RandomShape(options.input_len, options.output_len, options.random_range_ratio, options.random_prefix_len),
        num_prompts=options.num_prompts,
        n=options.n,
        output_json=options.output_json,
        show_progress=not options.disable_tqdm and sys.stderr.isatty(),
    )


def _latency_bench(options: argparse.Namespace, engine_flags: Sequence[str]) -> latency.LatencyBench:
    return latency.LatencyBench(
        engine_flags=tuple(engine_flags),
        input_len=options.input_len,
        output_len=options.output_len,
        batch_size=options.batch_size,
        n=options.n,
        num_iters_warmup=options.num_iters_warmup,
        num_iters=options.num_iters,
        output_json=options.output_json,
        show_progress=not options.disable_tqdm and sys.stderr.isatty(),
    )

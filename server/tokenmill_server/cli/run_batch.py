"""`tokenmill run-batch -i INPUT -o OUTPUT`: answers OpenAI batch files, by a server of its own or one that runs."""

import argparse
import contextlib
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from tokenmill_engine.errors import ConfigError
from tokenmill_engine.progress import progress_bar
from tokenmill_server.batch.files import count_lines, open_input, open_output
from tokenmill_server.batch.journal import Output
from tokenmill_server.batch.own_server import check_flags, own_server
from tokenmill_server.batch.run import Totals, run
from tokenmill_server.batch.target import Target, target_at
from tokenmill_server.cli.api_client import KEY_VARIABLES, key_of_environment

_DEFAULT_CONCURRENCY = 256
_MAX_CONCURRENCY = 4096
_DESCRIPTION = """\
Answers the lines of an OpenAI batch file: {"custom_id": ..., "method": "POST", "url": "/v1/chat/completions", "body":
{...}}. Answers are appended as they come, and brought into the order of the input at the end. The same command after
an interruption, whatever it was, sends only what has no answer yet."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command; returns the exit status: 0 once every line has an answer, failures included.

    Raises:
        TokenmillError: a flag or a file is wrong, or the server is gone.
    """
    options, flags = _parse(arguments)
    signal.signal(signal.SIGTERM, _end)
    target = None if options.base_url is None else target_at(options.base_url, options.api_key or key_of_environment())
    concurrency = _concurrency(options, flags, target)
    if options.output_file == options.input_file != "-":
        raise ConfigError("--output-file is the input; name another")
    with (
        open_input(options.input_file) as lines,
        open_output(
            options.output_file,
            options.output_tmp_dir,
            overwrite=options.overwrite,
            retry_failed=options.retry_failed,
        ) as output,
    ):
        num_before = len(output)
        if num_before:
            sys.stderr.write(f"{options.output_file} has {num_before} answers already; the others are sent\n")
        with progress_bar(total=count_lines(lines), unit="line", disable=options.disable_tqdm) as bar:
            totals = run(lines, output, _server(options, flags, target), concurrency, bar.update)
        _report(totals, output)
    return 0


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our options, and the flags of the server. Raises ConfigError."""
    parser = argparse.ArgumentParser(
        "tokenmill run-batch",
        description=_DESCRIPTION,
        epilog="Every other flag, and the model, are those of `tokenmill serve`.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-i", "--input-file", required=True, metavar="PLACE", help="a file, an http(s) address, or - for stdin")
    add("-o", "--output-file", required=True, metavar="PLACE", help="a file, an http(s) address (PUT), or - for stdout")
    add("--output-tmp-dir", type=Path, metavar="DIR", help="keeps answers for an http(s) address until they are sent")
    add("--overwrite", action="store_true", help="begin anew although the output has answers")
    add("--retry-failed", action="store_true", help="send again what the output has failures for")
    add("--base-url", metavar="URL", help="send to this server; default: start one")
    add("--api-key", metavar="KEY", help=f"for --base-url; default: {' or '.join(KEY_VARIABLES)}")
    add("--max-concurrency", type=int, metavar="N", help="most requests at once; default: 256, or 2 x --max-num-seqs")
    add("--enable-metrics", action="store_true", help="the server listens at --url and --port, for its /metrics")
    add("--url", metavar="HOST", help="with --enable-metrics; default: 127.0.0.1")
    add("--port", type=int, metavar="N", help="with --enable-metrics; default: 8000")
    add("--disable-tqdm", action="store_true", help="no progress bar")
    options, flags = parser.parse_known_args([_with_dashes(argument) for argument in arguments])
    if options.overwrite and options.retry_failed:
        raise ConfigError("--overwrite contradicts --retry-failed; leave one out")
    if options.max_concurrency is not None and not 1 <= options.max_concurrency <= _MAX_CONCURRENCY:
        raise ConfigError(f"--max-concurrency must be from 1 to {_MAX_CONCURRENCY}; got {options.max_concurrency}")
    if not options.enable_metrics and (options.url is not None or options.port is not None):
        raise ConfigError("--url and --port need --enable-metrics; a server that runs already is named with --base-url")
    return options, flags


def _with_dashes(argument: str) -> str:
    """`--input_file=a_b` is `--input-file=a_b`."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-") + equals + value if argument.startswith("--") else argument


def _concurrency(options: argparse.Namespace, flags: list[str], target: Target | None) -> int:
    """Checks the flags as well. Raises ConfigError."""
    if target is None:
        if options.api_key is not None:
            raise ConfigError("--api-key needs --base-url: a server of the batch's own wants none")
        default = min(max(_DEFAULT_CONCURRENCY, 2 * check_flags(flags)), _MAX_CONCURRENCY)
        return options.max_concurrency or default
    if flags:
        raise ConfigError(f"{flags[0]} is for a server that the batch starts; leave it or --base-url out")
    if options.enable_metrics:
        raise ConfigError("--enable-metrics is for a server that the batch starts; leave it or --base-url out")
    return options.max_concurrency or _DEFAULT_CONCURRENCY


@contextlib.contextmanager
def _server(options: argparse.Namespace, flags: list[str], target: Target | None) -> Iterator[Target]:
    if target is not None:
        yield target
        return
    address = (options.url or "127.0.0.1", options.port or 8000) if options.enable_metrics else None
    with own_server(flags, address) as server:
        yield server


def _report(totals: Totals, output: Output) -> None:
    before = f", {totals.num_skipped} of them before" if totals.num_skipped else ""
    sys.stderr.write(f"{totals.num_lines} lines are answered{before}; {output.num_failed} failed\n")


def _end(_number: int, _frame: FrameType | None) -> NoReturn:
    """The server ends with us."""
    sys.exit(128 + signal.SIGTERM)

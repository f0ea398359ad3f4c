"""A server in a process of its own that streams a fixed answer at a fixed pace: `python -m tests.support.stub_server
--port N [--token-ms MS] [--start-s S] [--fail] [--api-server-count N]`. With `--fail` it ends instead of starting."""

import argparse
import signal
import sys
import time

from tests.support.scripted_server import DONE, Reply, ScriptedServer, Seen, text_event, usage_event


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-ms", type=float, default=1.0)
    parser.add_argument("--start-s", type=float, default=0.0)
    parser.add_argument("--fail", action="store_true")
    parser.add_argument("--api-server-count", type=int, default=1)
    options = parser.parse_args()
    if options.fail:
        sys.exit("no room for the weights")
    time.sleep(options.start_s)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def answer(seen: Seen, index: int) -> Reply:
        if seen.path == "/version":
            return Reply([(0, b'{"version": "stub 1.0"}')], framing="length")
        count = seen.body["max_tokens"]
        pieces = [(options.token_ms / 1e3, text_event("a")) for _ in range(count - 1)]
        pieces.append((options.token_ms / 1e3, text_event("a", "length")))
        return Reply([*pieces, (0, usage_event(len(seen.body["prompt"]), count)), (0, DONE)])

    server = ScriptedServer(answer, options.port)
    print("listening", server.port, flush=True)  # noqa: T201 - ends in the comparison's log
    signal.sigwait({signal.SIGTERM})
    server.close()


if __name__ == "__main__":
    main()

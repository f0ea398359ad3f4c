"""What operators and probes ask: /health, /ping, /version, /load, /metrics"""

import asyncio
import logging
import os

from fastapi import Request
from starlette.responses import Response

from tokenmill_engine.metric_files import CONTENT_TYPE, render_metrics
from tokenmill_server.context import context_of
from tokenmill_server.errors import ErrorReply
from tokenmill_server.readiness import Phase
from tokenmill_server.routes.bodies import json_reply
from tokenmill_server.routes.replying import error_response
from tokenmill_server.version import __version__

logger = logging.getLogger(__name__)

_RETRY_AFTER_S = "1"


async def health(request: Request) -> Response:
    """200 while some engine core takes requests and gets them done, else 503 and why not; with the engine cores that
    are not in rotation, by their ranks."""
    context = context_of(request)
    readiness = context.readiness
    faults = [
        {"engine": context.engine_config.rank_of(fault.engine), "status": fault.status, "reason": fault.reason}
        for fault in readiness.engine_faults
    ]
    engines = {"engines": faults} if faults else {}
    if readiness.phase is Phase.READY and not readiness.is_stalled:
        return json_reply({"status": readiness.phase, **engines})
    if readiness.is_stalled:
        status, reason = "stalled", "no engine core gets its work done"
    else:
        status, reason = readiness.phase, readiness.reason
    response = json_reply({"status": status, "reason": reason, **engines}, {"retry-after": _RETRY_AFTER_S})
    response.status_code = 503
    return response


async def version(_request: Request) -> Response:
    return json_reply({"version": __version__})


async def load(request: Request) -> Response:
    """What waits or runs, over all API servers."""
    counts = context_of(request).queue_counts
    return json_reply({"server_load": 0 if counts is None else counts.open()[0]})


async def metrics(request: Request) -> Response:
    """The series of all processes of this server, whichever of them answers."""
    context = context_of(request)
    directory = context.metrics_dir
    if context.remote_metrics is not None:
        await context.remote_metrics.fetch()
    try:
        has_workers = context.engine_config.parallel.executor == "mp"
        text = await asyncio.to_thread(render_metrics, directory, os.getppid(), has_workers=has_workers)
    except FileNotFoundError:
        text = b""
    if text or os.path.isdir(directory):
        return Response(text, headers={"content-type": CONTENT_TYPE})
    logger.error("no metrics: somebody removed the folder %s", directory)
    message = "the metrics of this server are lost: their folder was removed"
    return error_response(ErrorReply(500, "server_error", message, code="metrics_lost"))

#!/usr/bin/env python3
# Copyright (c) dflash.launchproof contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Show whether training and extraction are alive, slow or dead: /, /api/status, /healthz, /metrics.  Read-only."""

from __future__ import annotations

import argparse
import contextlib
import socket
from pathlib import Path
from typing import Any

from common import runtime
from common.runtime import Fatal, Job, whole


def address(text: str) -> tuple[str, int]:
    """An argparse type: ``HOST:PORT``, ``[v6]:PORT``."""
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"{text}: give HOST:PORT")
    return host.strip("[]"), int(port)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    p = runtime.Parser(description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    runtime.common_options(p)
    p.add_argument("--listen", type=address, default="127.0.0.1:8600", help="HOST:PORT; loopback unless told otherwise")
    p.add_argument("--runs", type=Path, default=runtime.RUNS, help="folder with one folder of runs for each unit")
    p.add_argument("--local-dir", type=Path, help="--out-dir of the extraction; unset: local files are not counted")
    p.add_argument("--s3-uri", help="--s3-uri of the extraction; unset: S3 is not counted")
    p.add_argument("--s3-endpoint", help="URL of an S3 server other than AWS's")
    p.add_argument("--run-id", default="reference", help="--run-id of the extraction")
    p.add_argument(
        "--stale-after", type=whole(1), default=60, help="seconds without a heartbeat of a unit that has not ended"
    )
    p.add_argument(
        "--no-growth", type=whole(1), default=600, help="seconds without a new batch while shards are not done"
    )
    p.add_argument("--every", type=whole(1), default=5, help="seconds between two scans, and the page's reload")
    return p


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; 69 with the address when it cannot be had."""
    try:
        family, kind, protocol, _name, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(64)
    except OSError as error:
        raise Fatal(runtime.UNAVAILABLE, "listen", f"--listen {host}:{port}: {error.strerror}.") from None
    return sock


def application(latest, every: int):
    """The four routes over ``latest()``, which returns the newest Status."""
    from monitoring import metrics, page
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse
    from starlette.routing import Route

    headers = {
        "Cache-Control": "no-store",
        "Content-Security-Policy": page.policy(),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
    }

    def front(_request):
        return HTMLResponse(page.page(latest(), every), headers=headers)

    def status(_request):
        return JSONResponse(latest().data(), headers=headers)

    def healthz(_request):
        reasons = latest().unhealthy
        return PlainTextResponse(
            "\n".join(reasons or ["ok"]) + "\n", status_code=503 if reasons else 200, headers=headers
        )

    def metrics_(_request):
        return PlainTextResponse(metrics.metrics(latest()), media_type="text/plain; version=0.0.4", headers=headers)

    routes = [Route("/", front), Route("/api/status", status), Route("/healthz", healthz), Route("/metrics", metrics_)]
    return Starlette(routes=routes)


def body(job: Job, args: argparse.Namespace) -> dict[str, Any]:
    """Look and serve until stopped; returns the fields of the exit line."""
    import uvicorn
    from common import store
    from monitoring.judge import Limits
    from monitoring.look import Watcher
    from monitoring.objects import S3Watch

    class Server(uvicorn.Server):
        # The job listens to SIGTERM itself.
        capture_signals = staticmethod(contextlib.nullcontext)

    place = store.S3Store(args.s3_uri, args.s3_endpoint) if args.s3_uri else None
    if place:
        # A store that is down is something to show; wrong credentials or a wrong bucket never become right.
        try:
            place.preflight()
        except Fatal as error:
            if error.code != runtime.UNAVAILABLE:
                raise
            job.warn(str(error))
    sock = bind(*args.listen)
    if args.check:
        return {"reason": "check"}
    s3 = S3Watch(place, args.run_id, args.every, args.stale_after) if place else None
    watcher = Watcher(args.runs, args.local_dir, s3, args.run_id, Limits(args.stale_after, args.no_growth, args.every))

    def list_s3() -> None:
        while not job.stopping.wait(s3.look()):
            pass

    if s3:
        job.spawn("s3", list_s3)
        # Nothing is known before the first answer; a page a moment later is better than one that says so.
        s3.answered.wait(args.every)
    newest = [watcher.look()]
    server = Server(
        uvicorn.Config(application(lambda: newest[-1], args.every), log_config=None, access_log=False, lifespan="off")
    )

    def leave() -> None:
        server.should_exit = True

    job.on_stop(leave)
    job.on_failure(leave)
    host, port = sock.getsockname()[:2]
    job.event("listen", address=f"{host}:{port}")

    def look() -> None:
        number = 1
        while True:
            current = newest[-1]
            job.step(number, force_line=True, healthy=int(not current.unhealthy), units=len(current.units))
            if job.stopping.wait(args.every):
                return
            newest[:] = [watcher.look()]
            number += 1

    job.spawn("look", look)
    server.run(sockets=[sock])
    job.check()
    return {"reason": "sigterm"}


if __name__ == "__main__":
    runtime.run(parser(), body)

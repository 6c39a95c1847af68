"""clickline predict: sends rows of logs to a running server and measures quality and latency of its answers."""

from __future__ import annotations

import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from clickline.cli.console import emit, facts, number, requires_extra, say, show_progress
from clickline.cli.options import ProgressOptions
from clickline.progress import pluralize

if TYPE_CHECKING:
    from clickline.client.predict.run import PredictResult, RequestResult


def predict(
    options: ProgressOptions,
    inputs: Annotated[
        list[str],
        typer.Option(
            "-i",
            "--input",
            metavar="FILE",
            help="Logs to send: a path, a quoted glob, a URI; may be repeated.",
            show_default=False,
        ),
    ],
    batch: Annotated[
        int, typer.Option("-b", "--batch", metavar="ROWS", help="Rows per request.", min=1)
    ] = 512,
    requests: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--iterations",
            metavar="N",
            help="Number of measured requests; a shorter file is read again.",
            show_default="all rows once",
            min=1,
        ),
    ] = None,
    warmup: Annotated[
        int,
        typer.Option(
            "-w", "--warmup", metavar="N", help="Unmeasured requests before that, per connection.", min=0
        ),
    ] = 10,
    server: Annotated[
        str | None,
        typer.Option(
            "-s",
            "--server",
            metavar="HOST:PORT",
            help="The server to call.",
            show_default="the config's serve section",
        ),
    ] = None,
    protocol: Annotated[
        Literal["grpc", "http", "v2-grpc", "v2-http", "elasticctr"],
        typer.Option(help="grpc, http: TensorFlow Serving's. v2-grpc, v2-http: the Open Inference Protocol."),
    ] = "grpc",
    concurrency: Annotated[
        int, typer.Option(metavar="N", help="Number of concurrent connections.", min=1, max=1024)
    ] = 1,
    model: Annotated[
        str | None, typer.Option(metavar="NAME", help="Name of the model.", show_default="the config's name")
    ] = None,
    token_file: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="File whose first line is the bearer token.", show_default="serve.token_file"
        ),
    ] = None,
    ca: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Use TLS and trust the CA certificate in this PEM file.",
            show_default="as serve.tls",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="Timeout of each request.", min=0.001)
    ] = 10.0,
    each: Annotated[bool, typer.Option("-v", "--each", help="Print the latency of each request.")] = False,
    accuracy: Annotated[
        bool, typer.Option("--accuracy", help="Print the latency and the accuracy of each request.")
    ] = False,
) -> None:
    """Send rows of logs to a server and measure its answers: AUC, log loss, latency, throughput.

    The latency of a request is the time from its bytes being ready to its scores being received. Requests/s and
    rows/s include reading the file.
    """
    config = options.config()
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # errors are reported by us
    with requires_extra("client", "predicting"):
        from clickline.client.predict.run import predict as run

    lines: list[RequestResult] = []
    results = sys.stdout  # stdout is redirected while progress is shown

    def report(request: RequestResult) -> None:
        if options.as_json:
            lines.append(request)
        else:
            typer.echo(_line(request, accuracy), file=results)

    each = each or accuracy
    with show_progress(as_json=options.as_json, quiet=options.quiet or each) as progress:
        result = run(
            config,
            progress,
            inputs=inputs,
            batch=batch,
            requests=requests,
            warmup=warmup,
            address=server,
            protocol=protocol,
            connections=concurrency,
            model=model,
            token_file=token_file,
            ca=ca,
            timeout=timeout,
            **({"on_request": report} if each else {}),
        )
    if options.as_json:
        document: dict[str, Any] = result.to_json()
        emit(document | ({"each": [asdict(line) for line in lines]} if each else {}))
    else:
        _show(result)


def _line(request: RequestResult, accuracy: bool) -> str:
    share = "" if not accuracy or request.accuracy is None else f" (accuracy {request.accuracy:.2%})"
    return f"{request.number}: {request.seconds:.6f} s{share}"


def _show(result: PredictResult) -> None:
    measured, latency = result.metrics, result.latency
    versions = ", ".join(
        f"{'unknown' if version is None else version} ({count:,} requests)"
        for version, count in result.versions.items()
    )
    bad = ", ".join(f"{count:,} {reason}" for reason, count in result.bad.items())
    percentiles = {
        "mean": latency.mean,
        "p50": latency.p50,
        "p90": latency.p90,
        "p99": latency.p99,
        "p99.9": latency.p999,
        "highest": latency.highest,
    }
    connections = pluralize(result.connections, "connection")
    named: dict[str, object] = {
        "server": f"{result.address}, {result.protocol}, model {result.model}",
        "version": versions,
        "rows": f"{measured.rows:,}" + (f"; skipped as bad: {bad}" if bad else ""),
        "requests": f"{result.requests:,} over {connections}"
        + (f"; retried: {result.retried:,}" if result.retried else ""),
        "accuracy": number(measured.accuracy),
        "AUC": number(measured.auc, 5)
        + ("" if result.best_auc is None else f"; best achievable on these rows: {result.best_auc:.5f}"),
        "log loss": number(measured.logloss),
        "latency": ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in percentiles.items()),
        "throughput": f"{result.requests_per_second:,.1f} requests/s, {result.rows_per_second:,.0f} rows/s",
        "time": f"{result.seconds:.1f} s",
    }
    facts(named)
    for line in measured.notes:
        say(f"note: {line}")

"""Controls the child process that talks to MLflow.

A process and not just a thread: importing mlflow and creating its tables takes seconds of pure Python, which in a
thread would hold the GIL during training steps; a request that hangs can be killed from outside; and whatever mlflow
prints, logs or warns about can never reach our standard output.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

# Long enough to create the tables of a new database on a busy machine. A server that accepts a connection but does not
# answer is given up much earlier, by the timeout of the requests themselves.
_ANSWER_SECONDS = 120.0
_STOP_SECONDS = 2.0
_TOO_SLOW = "it was too slow, and the run is over"
_SETTINGS = {
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the tracker retries by itself
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "OMP_NUM_THREADS": "1",  # leave the cores to training
    "PYTHONWARNINGS": "ignore",  # mlflow raises some, and must not fail if the user made them errors
}


class SenderProcess:
    """The child process; started at the first request, and again after it died."""

    def __init__(self) -> None:
        self.target: Mapping[str, str | None] = {}  # which run it is for; set before the first request
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._closed = False
        self._lock = threading.Lock()  # between `request`, in the tracker's thread, and `kill`

    def request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one message, or {"failed": why}. Not thread-safe."""
        try:
            connection = self._started()
            if connection is None:
                return {"failed": _TOO_SLOW}
            connection.send_bytes(json.dumps(message).encode())
            if connection.poll(_ANSWER_SECONDS):
                answer: dict[str, Any] = json.loads(connection.recv_bytes())
                return answer
            why = f"no answer in {_ANSWER_SECONDS:.0f} s"
        except (EOFError, OSError) as error:
            failure = f"the sender process ended early ({type(error).__name__})"
            why = _TOO_SLOW if self._closed else failure
        self._stop(kill=True)
        return {"failed": why}

    def close(self) -> None:
        """Close the connection; the process then ends by itself."""
        with self._lock:
            self._closed = True
        self._stop(kill=False)

    def kill(self) -> None:
        """Kill the process, from any thread; a pending request fails."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def _started(self) -> Connection | None:
        with self._lock:
            if self._closed:
                return None
            if self._connection is None:
                self._connection, child_end = Pipe()
                with child_end:
                    self._process = subprocess.Popen(
                        [
                            sys.executable,
                            "-P",
                            "-m",
                            "clickline.training.tracking.mlflow_sender",
                            str(child_end.fileno()),
                        ],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        pass_fds=[child_end.fileno()],
                        env={**os.environ, **_SETTINGS},
                        start_new_session=True,  # Ctrl-C is for training, which then reports how the run ended
                    )
                self._connection.send_bytes(json.dumps(self.target).encode())
            return self._connection

    def _stop(self, *, kill: bool) -> None:
        with self._lock:
            process, connection = self._process, self._connection
            self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            if kill:
                process.kill()
            try:
                process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

"""The process that speaks MLflow, seen from ours.

A process and not only a thread: importing mlflow and making its tables is seconds of pure Python, which in a
thread would take the interpreter's lock from the training steps; a request that hangs can be ended from outside;
and what mlflow prints, logs or warns of can never reach our standard output.
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

# One answer may take as long as the tables of a new database on a busy machine. A server that takes a
# connection and says nothing is given up much earlier, by the timeout of the requests themselves.
_ANSWER_SECONDS = 120.0
_END_SECONDS = 2.0
_TOO_SLOW = "it is slow, and the run is over"
_SETTINGS = {
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",  # the tracker tries again itself
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "OMP_NUM_THREADS": "1",  # the cores belong to the training
    "PYTHONWARNINGS": "ignore",  # mlflow gives some, and must not fail where the user made them errors
}


class Child:
    """Started when first asked, and again after it died."""

    def __init__(self) -> None:
        self.target: Mapping[str, str | None] = {}  # which run it is about; to be set before it is asked
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._ended = False
        self._lock = threading.Lock()  # between asking, in the tracker's thread, and `kill`

    def ask(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one message, or {"failed": why}. Not for two threads at once."""
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
            ended = f"the process that sends to it ended early ({type(error).__name__})"
            why = _TOO_SLOW if self._ended else ended
        self._stop(kill=True)
        return {"failed": why}

    def end(self) -> None:
        """Let it go: it ends by itself when nobody can ask any more."""
        with self._lock:
            self._ended = True
        self._stop(kill=False)

    def kill(self) -> None:
        """From any thread: end it at once; an answer that is waited for becomes a failure."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()

    def _started(self) -> Connection | None:
        with self._lock:
            if self._ended:
                return None
            if self._connection is None:
                self._connection, theirs = Pipe()
                with theirs:
                    self._process = subprocess.Popen(
                        [
                            sys.executable,
                            "-P",
                            "-m",
                            "clickline.training.tracking.mlflow_sender",
                            str(theirs.fileno()),
                        ],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.DEVNULL,
                        stderr=subprocess.DEVNULL,
                        pass_fds=[theirs.fileno()],
                        env={**os.environ, **_SETTINGS},
                        start_new_session=True,  # Ctrl-C is for the training, which then says how the run ended
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
                process.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

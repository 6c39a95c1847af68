"""Controls the child process that talks to MLflow.

A process and not just a thread: importing mlflow and creating its tables takes seconds of pure Python, which in a
thread would hold the GIL during training steps; a request that hangs can be killed from outside; and whatever mlflow
prints, logs or warns about can never reach our standard output.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any

from clickline.processes import ChildProcess

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
        self._child: ChildProcess | None = None
        self._closed = False
        self._lock = threading.Lock()  # between `request`, in the tracker's thread, and `kill`

    def request(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one message, or {"failed": why}. Not thread-safe."""
        try:
            child = self._started()
            if child is None:
                return {"failed": _TOO_SLOW}
            child.send(message)
            return child.receive(_ANSWER_SECONDS)
        except TimeoutError:
            why = f"no answer in {_ANSWER_SECONDS:.0f} s"
        except (EOFError, OSError) as error:
            failure = f"the sender process ended early ({type(error).__name__})"
            why = _TOO_SLOW if self._closed else failure
        self._stop(0.0)
        return {"failed": why}

    def close(self) -> None:
        """Close the connection; the process then ends by itself."""
        with self._lock:
            self._closed = True
        self._stop(_STOP_SECONDS)

    def kill(self) -> None:
        """Kill the process, from any thread; a pending request fails."""
        with self._lock:
            self._closed = True
            if self._child is not None:
                self._child.process.kill()

    def _started(self) -> ChildProcess | None:
        with self._lock:
            if self._closed:
                return None
            if self._child is None:
                self._child = ChildProcess(
                    "clickline.training.tracking.mlflow_sender",
                    request=self.target,
                    environment={**os.environ, **_SETTINGS},
                )
            return self._child

    def _stop(self, seconds: float) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.stop(seconds)

"""moto's S3 server as a process of its own: the real protocol over a real socket."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of an empty S3."""
    command = [sys.executable, "-u", "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            for line in process.stderr:
                if found := re.search(r"Running on (http://[\d.]+:\d+)", line):
                    break
            else:
                raise RuntimeError("moto's server did not start")
            # Its log of requests must be read, or it would stop when the pipe is full.
            reader = threading.Thread(target=process.stderr.read)
            reader.start()
            try:
                yield found[1]
            finally:
                process.kill()
                reader.join()
        finally:
            process.kill()

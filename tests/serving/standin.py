"""A server of real processes whose versions are small files, for tests that need exact faults.

A version's folder has version.json: its number, and the fault that occurs when it is loaded. A row's I1 is the number of
milliseconds that scoring it takes. All scores of version N are N / 1024, so an answer identifies its version.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from clickline.config import load_config
from clickline.config.sections import ServeSection
from clickline.errors import ArtifactError, RequestRefused, StorageError
from clickline.features import DenseField, FeatureSpec, SlotField
from clickline.features.request_encoder import RequestEncoder
from clickline.records import EncodedRows, RequestRows
from clickline.scoring.scorer import Scores
from clickline.serving import supervisor
from clickline.serving.rollout import FetchedVersion
from clickline.serving.run import serve
from clickline.serving.supervisor import ServerInfo
from clickline.storage.atomic import put_atomically

FEATURES = FeatureSpec(
    dense=(DenseField("I1", "I1", "none"),),
    slots=(SlotField("C1", "C1", 1), SlotField("C2", "C2", 2, multi=True, separator=",")),
)


class StandIn:
    """A scorer without a network."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.created = 1.7e9
        self.features = FEATURES
        self.columns = FEATURES.columns
        self.misses_S = np.zeros(2, dtype=np.int64)
        self.lookups_S = np.zeros(2, dtype=np.int64)
        self._encoder = RequestEncoder(FEATURES)
        self._open = True

    def encode(self, rows: RequestRows) -> EncodedRows:
        encoded, faults = self._encoder.encode(rows)
        for fault in faults:
            raise RequestRefused("invalid", next(iter(fault)).detail)
        return encoded

    def predict(self, rows: RequestRows) -> Scores:
        return self.score(self.encode(rows))

    def rank(self, context: RequestRows, candidates: RequestRows) -> Scores:
        return self.predict(candidates)

    def score(self, encoded: EncodedRows) -> Scores:
        score_B = np.empty(encoded.rows, dtype=np.float32)
        for row in range(encoded.rows):
            milliseconds = float(np.nan_to_num(encoded.dense_DB[0, row]))
            if milliseconds == 666:
                raise ZeroDivisionError("a bug in the scorer")
            if milliseconds >= 100:
                with Path("begun").open("ab") as begun:  # for tests that wait for this moment
                    begun.write(b".")
            time.sleep(max(milliseconds, 0) / 1000)
            if not self._open:
                raise RuntimeError("scored with a closed version")
            score_B[row] = self.number / 1024
        self.lookups_S += encoded.rows
        self.misses_S[0] += encoded.rows
        return Scores(self.number, score_B * 2, score_B)

    def close(self) -> None:
        self._open = False


def load(folders: Sequence[Path], section: ServeSection, work: Path) -> StandIn:
    document = json.loads((folders[-1] / "version.json").read_text())
    time.sleep(document.get("seconds", 0))
    match document.get("fault"):
        case "damaged":
            raise ArtifactError(f"version {document['number']} scores its stored sample differently")
        case "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        case "bug":
            raise ZeroDivisionError("a bug in loading")
        case "passing":
            if not (folders[-1] / "healed").exists():
                raise OSError(5, "Input/output error")
    return StandIn(document["number"])


class PointerFile:
    """Versions in a folder; the file `pointer` has the number of the last move and of a version."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def current(self) -> tuple[int, int] | None:
        if (self._folder / "unreachable").exists():
            raise StorageError("the store is unreachable")
        if not (self._folder / "pointer").exists():
            return None
        sequence, number = map(int, (self._folder / "pointer").read_text().split())
        return sequence, number

    def fetch(self, number: int) -> FetchedVersion:
        folder = self._folder / str(number)
        if not folder.is_dir():
            raise ArtifactError(f"there is no version {number}")
        return FetchedVersion(number, (str(folder),), time.time() - 100)


def publish(folder: Path, number: int, **document: object) -> None:
    """Create a version and point to it."""
    (folder / str(number)).mkdir(parents=True, exist_ok=True)
    (folder / str(number) / "version.json").write_text(json.dumps({"number": number, **document}))
    pointer = folder / "pointer"
    sequence = int(pointer.read_text().split()[0]) if pointer.exists() else 0
    put_atomically(pointer, f"{sequence + 1} {number}".encode())


def _print(info: ServerInfo) -> None:
    sys.stdout.write(json.dumps({"version": info.version, "processes": info.processes}) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    import standin  # by its own name, under which workers import `load`

    supervisor._HANG_SECONDS = 3
    serve(load_config(Path(sys.argv[1])), _print, source=PointerFile(Path(sys.argv[2])), load=standin.load)

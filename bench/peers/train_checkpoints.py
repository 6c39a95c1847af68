"""Rows/s of our trainer and the number of checkpoints it wrote meanwhile, as JSON.

python train_checkpoints.py clickline.yaml EVERY FIRST_ROWS     the first rows fill the table and do not count
"""

import json
import sys
import time
from pathlib import Path

from clickline.config import load_config
from clickline.pipeline.flow import train
from clickline.progress import Progress


class Watch(Progress):
    """Sees every step: when it was done, and which checkpoints were finished by then."""

    def __init__(self, home: Path, first_rows: int) -> None:
        self.rows = -first_rows
        self.began = self.ended = self.longest = 0.0  # longest: from one step's end to the next one's
        self.before: set[Path] = set()
        self.checkpoints: set[Path] = set()
        self._home = home
        self._training = False

    def begin(self, title: str, *, total_bytes: int | None = None, total_rows: int | None = None) -> None:
        self._training = title.startswith("train")

    def advance(self, *, rows: int = 0, size: int = 0) -> None:
        if not self._training:
            return
        counting = self.rows >= 0
        self.rows += rows
        if not counting:
            self.rows = min(self.rows, 0)
            self.began = self.ended = time.perf_counter()
            self.before = self._finished()
        else:
            now = time.perf_counter()
            self.longest, self.ended = max(self.longest, now - self.ended), now
            self.checkpoints |= self._finished() - self.before  # one after the other is removed again

    def _finished(self) -> set[Path]:
        return set(self._home.glob("runs/*/step-*/manifest.json"))


config = load_config(Path(sys.argv[1]), [f"train.checkpoint_every={sys.argv[2]}"])
watch = Watch(Path(str(config.home)), int(sys.argv[3]))
train(config, watch)
print(
    json.dumps(
        {
            "rows": watch.rows,
            "seconds": watch.ended - watch.began,
            "longest": watch.longest,
            "checkpoints": len(watch.checkpoints),
        }
    )
)

"""What a test changes in the processes of a cluster that have this folder on their path.

CLICKLINE_TEST_BRAKE   a file with how many seconds a worker rests after each batch
CLICKLINE_TEST_WINDOW  rows of a window, so that few rows make several units to lease
CLICKLINE_TEST_GROUP   seconds after which a silent worker is given up, in place of half a minute
"""

from __future__ import annotations

import os
import sys
import time
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import PathFinder
from pathlib import Path


def _brake_workers(module):
    brake, real = Path(os.environ["CLICKLINE_TEST_BRAKE"]), module.TrainWorker._record

    def record(self, *arguments):
        real(self, *arguments)
        time.sleep(float(brake.read_text()))

    module.TrainWorker._record = record


def _hurry_groups(module):
    seconds = float(os.environ["CLICKLINE_TEST_GROUP"])
    real = module.TrainingJob.__init__

    def init(self, **values):
        real(self, **{"group_seconds": seconds, **values})

    module.TrainingJob.__init__ = init


def _narrow_windows(module):
    module.WINDOW_ROWS = int(os.environ["CLICKLINE_TEST_WINDOW"])


class _Changed(Loader):
    def __init__(self, real, change):
        self._real, self._change = real, change

    def create_module(self, spec):
        return self._real.create_module(spec)

    def exec_module(self, module):
        self._real.exec_module(module)
        self._change(module)


class _Finder(MetaPathFinder):
    """Changes a module when it is imported: most processes never do."""

    def __init__(self, changes):
        self._changes = changes

    def find_spec(self, name, path, target=None):
        if name not in self._changes:
            return None
        spec = PathFinder.find_spec(name, path, target)
        spec.loader = _Changed(spec.loader, self._changes[name])
        return spec


_CHANGES = {
    "CLICKLINE_TEST_BRAKE": ("clickline.training.cluster.worker", _brake_workers),
    "CLICKLINE_TEST_WINDOW": ("clickline.training.batches", _narrow_windows),
    "CLICKLINE_TEST_GROUP": ("clickline.training.cluster.job", _hurry_groups),
}
_wanted = dict(change for variable, change in _CHANGES.items() if variable in os.environ)
if _wanted:
    sys.meta_path.insert(0, _Finder(_wanted))

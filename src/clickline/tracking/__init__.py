"""What a training run tells MLflow, without ever waiting for it.

tracker.py   the trainer's calls go into a buffer, one thread sends what is in it
buffer.py    the buffer, and its form as lines of JSON
child.py     the other process, seen from ours: start it, ask it, end it
sender.py    the other process: the only place that imports mlflow
figures.py   how busy and how large this process is
"""

from __future__ import annotations

from clickline.tracking.figures import process_figures
from clickline.tracking.tracker import MlflowTracker, Status, Tracker, open_tracker

__all__ = ["MlflowTracker", "Status", "Tracker", "open_tracker", "process_figures"]

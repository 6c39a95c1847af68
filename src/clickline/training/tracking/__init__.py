"""What a training run tells MLflow, without ever waiting for it.

tracker.py   the trainer's calls go into a buffer, one thread sends what is in it
buffer.py    the buffer, and its form as lines of JSON
sender_process.py     the other process, seen from ours: start it, ask it, end it
mlflow_sender.py    the other process: the only place that imports mlflow
process_metrics.py   how busy and how large this process is
"""

from __future__ import annotations

from clickline.training.tracking.process_metrics import process_figures
from clickline.training.tracking.tracker import MlflowTracker, Status, Tracker, open_tracker

__all__ = ["MlflowTracker", "Status", "Tracker", "open_tracker", "process_figures"]

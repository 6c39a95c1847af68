"""Experiment tracking with MLflow that never blocks training.

tracker.py           the trainer's calls go into a buffer; one thread sends its content
buffer.py            the buffer, and its form as JSON lines
sender_process.py    starts, calls and stops the sender process
mlflow_sender.py     the sender process: the only place that imports mlflow
process_metrics.py   CPU and memory use of this process
"""

from __future__ import annotations

from clickline.training.tracking.process_metrics import resource_usage
from clickline.training.tracking.tracker import MlflowTracker, RunStatus, Tracker, open_tracker, tracker_of

__all__ = ["MlflowTracker", "RunStatus", "Tracker", "open_tracker", "resource_usage", "tracker_of"]

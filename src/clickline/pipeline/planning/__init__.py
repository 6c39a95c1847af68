"""Estimates memory and time of a run before it starts: `clickline plan`."""

from clickline.models import torch_runtime as torch_runtime  # its settings are read when PyTorch is loaded

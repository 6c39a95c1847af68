"""Dataset to checkpoint: one training step, the loop on one machine, the loop on Ray, and training hour by hour."""

from clickline.models import torch_runtime as torch_runtime  # its settings are read when PyTorch is loaded

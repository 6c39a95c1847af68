"""Models: one network per file, and `model.py`, which combines a network with its embedding tables.

Importing the package does not import PyTorch: servers use `calibration.py` without it.
"""

from clickline.models import torch_runtime as torch_runtime  # its settings are read when PyTorch is loaded

"""Models: one network per file, and `model.py`, which combines a network with its embedding tables.

Importing the package imports no module: servers use `calibration.py` without PyTorch.
"""

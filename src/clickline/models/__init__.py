"""Models: the networks, one a file, and `model.py`, where a network and its sparse tables are one model.

Importing the package imports nothing: a server reads `calibration.py` and has no PyTorch.
"""

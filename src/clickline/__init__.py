"""Clickline: click logs in, a click-through-rate service out."""

__version__ = "0.1.0"

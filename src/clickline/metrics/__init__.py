"""Measuring predictions, judging them, and putting them right. Pure: arrays in, values out."""

from __future__ import annotations

__all__: list[str] = []

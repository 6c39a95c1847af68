"""Asking a prediction server: `Client` and, for asyncio, `AsyncClient`."""

from __future__ import annotations

from clickline.client.answers import ModelInfo, Prediction, Ranking, TensorInfo
from clickline.client.client import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "ModelInfo", "Prediction", "Ranking", "TensorInfo"]

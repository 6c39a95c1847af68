"""Clients of a prediction server: `Client` and, for asyncio, `AsyncClient`."""

from __future__ import annotations

from clickline.client.client import AsyncClient, Client
from clickline.client.results import ModelInfo, Prediction, Ranking, TensorInfo

__all__ = ["AsyncClient", "Client", "ModelInfo", "Prediction", "Ranking", "TensorInfo"]

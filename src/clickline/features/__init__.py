"""The encoder: raw fields to 64-bit ids and floats, the same in prepare and in serve."""

from clickline.features.encoder import Encoder
from clickline.features.feature_spec import (
    ENCODER_FORMAT,
    DenseField,
    FeatureSpec,
    FieldStatistics,
    SlotField,
    slot_number,
)
from clickline.features.raw_columns import InvalidValue, ValidationErrors

__all__ = [
    "ENCODER_FORMAT",
    "DenseField",
    "Encoder",
    "FeatureSpec",
    "FieldStatistics",
    "InvalidValue",
    "SlotField",
    "ValidationErrors",
    "slot_number",
]

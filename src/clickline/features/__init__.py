"""The one encoder: raw fields to 64-bit ids and floats, the same in prepare and in serve."""

from clickline.features.encoder import Encoder, Fault
from clickline.features.spec import (
    ENCODER_FORMAT,
    DenseField,
    FeatureSpec,
    FieldStatistics,
    SlotField,
    slot_number,
)

__all__ = [
    "ENCODER_FORMAT",
    "DenseField",
    "Encoder",
    "Fault",
    "FeatureSpec",
    "FieldStatistics",
    "SlotField",
    "slot_number",
]

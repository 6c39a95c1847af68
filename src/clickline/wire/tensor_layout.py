"""How the protocols encode tensors, as tables for kernels.

    PredictRequest, RankRequest { map<string, TensorProto> = n }     entry { key = 1, value = 2: TensorProto }
    ModelInferRequest { inputs = 5: { name, datatype, shape, contents = 5 }, raw_input_contents = 7 }

In both, an outer message has an inner one with the lists of values, one list per type. So a table says which list has
which type, and the rest is shared.
"""

from __future__ import annotations

import numpy as np

from clickline.records import ABSENT, BFLOAT16, FLOAT16, FLOAT32, FLOAT64, INTEGER, TEXT

# Element types, the same for both protocols.
BOOL, I8, I16, I32, I64, U8, U16, U32, U64, F16, BF16, F32, F64, BYTES = range(1, 15)
SIZE = np.array([0, 1, 1, 2, 4, 8, 1, 2, 4, 8, 2, 2, 4, 8, 0])  # bytes in memory; 0: variable

# TensorFlow: the element type of each DataType, and the field of TensorProto with its list.
ELEMENT_OF_DTYPE = np.zeros(24, dtype=np.int64)
for _dtype, _element in {
    1: F32, 2: F64, 3: I32, 4: U8, 5: I16, 6: I8, 7: BYTES, 9: I64, 10: BOOL, 14: BF16, 17: U16, 19: F16,
    22: U32, 23: U64,
}.items():  # fmt: skip
    ELEMENT_OF_DTYPE[_dtype] = _element
TENSOR_LIST = np.array([0, 11, 7, 7, 7, 10, 7, 7, 16, 17, 13, 13, 5, 6, 8])
# How the lists of TensorProto are encoded, by field number: 1 varints, 2 bytes, 4 or 8 fixed size.
TENSOR_WIRE = np.zeros(20, dtype=np.int64)
for _field, _wire in {5: 4, 6: 8, 7: 1, 8: 2, 9: 4, 10: 1, 11: 1, 12: 8, 13: 1, 16: 1, 17: 1}.items():
    TENSOR_WIRE[_field] = _wire

# Open Inference Protocol: the datatype names as numbers, in the order of the element types.
_DATATYPES = "BOOL INT8 INT16 INT32 INT64 UINT8 UINT16 UINT32 UINT64 FP16 BF16 FP32 FP64 BYTES"
DATATYPE_CODES = np.array([int.from_bytes(name.encode()) for name in _DATATYPES.split()], dtype=np.uint64)
# The same for InferTensorContents, which has no list for 16-bit floats.
CONTENTS_LIST = np.array([0, 1, 2, 2, 2, 3, 4, 4, 4, 5, 0, 0, 6, 7, 8])
CONTENTS_WIRE = np.array([0, 1, 1, 1, 1, 1, 4, 8, 2])

# The column kind (see `records`) of each element type; the first is for none.
KIND = np.array([ABSENT, *[INTEGER] * 9, FLOAT16, BFLOAT16, FLOAT32, FLOAT64, TEXT], dtype=np.uint8)

MAP_VALUE, INPUT_CONTENTS = 0x12, 0x2A  # tags of the inner messages

# The fields of a column's tensor header, in this order.
BEGIN, END, CONTENT_BEGIN, CONTENT_END, ELEMENT, LIST, COUNT, RANK, ROWS, WIDTH, TYPE, RAW_COUNT = range(12)
HEADER_FIELDS = 12

# Status of a kernel.
OK, MALFORMED, UNKNOWN, DUPLICATE, UNSUPPORTED_TYPE, NO_ROWS, RAGGED, SHAPE, TOO_MANY = range(9)

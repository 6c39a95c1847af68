"""The messages of Paddle Serving's and ElasticCTR's clients, built here and not by the code that is tested."""

from __future__ import annotations

import socket
import ssl
import struct
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

GENERAL = "baidu.paddle_serving.predictor.general_model.GeneralModelService"
ELASTIC = "baidu.paddle_serving.predictor.elastic_ctr.ElasticCTRPredictionService"
CTR = "baidu.paddle_serving.predictor.ctr_prediction.CTRPredictionService"

_TYPES = {name.removeprefix("TYPE_").lower(): number for name, number in Field.Type.items()}


def _messages(syntax: str, **messages: str) -> dict[str, Any]:
    """Message classes from lines such as `repeated int64 values = 1`."""
    file = FileDescriptorProto(name="test.proto", package="test", syntax=syntax)
    for name, lines in messages.items():
        message = file.message_type.add(name=name)
        for line in filter(None, map(str.strip, lines.split(";"))):
            label, kind, field, _, number = line.split()
            added = message.field.add(name=field, number=int(number))
            added.label = {"optional": 1, "required": 2, "repeated": 3}[label]
            if kind in _TYPES:
                added.type = _TYPES[kind]
            else:
                added.type, added.type_name = _TYPES["message"], f".test.{kind}"
    pool = DescriptorPool()
    pool.Add(file)
    return {name: GetMessageClass(pool.FindMessageTypeByName(f"test.{name}")) for name in messages}


_OLD_TENSOR = (
    "repeated bytes data = 1; repeated int32 int_data = 2; repeated int64 int64_data = 3; repeated float float_data = 4;"
    "optional int32 elem_type = 5; repeated int32 shape = 6;"
)
_OLD_REQUEST = (
    "repeated Inst insts = 1; repeated string fetch_var_names = 2; optional bool profile_server = 3;"
)
V0_2_0 = _messages(
    "proto2",
    Tensor=_OLD_TENSOR,
    Inst="repeated Tensor tensor_array = 1",
    Request=_OLD_REQUEST,
    Response="repeated Inst insts = 1; repeated int64 profile_time = 2",
)
V0_6 = _messages(
    "proto2",
    Tensor=_OLD_TENSOR + "repeated int32 lod = 7",
    Inst="repeated Tensor tensor_array = 1",
    Request=_OLD_REQUEST + "optional uint64 log_id = 4",
    Output="repeated Inst insts = 1; optional string engine_name = 2",
    Response="repeated Output outputs = 1; repeated int64 profile_time = 2",
)
V0_9 = _messages(
    "proto3",
    Tensor="repeated int64 int64_data = 1; repeated float float_data = 2; repeated int32 int_data = 3;"
    "repeated double float64_data = 4; repeated uint32 uint32_data = 5; repeated bool bool_data = 6;"
    "repeated string data = 9; optional int32 elem_type = 10; repeated int32 shape = 11; repeated int32 lod = 12;"
    "optional string name = 13; optional string alias_name = 14; optional bytes tensor_content = 15",
    Request="repeated Tensor tensor = 1; repeated string fetch_var_names = 2; optional bool profile_server = 3;"
    "optional uint64 log_id = 4",
    Output="repeated Tensor tensor = 1; optional string engine_name = 2",
    Response="repeated Output outputs = 1; repeated int64 profile_time = 2",
)
_PREDICTIONS = {
    "Prediction": "required float prob0 = 1; required float prob1 = 2",
    "Response": "repeated Prediction predictions = 1; required int64 err_code = 2; optional string err_msg = 3",
}
ELASTIC_CTR = _messages(
    "proto2",
    Slot="required string slot_name = 1; repeated int64 feasigns = 2",
    Instance="repeated Slot slots = 1",
    Request="repeated Instance instances = 1",
    **_PREDICTIONS,
)
OLD_CTR = _messages(
    "proto2",
    Instance="repeated int64 sparse_ids = 1; repeated float dense_ids = 2",
    Request="repeated Instance instances = 1",
    **_PREDICTIONS,
)
Meta = _messages(
    "proto2",
    Call="required string service_name = 1; required string method_name = 2; optional int64 log_id = 3;"
    "optional int32 timeout_ms = 8",
    Result="optional int32 error_code = 1; optional string error_text = 2",
    Stream="required int64 stream_id = 1; required int64 chunk_id = 2",
    Meta="optional Call request = 1; optional Result response = 2; optional int32 compress_type = 3;"
    "optional int64 correlation_id = 4; optional int32 attachment_size = 5; optional Stream chunk_info = 6;"
    "optional bytes authentication_data = 7; optional Stream stream_settings = 8",
)["Meta"]


def frame(
    body: bytes,
    service: str = GENERAL,
    method: str = "inference",
    call: int = 1,
    timeout_ms: int = 0,
    **meta: Any,
) -> bytes:
    """The frame of a call."""
    made = Meta(correlation_id=call, **meta)
    made.request.service_name, made.request.method_name = service, method
    if timeout_ms:
        made.request.timeout_ms = timeout_ms
    head = made.SerializeToString()
    return struct.pack(">4sII", b"PRPC", len(head) + len(body), len(head)) + head + body


class BrpcClient:
    """A connection to a brpc server."""

    def __init__(self, port: int, tls: ssl.SSLContext | None = None) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=30)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_hostname="localhost")
        self._stream = self.socket.makefile("rb")

    def __enter__(self) -> BrpcClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
        self.socket.close()

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> tuple[Any, bytes]:
        """The meta and the body of the next answer."""
        head = self._stream.read(12)
        assert head, "the connection was closed"
        magic, size, meta_size = struct.unpack(">4sII", head)
        assert magic == b"PRPC"
        meta = Meta.FromString(self._stream.read(meta_size))
        return meta, self._stream.read(size - meta_size)

    def call(self, body: bytes, **more: Any) -> bytes:
        """The body of the answer to a call that must succeed."""
        self.send(frame(body, **more))
        meta, answer = self.receive()
        assert meta.response.error_code == 0, meta.response.error_text
        assert meta.correlation_id == more.get("call", 1)
        return answer

    def error(self, body: bytes, **more: Any) -> tuple[int, str]:
        """The error of a call that must fail."""
        self.send(frame(body, **more))
        meta, answer = self.receive()
        assert answer == b""
        return meta.response.error_code, meta.response.error_text

    def is_closed(self) -> bool:
        """Whether the server closes the connection without a further answer."""
        try:
            return self._stream.read(1) == b""
        except ConnectionError:
            return True

"""The compiled messages match the .proto files, which match the public definitions."""

from __future__ import annotations

import subprocess
import sys
from importlib.resources import files

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto, FileDescriptorSet
from google.protobuf.descriptor_pool import Default

from clickline.wire import messages

WIRE = files("clickline.wire")


def test_compiled_file_matches_the_proto_files(tmp_path):
    protos = sorted(str(file) for file in WIRE.joinpath("protos").iterdir() if file.name.endswith(".proto"))
    compiled_file = tmp_path / "messages.binpb"
    subprocess.run(
        [
            *(
                sys.executable,
                "-m",
                "grpc_tools.protoc",
                "-I",
                str(WIRE.joinpath("protos")),
                "--include_imports",
            ),
            *(f"--descriptor_set_out={compiled_file}", *protos),
        ],
        check=True,
        timeout=60,
    )
    compiled = FileDescriptorSet.FromString(WIRE.joinpath("messages.binpb").read_bytes())
    assert compiled == FileDescriptorSet.FromString(compiled_file.read_bytes()), "run `make protos`"


def numbers(message: DescriptorProto, at: str = "") -> dict[str, tuple[int, int, int]]:
    """Number, type and label of every field."""
    found = {f"{at}{message.name}.{f.name}": (f.number, f.type, f.label) for f in message.field}
    for inner in message.nested_type:
        found |= numbers(inner, f"{at}{message.name}.")
    return found


def test_inference_protocol_matches_tritonclient():
    from tritonclient.grpc import service_pb2

    theirs, ours = FileDescriptorProto(), FileDescriptorProto()
    service_pb2.DESCRIPTOR.CopyToProto(theirs)
    messages.POOL.FindFileByName("inference.proto").CopyToProto(ours)
    known = {name: facts for message in theirs.message_type for name, facts in numbers(message).items()}
    mine = {name: facts for message in ours.message_type for name, facts in numbers(message).items()}
    assert len(mine) > 50
    assert {name: known.get(name) for name in mine} == mine


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("tensorflow.serving.ModelSpec", {"name": 1, "version": 2, "signature_name": 3, "version_label": 4}),
        ("tensorflow.serving.PredictRequest", {"model_spec": 1, "inputs": 2, "output_filter": 3}),
        ("tensorflow.serving.PredictResponse", {"outputs": 1, "model_spec": 2}),
        ("tensorflow.serving.GetModelMetadataRequest", {"model_spec": 1, "metadata_field": 2}),
        ("tensorflow.serving.GetModelMetadataResponse", {"model_spec": 1, "metadata": 2}),
        ("tensorflow.serving.ModelVersionStatus", {"version": 1, "state": 2, "status": 3}),
        ("tensorflow.SignatureDef", {"inputs": 1, "outputs": 2, "method_name": 3}),
        ("tensorflow.TensorInfo", {"name": 1, "dtype": 2, "tensor_shape": 3}),
        ("tensorflow.TensorShapeProto", {"dim": 2, "unknown_rank": 3}),
    ],
)
def test_field_numbers_match_the_public_ones(name, fields):
    assert {f.name: f.number for f in messages.POOL.FindMessageTypeByName(name).fields} == fields


def test_messages_are_not_in_the_default_pool():
    with pytest.raises(KeyError):
        Default().FindMessageTypeByName("clickline.v1.RankRequest")


def test_every_method_is_known_to_reflection():
    assert messages.METHODS["tensorflow.serving.PredictionService"] == ("Predict", "GetModelMetadata")
    assert messages.METHODS["clickline.v1.Ranking"] == ("Rank",)
    for service in messages.METHODS:
        assert messages.POOL.FindFileContainingSymbol(service).name.endswith(".proto")

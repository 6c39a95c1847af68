"""The flags of `elasticdl train` are converted to a clickline.yaml, or refused with a message that names the flag."""

from __future__ import annotations

from pathlib import Path

import pytest
from draft_loading import load_draft

import clickline
from clickline.errors import ConfigError
from clickline.importers.elasticdl import elasticdl
from clickline.importers.run import valid_yaml
from data.readers.record_writers import Feature, example, recordio

TUTORIAL = """elasticdl train \\
  --image_name=elasticdl:deepctr --model_zoo=model_zoo --model_def=deepctr.wdl.custom_model \\
  --training_data=/data/criteo/train --validation_data=/data/criteo/test \\
  --num_epochs=2 --minibatch_size=64 --num_minibatches_per_task=2 \\
  --num_ps_pods=3 --num_workers 4 --grads_to_wait=1 \\
  --checkpoint_steps=50 --keep_checkpoint_max=3 --checkpoint_dir=/tmp/c --evaluation_steps=50 \\
  --job_name=Test_DAC --log_level=INFO --image_pull_policy=Never --namespace=ctr \\
  --distribution_strategy=ParameterServerStrategy --use_async --lr_staleness_modulation=true \\
  --master_resource_request='cpu=400m,memory=1024Mi' --master_resource_limit="cpu=1,memory=2048Mi" \\
  --worker_resource_request='cpu=1,memory=8192Mi,gpu=1,disk=1024Mi' --ps_resource_request='cpu=400m,memory=1Gi' \\
  --volume='host_path=/models,mount_path=/m;claim_name=criteo-claim,mount_path=/data' \\
  --envs='AWS_SECRET=hunter2,B=2'
"""


def test_tutorial_command(tmp_path: Path) -> None:
    result = load_draft(elasticdl(TUTORIAL), tmp_path)
    config = result.config
    assert config.name == "test-dac" and config.model.name == "wide_deep"
    assert (config.data.format, config.data.train) == ("recordio", ("/data/criteo/train/*",))
    assert config.data.eval == ("/data/criteo/test/*",) and len(config.data.fields) == 40
    train = config.train
    assert (train.mode, train.epochs, train.batch_size, train.embedding_servers) == ("cluster", 2, 64, 3)
    assert (train.workers.min, train.workers.max) == (1, 4)
    assert (train.sync, train.scale_lr_by_staleness) == (False, True)
    assert (train.checkpoint_steps, train.keep_checkpoints) == (50, 3)
    deploy = config.deploy
    assert (deploy.namespace, deploy.pull) == ("ctr", "Never")
    pipeline, worker = deploy.resources.pipeline, deploy.resources.ray_worker
    assert (pipeline.cpu, pipeline.memory, pipeline.cpu_limit, pipeline.memory_limit) == (
        "400m", "1024Mi", "1", "2048Mi",
    )  # fmt: skip
    assert (worker.cpu, worker.memory, worker.memory_limit, worker.gpu) == ("1", "8192Mi", "8192Mi", 1)
    data = deploy.storage.data
    assert (data.kind, data.claim, data.mount) == ("existing", "criteo-claim", "/data")
    for flag in ("image_name", "grads_to_wait", "checkpoint_dir", "ps_resource_request", "evaluation_steps"):
        assert f" --{flag}: " in result.comments
    assert "the volume at /m does not contain training_data" in result.comments
    assert "from the command:4 --num_epochs" in result.comments
    assert (
        "hunter2" not in result.text
        and "AWS_SECRET" not in result.text
        and " --envs: may contain" in result.comments
    )


def test_every_flag_is_imported_or_listed(tmp_path: Path) -> None:
    result = load_draft(elasticdl(TUTORIAL), tmp_path)
    for word in TUTORIAL.split():
        if word.startswith("--"):
            assert f"{word.partition('=')[0]}" in result.comments


def test_text_files_endless_epochs_local_mode_and_unknown_flags(tmp_path: Path) -> None:
    command = (
        "train --training_data logs/train.csv --num_epochs -1 --num_ps_pods 0 --distribution_strategy Local "
        "--model_def my.own.net --pa55word=hunter2 --keep_checkpoint_max=0 --use_async=false --use_async=False"
    )
    result = load_draft(elasticdl(command), tmp_path)
    assert (result.config.data.format, result.config.train.mode, result.config.train.sync) == (
        "criteo",
        "local",
        True,
    )
    assert result.config.data.train == (str(tmp_path / "logs" / "train.csv"),)
    assert "the command --num_epochs: endless" in result.comments
    assert "the command --pa55word: is a flag that the importer does not know." in result.comments
    assert "the command --use_async: is overridden by a later one" in result.comments
    assert "it names no built-in network" in result.comments and "hunter2" not in result.text


@pytest.mark.parametrize(
    ("definition", "network"),
    [
        ("dac_ctr.xdeepfm.custom_model", "xdeepfm"),
        ("dac_ctr.deepfm.custom_model", "deepfm"),
        ("dac_ctr.dcn_model.custom_model", "dcn_v2"),
        ("census.wide_and_deep.custom_model", "wide_deep"),
        ("dac_ctr.wide_deep_model.custom_model", "wide_deep"),
    ],
)
def test_network_is_recognized_by_its_name(tmp_path: Path, definition: str, network: str) -> None:
    result = load_draft(elasticdl(f"train --training_data=rows --model_def={definition}"), tmp_path)
    assert result.config.model.name == network


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "the command has no subcommand. Allowed: train."),
        ("--training_data=x", "the command has no subcommand. Allowed: train."),
        ("elasticdl predict --x=1", "the command begins with 'predict'. Allowed: train."),
        ("train", "the command --training_data is missing or empty."),
        ("train --training_data=", "the command --training_data is missing or empty."),
        ("train --training_data='x", "the command has an unclosed quote."),
        ("train --training_data=x hunter2", "the command has a word between its flags that belongs to no flag."),
        ("train \\\n --training_data=x \\\n --num_epochs=two", "the command:3 --num_epochs is 'two'. Allowed: a whole"),
        ("train --training_data=x --num_workers=-3", "--num_workers is '-3'. Allowed: a whole number of at least 0."),
        ("train --training_data=x --num_workers=99999", "would become train.workers.max, which is 99999. Allowed:"),
        ("train --training_data=x --minibatch_size=big", "--minibatch_size would become train.batch_size, which is"),
        ("train --training_data=x --distribution_strategy=Ring", "is 'Ring'. Allowed: ParameterServerStrategy,"),
        ("train --training_data=x --worker_resource_request=cpu", "is not a comma-separated list of name=value"),
        ("train --training_data=x --worker_resource_request=cpu=lots", "ray_worker.cpu, which is lots. Allowed:"),
        ("train --training_data=/d/x --volume=mount_path=/d", "has neither host_path nor claim_name."),
        ("train --training_data=s3://a:hunter2@b/{x}", "--training_data would become data.train, which contains {x}."),
    ],
)  # fmt: skip
def test_malformed_command_is_refused(tmp_path: Path, command: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        valid_yaml(elasticdl(command), tmp_path)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.slow
def test_imported_config_reads_files_of_the_elasticdl_converter(tmp_path: Path) -> None:
    for split in ("train", "test"):
        (tmp_path / split).mkdir()
        rows: list[dict[str, Feature]] = [
            {
                "label": [float(row % 2)],
                **{f"I{n}": [float(row)] for n in range(1, 14)},
                **{f"C{n}": [b"%x" % (row * n)] for n in range(1, 27)},
            }
            for row in range(40)
        ]
        (tmp_path / split / "data-00000").write_bytes(recordio([example(row) for row in rows], "snappy"))
    result = load_draft(elasticdl("train --training_data=train --validation_data=test"), tmp_path)
    prepared = clickline.prepare(result.config)
    assert (prepared.train_rows, prepared.eval_rows) == (40, 40)

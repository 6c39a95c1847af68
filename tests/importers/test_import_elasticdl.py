"""The flags of `elasticdl train` become a clickline.yaml, or a message that names the flag."""

from __future__ import annotations

from pathlib import Path

import pytest
from imported import imported

import clickline
from clickline.errors import ConfigError
from clickline.importers.elasticdl import elasticdl
from clickline.importers.run import checked
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


def test_the_tutorials_command(tmp_path: Path) -> None:
    made = imported(elasticdl(TUTORIAL), tmp_path)
    config = made.config
    assert config.name == "test-dac" and config.model.name == "wide_deep"
    assert (config.data.format, config.data.train) == ("recordio", ("/data/criteo/train/*",))
    assert config.data.eval == ("/data/criteo/test/*",) and len(config.data.fields) == 40
    train = config.train
    assert (train.mode, train.epochs, train.batch_size, train.shards) == ("cluster", 2, 64, 3)
    assert (train.workers.min, train.workers.max) == (1, 4)
    assert (train.sync, train.staleness_rate) == (False, True)
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
        assert f" --{flag}: " in made.said
    assert "the volume at /m holds no training_data" in made.said
    assert "from the command:4 --num_epochs" in made.said
    assert "hunter2" not in made.text and "AWS_SECRET" not in made.text and " --envs: may hold" in made.said


def test_every_flag_is_somewhere(tmp_path: Path) -> None:
    made = imported(elasticdl(TUTORIAL), tmp_path)
    for word in TUTORIAL.split():
        if word.startswith("--"):
            assert f"{word.partition('=')[0]}" in made.said


def test_text_endless_local_and_unknown(tmp_path: Path) -> None:
    command = (
        "train --training_data logs/train.csv --num_epochs -1 --num_ps_pods 0 --distribution_strategy Local "
        "--model_def my.own.net --pa55word=hunter2 --keep_checkpoint_max=0 --use_async=false --use_async=False"
    )
    made = imported(elasticdl(command), tmp_path)
    assert (made.config.data.format, made.config.train.mode, made.config.train.sync) == (
        "criteo",
        "local",
        True,
    )
    assert made.config.data.train == (str(tmp_path / "logs" / "train.csv"),)
    assert "the command --num_epochs: endless" in made.said
    assert "the command --pa55word: is not a flag that this import knows." in made.said
    assert "the command --use_async: is given again later" in made.said
    assert "it names no network that is built in" in made.said and "hunter2" not in made.text


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
def test_networks_go_by_their_names(tmp_path: Path, definition: str, network: str) -> None:
    made = imported(elasticdl(f"train --training_data=rows --model_def={definition}"), tmp_path)
    assert made.config.model.name == network


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("", "the command names no verb. Allowed: train."),
        ("--training_data=x", "the command names no verb. Allowed: train."),
        ("elasticdl predict --x=1", "the command begins with 'predict'. Allowed: train."),
        ("train", "the command --training_data is missing or empty."),
        ("train --training_data=", "the command --training_data is missing or empty."),
        ("train --training_data='x", "the command has a quote that is not closed."),
        ("train --training_data=x hunter2", "the command has a word between its flags that belongs to none."),
        ("train \\\n --training_data=x \\\n --num_epochs=two", "the command:3 --num_epochs is 'two'. Allowed: a whole"),
        ("train --training_data=x --num_workers=-3", "--num_workers is '-3'. Allowed: a whole number of at least 0."),
        ("train --training_data=x --num_workers=99999", "would become train.workers.max, which is 99999. Allowed:"),
        ("train --training_data=x --minibatch_size=big", "--minibatch_size would become train.batch_size, which is"),
        ("train --training_data=x --distribution_strategy=Ring", "is 'Ring'. Allowed: ParameterServerStrategy,"),
        ("train --training_data=x --worker_resource_request=cpu", "is not a list of name=value with commas"),
        ("train --training_data=x --worker_resource_request=cpu=lots", "ray_worker.cpu, which is lots. Allowed:"),
        ("train --training_data=/d/x --volume=mount_path=/d", "names neither host_path nor claim_name."),
        ("train --training_data=s3://a:hunter2@b/{x}", "--training_data would become data.train, which holds {x}."),
    ],
)  # fmt: skip
def test_malformed(tmp_path: Path, command: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(elasticdl(command), tmp_path)
    assert message in str(caught.value)
    assert "hunter2" not in str(caught.value)


@pytest.mark.slow
def test_the_imported_config_reads_what_their_converter_writes(tmp_path: Path) -> None:
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
    made = imported(elasticdl("train --training_data=train --validation_data=test"), tmp_path)
    prepared = clickline.prepare(made.config)
    assert (prepared.train_rows, prepared.eval_rows) == (40, 40)

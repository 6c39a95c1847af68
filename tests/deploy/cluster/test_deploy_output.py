"""Output of commands: plurals, and in a pod no address that only the pod itself can reach."""

from __future__ import annotations

from pathlib import Path

import pytest
from ads_objects import ADS

from clickline.cli.deploy import _show_applied
from clickline.cli.serve import _show
from clickline.config import load_config
from clickline.deploy.apply import ApplyResult
from clickline.progress import pluralize
from clickline.serving.supervisor import ServerInfo


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 pods"), (1, "1 pod"), (2, "2 pods"), (1200, "1,200 pods")]
)
def test_pluralize(count: int, words: str) -> None:
    assert pluralize(count, "pod") == words


def test_apply_of_one_object_uses_the_singular(capsys: pytest.CaptureFixture[str]) -> None:
    _show_applied(ApplyResult(changed=["ConfigMap ads-config"]), ADS)
    assert "ads in namespace shop: 1 object created or changed;" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("service", "addresses", "tries"),
    [
        (None, ["0.0.0.0:8500", "http://0.0.0.0:8501", "http://0.0.0.0:8502/metrics"], True),
        (
            "ads-predictor.shop.svc",
            ["ads-predictor.shop.svc:8500", "http://ads-predictor.shop.svc:8501"],
            False,
        ),
        ("", [], False),  # the Knative host has other ports
    ],
)
def test_server_in_a_pod_prints_only_reachable_addresses(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    service: str | None,
    addresses: list[str],
    tries: bool,
) -> None:
    file = tmp_path / "clickline.yaml"
    file.write_text(
        "name: ads\ndata: {train: data/train.tsv}\nserve: {host: 0.0.0.0, allow_unauthenticated: true}\n"
    )
    monkeypatch.delenv("CLICKLINE_SERVICE", raising=False)
    if service is not None:
        monkeypatch.setenv("CLICKLINE_SERVICE", service)
    _show(load_config(file), ServerInfo(3, 2))
    result = capsys.readouterr().out
    lines = [line.split() for line in result.partition("try it:")[0].splitlines()]
    assert [line[1] for line in lines if line and line[0] in ("gRPC", "HTTP", "metrics")] == addresses
    assert ("127.0.0.1" in result, "curl" in result) == (tries, tries)

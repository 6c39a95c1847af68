"""Ports that other machines can reach: what the config refuses, what is warned about, and clients' TLS contexts."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from clickline.client import Client
from clickline.config import load_config
from clickline.errors import ConfigError
from clickline.serving.auth import exposure_warning

TLS = "{certificate: c.pem, key: k.pem}"


def studio(folder: Path, host: str, **keys: str) -> str:
    """The config error of this studio section; empty if there is none."""
    file = folder / "clickline.yaml"
    more = "".join(f", {key}: {value}" for key, value in keys.items())
    file.write_text(f"data: {{train: x.tsv}}\nstudio: {{host: '{host}'{more}}}\n")
    try:
        load_config(file)
    except ConfigError as error:
        [mistake] = error.mistakes
        return str(mistake)
    return ""


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "studio.example"])
def test_exposed_studio_needs_tls_and_token(tmp_path: Path, host: str) -> None:
    both = studio(tmp_path, host)
    assert f"clickline.yaml:2 studio.host is {host}, which other machines can reach" in both
    assert "tls and token_file are not set" in both
    assert "Set studio.tls and studio.token_file, or use an SSH tunnel." in both
    assert "tls is not set" in studio(tmp_path, host, token_file="t")
    assert "token_file is not set" in studio(tmp_path, host, tls=TLS)
    assert studio(tmp_path, host, tls=TLS, token_file="t") == ""


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_studio_on_loopback_needs_nothing(tmp_path: Path, host: str) -> None:
    assert studio(tmp_path, host) == ""


def test_exposed_server_needs_tls_and_token_unless_allowed(tmp_path: Path) -> None:
    file = tmp_path / "clickline.yaml"
    file.write_text(f"data: {{train: x.tsv}}\nserve: {{host: 0.0.0.0, tls: {TLS}}}\n")
    with pytest.raises(ConfigError) as raised:
        load_config(file)
    [mistake] = raised.value.mistakes
    assert (
        "clickline.yaml:2 serve.host is 0.0.0.0, which other machines can reach, but token_file is not set"
        in str(mistake)
    )
    assert (
        "Set serve.token_file, or serve.allow_unauthenticated: true if a firewall, mesh or NetworkPolicy protects the ports."
        in str(mistake)
    )
    warning = exposure_warning(load_config(file, ["serve.allow_unauthenticated=true"]).serve)
    assert warning is not None
    assert "serve.token_file is not set" in warning and "serve.tls" not in warning
    assert exposure_warning(load_config(file, ["serve.token_file=t"]).serve) is None
    assert exposure_warning(load_config(file, ["serve.host=127.0.0.1"]).serve) is None


def test_ssl_context_is_for_http_protocols_only() -> None:
    context = ssl.create_default_context()
    Client("127.0.0.1:1", protocol="http", model="ctr", tls=context).close()
    with pytest.raises(ConfigError, match="only HTTP protocols support, and protocol is grpc"):
        Client("127.0.0.1:1", protocol="grpc", tls=context)

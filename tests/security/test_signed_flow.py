"""Signatures end to end: publishing, servers, lookup servers, the CLI, pods."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

import clickline
from clickline.artifacts.from_config import registry_of
from clickline.artifacts.manifest import MANIFEST, SIGNATURE
from clickline.artifacts.registry import Registry
from clickline.artifacts.signing import Signer, TrustedKeys, make_keys
from clickline.artifacts.version import Verifier
from clickline.config import Config, load_config
from clickline.deploy.render import render
from clickline.errors import ArtifactError, ClicklineError, VersionUntrusted
from clickline.scoring.open_scorer import open_scorer
from clickline.serving.lookup.lookup_versions import ShardFiles
from clickline.storage.storage import Storage
from servers.waiting import eventually
from serving.lookup.fleet import Server, random_blocks, random_delta, registry_in
from serving.lookup.fleet import publish as publish_tables
from serving.service import Service, command

SCRIPT = Path(sys.executable).parent / "clickline"


def change(project: Path, **sections: dict[str, Any]) -> Config:
    """The project's config with these keys."""
    file = project / "clickline.yaml"
    tree = yaml.safe_load(file.read_text())
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}
    file.write_text(yaml.safe_dump(tree))
    return load_config(file)


def signing(project: Path) -> Config:
    """The project with a key pair that signs and is trusted."""
    make_keys(project / "keys")
    return change(
        project,
        publish={"signing_key_file": "keys/signing-key.pem"},
        serve={"trusted_keys_file": "keys/public-key.pem"},
    )


def republish(config: Config, number: int, signer: Signer | None) -> int:
    """Copy a version under a new number, as anyone with write access to the registry could."""
    untrusting = registry_of(config, any_version=True)
    old = untrusting.version(number)
    with untrusting.draft() as draft:
        for name in old.files:
            shutil.copy(Path(old.folder, name), draft.folder / name)
        made = draft.commit(old.manifest, None, signer)
    untrusting.move(made.number, "by hand", after=untrusting.current())
    return made.number


# ── publish ────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.slow
def test_published_versions_are_signed_and_have_no_unsigned_parent(project: Path) -> None:
    config = load_config(project / "clickline.yaml")
    clickline.publish(config)  # version 1, before keys were configured
    config = signing(project)
    with pytest.raises(VersionUntrusted, match="version 1 is not signed"):
        open_scorer_of(config, 1)
    made = clickline.publish(config).version
    assert (made.number, made.parent) == (2, None), "same model, but signed, and no delta of the unsigned one"
    assert Path(made.folder, SIGNATURE).stat().st_size == 64
    again_made = clickline.publish(config)
    assert (again_made.version.number, again_made.reused) == (2, True)
    open_scorer_of(config, 2).check_sample()
    table = next(Path(made.folder).glob("table-*.bin"))
    content = table.read_bytes()
    table.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(ArtifactError, match="is damaged: its SHA-256 is"):
        open_scorer_of(config, 2)


def open_scorer_of(config: Config, number: int) -> Any:
    registry = registry_of(config)
    return open_scorer(registry, registry.version(number), Path(config.cache.dir), 1)


def test_publishing_a_version_that_servers_would_refuse_is_refused(project: Path) -> None:
    signing(project)
    config = change(project, publish={"signing_key_file": None})
    with pytest.raises(
        ClicklineError, match=r"publish\.signing_key_file is not set, and servers use only versions signed"
    ):
        clickline.publish(config)
    make_keys(project / "other")
    config = change(project, publish={"signing_key_file": "other/signing-key.pem"})
    with pytest.raises(ClicklineError, match=r"other/signing-key\.pem is not the private key of any of them"):
        clickline.publish(config)
    assert registry_of(config).numbers() == []


def test_missing_package_is_reported(project: Path) -> None:
    signing(project)
    code = """
import sys
sys.modules["cryptography"] = None
from clickline.cli.main import main
sys.argv = ["clickline", "versions", "verify"]
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "pip install 'clickline[sign]'" in done.stderr
    assert "Traceback" not in done.stderr


# ── servers ────────────────────────────────────────────────────────────────────────────────────


def answering(service: Service) -> int:
    document = httpx.get(service.url("/v1/models/ctr"), timeout=10).json()
    return int(document["model_version_status"][0]["version"])


@pytest.mark.slow
def test_server_stays_on_the_signed_version(project: Path) -> None:
    config = signing(project)
    signer = Signer.read(str(project / "keys" / "signing-key.pem"))
    clickline.publish(config)
    new, _ = make_keys(project / "new")
    stranger, _ = make_keys(project / "stranger")
    trusted = project / "trusted.pem"
    trusted.write_bytes(b"".join((project / one / "public-key.pem").read_bytes() for one in ("keys", "new")))
    with command(project, trusted_keys_file=str(trusted)) as service:
        assert service.wait_up()["version"] == 1
        for count, (wrong, message) in enumerate(
            ((None, "is not signed"), (Signer.read(str(stranger)), "is invalid")), start=1
        ):
            number = republish(config, 1, wrong)
            [line] = eventually(
                lambda: [one for one in service.log("a version was refused") if one["version"] == number]  # noqa: B023
            )
            assert message in line["reason"]
            assert (line["current"], line["level"]) == (1, "error")
            assert answering(service) == 1
            assert service.admin("/readyz").text.startswith("ready\n")
            assert service.metrics()["clickline_version_refused_total"] == count
            assert service.metrics()["clickline_version"] == 1
        number = republish(config, 1, Signer.read(str(new)))  # the next key, trusted in addition to the first
        eventually(lambda: answering(service) == number)
        number = republish(config, 1, signer)
        eventually(lambda: answering(service) == number)
    # If the pointer names an untrusted version at the start, no port is opened.
    number = republish(config, 1, None)
    done = run(project, "serve")
    assert (done.returncode, done.stdout) == (1, "")
    assert f"version {number} is not signed" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_lookup_servers_require_signatures_too(tmp_path: Path) -> None:
    private, public = make_keys(tmp_path / "keys")
    signer = Signer.read(str(private))
    registry = registry_in(tmp_path)
    server = Server(tmp_path, 0, {"serve.trusted_keys_file": public})
    trusting = Registry(Storage(), registry.uri, TrustedKeys.read(str(public)))
    files = ShardFiles(trusting, 0, tmp_path / "copies", Verifier())
    with signed_drafts(registry, signer):
        publish_tables(registry, random_blocks(1))
        publish_tables(registry, random_delta(2), parent=1)
    opened, shards = files.open(2)
    assert (opened.number, shards) == (2, 2)
    try:
        server.start()
        assert server.wait().up["version"] == 2
        unsigned = publish_tables(registry, random_blocks(3))
        [line] = eventually(lambda: server.events("a version was refused"))[:1]
        assert (line["version"], line["open"]) == (unsigned, [1, 2])
        assert "is not signed" in line["reason"]
        server.end()
        server.start()
        assert server.process is not None
        assert server.process.wait(60) == 1
        document = json.loads(server.process.stdout.read())  # type: ignore[union-attr]
        assert f"version {unsigned} is not signed" in json.dumps(document)
    finally:
        server.end()


@contextmanager
def signed_drafts(registry: Registry, signer: Signer) -> Iterator[None]:
    """Sign everything that the registry's drafts commit in the block."""
    unsigned = registry.draft

    def draft(*arguments: Any) -> Any:
        made = unsigned(*arguments)
        commit = made.commit
        made.commit = lambda body: commit(body, None, signer)  # type: ignore[method-assign]
        return made

    registry.draft = draft  # type: ignore[method-assign]
    try:
        yield
    finally:
        registry.draft = unsigned  # type: ignore[method-assign]


# ── CLI ────────────────────────────────────────────────────────────────────────────────────────


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([SCRIPT, *arguments], cwd=project, capture_output=True, text=True, timeout=120)


@pytest.mark.slow
def test_keygen_verify_and_listing_of_unsigned_versions(tmp_path: Path) -> None:
    registry = registry_in(tmp_path)
    made = run(tmp_path, "versions", "keygen", "--out", "keys")
    assert made.returncode == 0, made.stderr
    assert "keys/signing-key.pem: set it as publish.signing_key_file" in made.stdout
    document = json.loads(run(tmp_path, "versions", "keygen", "--out", "more", "--json").stdout)
    assert document == {"private": "more/signing-key.pem", "public": "more/public-key.pem"}
    with signed_drafts(registry, Signer.read(str(tmp_path / "keys" / "signing-key.pem"))):
        publish_tables(registry, random_blocks(1))
        publish_tables(registry, random_delta(2), parent=1)
    publish_tables(registry, random_blocks(3), current=False)
    tree: dict[str, Any] = {
        "data": {"train": "x.tsv"},
        "home": ".",
        "cache": {"dir": "cache"},
        "publish": {"registry": "registry"},
    }
    (tmp_path / "clickline.yaml").write_text(yaml.safe_dump(tree))
    assert (
        "checked 4 files of 2 versions. Signatures were not checked"
        in run(tmp_path, "versions", "verify").stdout
    )
    tree["serve"] = {"trusted_keys_file": "keys/public-key.pem"}
    (tmp_path / "clickline.yaml").write_text(yaml.safe_dump(tree))
    assert "Signed by a trusted key." in run(tmp_path, "versions", "verify").stdout
    document = json.loads(run(tmp_path, "versions", "verify", "2", "--json").stdout)
    assert document == {"version": 2, "chain": [1, 2], "files": 4, "signed": True}
    refused = run(tmp_path, "versions", "verify", "3")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert "version 3 is not signed" in refused.stderr
    assert run(tmp_path, "versions", "pin", "3").returncode == 1
    listed = json.loads(run(tmp_path, "versions", "list", "--json").stdout)
    assert [(one["version"], one["state"]) for one in listed] == [(1, []), (2, ["current"]), (3, [])]
    assert run(tmp_path, "versions", "show", "3").returncode == 0
    manifest = tmp_path / "registry/versions/000000001" / MANIFEST
    manifest.write_bytes(manifest.read_bytes() + b" ")
    refused = run(tmp_path, "versions", "verify", "2")
    assert "because of a version that it builds on: the signature of version 1 is invalid" in refused.stderr


# ── pods ───────────────────────────────────────────────────────────────────────────────────────


def test_no_server_pod_gets_the_private_key(tmp_path: Path) -> None:
    file = tmp_path / "clickline.yaml"
    file.write_text("""
name: ads
data: {format: criteo, train: data/train.tsv}
publish: {signing_key_file: keys/private}
serve: {trusted_keys_file: keys/public, token_file: token}
deploy:
  serving: {lookup: {replicas: 1}}
  tracking: {enabled: true}
  secrets: {files: {keys/private: signing/key, keys/public: trust/keys, token: serving/token}}
""")
    mounted: dict[str, set[str]] = {}
    volumes: dict[str, set[str]] = {}
    for made in render(file).objects:
        spec = made.get("spec", {}).get("template", {}).get("spec")
        if spec is not None:
            role = made["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/component"]
            paths = {mount["mountPath"] for one in spec["containers"] for mount in one["volumeMounts"]}
            mounted[role] = paths & {"/clickline/keys/private", "/clickline/keys/public"}
            volumes[role] = {one["secret"]["secretName"] for one in spec["volumes"] if "secret" in one}
    servers = {role for role in mounted if role in ("predictor", "lookup", "tracking")}
    assert len(servers) == 3 < len(mounted)
    for role in mounted:
        wanted = {"/clickline/keys/public"} | (set() if role in servers else {"/clickline/keys/private"})
        assert mounted[role] == wanted, role
        assert ("signing" in volumes[role]) == (role not in servers)

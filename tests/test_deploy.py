"""What examples/kubernetes, examples/compose and .github/workflows say is read by those they are for.

Kubernetes' own schemas judge the manifests, strictly; kustomize's overlay is applied here, as far as it goes.
The settings in them are Penstock's, NATS reads its file, and what one file names is there in the other.
"""

import argparse
import base64
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from penstock import __version__
from penstock.log.jetstream.cluster import server_path
from penstock.log.jetstream.names import LogNames
from penstock.log.jetstream.rights import rights_of_front_end, user_block
from penstock.server.settings import TABLE, Settings
from penstock.server.settings_read import add_arguments, load
from tests.server.harness import ROOT

KUBERNETES = ROOT / "examples" / "kubernetes"
COMPOSE = ROOT / "examples" / "compose"
IMAGE = f"localhost/penstock:{__version__}"
DOORS = ("sspq", "phpmq", "rq", "http")


def read(path: Path, **environ: str) -> Settings:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return load(parser.parse_args(["--config", str(path)]), environ)


def ports_of(settings: Settings) -> dict[str, int]:
    assert settings.http is not None
    doors = {it.protocol: it.address for it in settings.listeners} | {"http": settings.http.address}
    return {name: int(str(doors[name]).rpartition(":")[2]) for name in DOORS if name in doors}


def documents(path: Path) -> list[dict[Any, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


# --- Kubernetes -----------------------------------------------------------------------------------


def secrets(folder: Path) -> Iterator[dict[str, Any]]:
    """What kustomize generates."""
    (kustomization,) = documents(folder / "kustomization.yaml")
    for one in kustomization["secretGenerator"]:
        contents = {name: (folder / name).read_bytes() for name in one.get("files", ())}
        contents |= {
            name: value.encode() for name, _, value in (it.partition("=") for it in one.get("literals", ()))
        }
        data = {name: base64.b64encode(value).decode() for name, value in contents.items()}
        yield {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": one["name"]}, "data": data}


def changed(manifest: dict[str, Any], patch: list[dict[str, Any]]) -> dict[str, Any]:
    """By add and replace of RFC 6902: what is replaced must be there."""
    for step in patch:
        *way, last = step["path"].strip("/").split("/")
        place: Any = manifest
        for word in way:
            place = place[int(word) if isinstance(place, list) else word]
        assert step["op"] in ("add", "replace")
        assert (last in place) is (step["op"] == "replace"), step
        place[last] = step["value"]
    return manifest


def manifests(name: str) -> list[dict[str, Any]]:
    """All that `kubectl apply -k` would send."""
    folder = KUBERNETES / name
    (kustomization,) = documents(folder / "kustomization.yaml")
    assert kustomization["kind"] == "Kustomization"
    found: list[dict[Any, Any]] = []
    for resource in kustomization["resources"]:
        path = folder / resource
        found += documents(path) if path.is_file() else manifests(path.resolve().name)
    for patch in kustomization.get("patches", ()):
        (target,) = [
            it
            for it in found
            if (it["kind"], it["metadata"]["name"]) == (patch["target"]["kind"], patch["target"]["name"])
        ]
        changed(target, yaml.safe_load(patch["patch"]))
    for image in kustomization.get("images", ()):
        assert image["name"] == IMAGE.partition(":")[0]
        assert image["newTag"] == __version__
    return [it for it in found if it["kind"] != "Secret"] + list(secrets(folder))


FOLDERS = ("one", "cluster", "mine")


@pytest.mark.parametrize("name", FOLDERS)
def test_kubernetes_takes_every_manifest(name: str) -> None:
    found = manifests(name)
    assert len(found) >= 3
    for manifest in found:
        kubernetes_validate.validate(manifest, "1.31", strict=True)


def test_a_wrong_manifest_would_be_found() -> None:
    wrong = manifests("one")[0]
    wrong["spec"]["template"]["spec"]["containers"][0]["readOnly"] = True
    with pytest.raises(kubernetes_validate.ValidationError, match="readOnly"):
        kubernetes_validate.validate(wrong, "1.31", strict=True)


@pytest.mark.parametrize("name", FOLDERS)
def test_pods_are_not_root_and_what_they_name_is_there(name: str) -> None:
    found = manifests(name)
    pod = next(it for it in found if it["kind"] in ("StatefulSet", "Deployment"))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    assert (pod["securityContext"]["runAsNonRoot"], pod["securityContext"]["runAsUser"]) == (True, 10001)
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    assert container["image"] == IMAGE
    assert not pod["automountServiceAccountToken"]
    mounted = {it["mountPath"]: it["name"] for it in container["volumeMounts"]}
    assert {"/data", "/tmp", "/etc/penstock"} <= mounted.keys()
    generated = {it["metadata"]["name"]: it["data"] for it in found if it["kind"] == "Secret"}
    settings_of = next(
        it["secret"]["secretName"] for it in pod["volumes"] if it["name"] == mounted["/etc/penstock"]
    )
    assert "penstock.toml" in generated[settings_of]


@pytest.mark.parametrize("name", FOLDERS)
def test_settings_and_manifests_agree(name: str) -> None:
    found = manifests(name)
    pod = next(it for it in found if it["kind"] in ("StatefulSet", "Deployment"))["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    given = {
        it["name"]: it.get("value", "penstock-7d9")
        for it in container.get("env", ())
        if it["name"] != "POD_IP"
    }
    assert given.keys() <= {setting.variable for setting in TABLE}
    given = {key: value.replace("$(POD_IP)", "10.1.2.3") for key, value in given.items()}
    settings = read(KUBERNETES / name / "penstock.toml", **given)
    assert settings.data == "/data"
    assert pod["terminationGracePeriodSeconds"] > settings.drain_seconds + 2
    ports = {it["name"]: it["containerPort"] for it in container["ports"]}
    wanted = ports_of(settings)
    if name == "cluster":
        wanted["relay"] = settings.cluster.listen.port
        assert settings.strict
        assert all(url.startswith("tls://") for url in settings.engine)
        assert settings.cluster.tls_ca == "/etc/nats-ca/ca.crt"
        assert str(settings.cluster.advertise) == "10.1.2.3:7400"
    assert wanted.items() <= ports.items()
    (service,) = [it for it in found if it["kind"] == "Service"]
    assert {it["name"]: it["port"] for it in service["spec"]["ports"]} == {
        key: port for key, port in ports.items() if key != "relay"
    }
    for probe in ("startupProbe", "livenessProbe"):
        assert container[probe]["tcpSocket"]["port"] in wanted
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}


def test_nats_has_users_and_tls_and_knows_the_front_ends() -> None:
    (values,) = documents(KUBERNETES / "cluster" / "nats-values.yaml")
    config = values["config"]
    assert config["nats"]["tls"] == config["cluster"]["tls"] == {"enabled": True, "secretName": "nats-tls"}
    assert values["tlsCA"] == {"enabled": True, "secretName": "nats-tls"}
    (user,) = config["merge"]["authorization"]["users"]
    assert f"{user['user']}:replace-this\n" == (KUBERNETES / "cluster" / "nats.user").read_text()
    reference = values["container"]["env"]["PENSTOCK_PASSWORD"]["valueFrom"]["secretKeyRef"]
    generated = {it["metadata"]["name"]: it["data"] for it in secrets(KUBERNETES / "cluster")}
    assert base64.b64decode(generated[reference["name"]][reference["key"]]) == b"replace-this"
    deployment = manifests("cluster")[0]
    volumes = {it["name"]: it for it in deployment["spec"]["template"]["spec"]["volumes"]}
    assert volumes["nats-ca"]["secret"]["secretName"] == "nats-tls"


# --- compose --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["compose.yaml", "cluster.yaml"])
def test_compose_files_hold_together(name: str) -> None:
    (file,) = documents(COMPOSE / name)
    ours = [it for it in file["services"].values() if it["image"] == IMAGE]
    assert ours
    used = set()
    for service in file["services"].values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        for volume in service["volumes"]:
            source, target, *mode = volume.split(":")
            if source.startswith("./"):
                assert (COMPOSE / source).is_file()
                assert mode == ["ro"]
            else:
                used.add(source)
                assert target == "/data"
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:")
        assert set(service.get("depends_on", ())) <= file["services"].keys()
    assert used == file["volumes"].keys()
    for service in ours:
        config = next(it.split(":")[0] for it in service["volumes"] if it.endswith(".toml:ro"))
        settings = read(COMPOSE / config, **service.get("environment", {}))
        assert {int(it.rpartition(":")[2]) for it in service["ports"]} <= set(ports_of(settings).values())
        assert int(service["stop_grace_period"].rstrip("s")) > settings.drain_seconds + 2
        if name == "cluster.yaml":
            assert settings.strict
            assert {url.partition("//")[2].partition(":")[0] for url in settings.engine} < file[
                "services"
            ].keys()
            assert settings.cluster.credentials == "/etc/penstock/nats.user"


def test_nats_takes_the_file_of_compose(tmp_path: Path) -> None:
    config = (COMPOSE / "nats.conf").read_text(encoding="utf-8")
    (tmp_path / "nats.conf").write_text(config.replace('"/data"', f'"{tmp_path}"'))
    done = subprocess.run(
        [server_path(), "-t", "--config", tmp_path / "nats.conf"],
        env=os.environ | {"NAME": "nats-a"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "sync_interval: always" in config
    password = (COMPOSE / "nats.user").read_text().strip().partition(":")[2]
    assert user_block("penstock", f'"{password}"', rights_of_front_end(LogNames())) in config


# --- CI -------------------------------------------------------------------------------------------

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflows_call_make_and_nothing_else(path: Path) -> None:
    (workflow,) = documents(path)
    assert workflow["permissions"] == {"contents": "read"}
    assert workflow[True]  # what YAML 1.1 makes of `on`
    for job in workflow["jobs"].values():
        assert job["timeout-minutes"] <= 90
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            if "run" in step:
                make, target, *_ = step["run"].split()
                assert (make, target in TARGETS) == ("make", True), step
            else:
                assert re.fullmatch(r"[\w-]+/[\w-]+@v\d+(\.\d+)*", step["uses"]), step


def test_there_are_workflows() -> None:
    assert {path.stem for path in WORKFLOWS} >= {"tests", "wheels"}

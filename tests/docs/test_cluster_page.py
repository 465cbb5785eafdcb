"""What docs/how-to/cluster.md starts is taken: by torchrun, Ray Train and Kubernetes' operator."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import pytest
from ruamel.yaml import YAML
from tests.covering import by_night
from tests.docs.pages import blocks, page
from torch.distributed.run import get_args_parser

from recd_plugins.cli import main

PAGE = page("how-to/cluster.md")
MANIFEST: dict[str, Any] = YAML(typ="safe").load(blocks(PAGE, "yaml")[0])
PODS = [replica["template"]["spec"] for replica in MANIFEST["spec"]["pytorchReplicaSpecs"].values()]
#: kubeflow/training-operator, v1.9.0: manifests/base/crds/kubeflow.org_pytorchjobs.yaml.
CRD = os.environ.get("RECD_PYTORCHJOB_CRD")


def lines() -> list[list[str]]:
    """What the page starts by torchrun, with 1 for each variable of the shell."""
    text = re.sub(r'"?\$(\w+|\(\w+\))"?', "1", PAGE.replace("\\\n", "").replace("'\n", "\n"))
    written = [shlex.split(line) for line in re.findall(r"\btorchrun --nnodes.*$", text, re.M)]
    return [*written, *(pod["containers"][0]["command"] for pod in PODS)]


@pytest.mark.parametrize("line", lines(), ids=" ".join)
def test_torchrun_and_recd_take_the_line(line: list[str]) -> None:
    torchrun = get_args_parser().parse_args(line[1:])
    assert line[0] == "torchrun"
    assert (torchrun.no_python, torchrun.training_script) == (True, "recd")
    name, *arguments = torchrun.training_script_args
    command = main.get_command(click.Context(main), name)
    assert command is not None
    taken = command.make_context(name, arguments).params
    assert taken["resume"]
    assert Path(taken["given"]).name == "registry.yaml"


def test_there_are_lines_of_every_launcher() -> None:
    assert len(lines()) == 5


def test_what_pods_mount_is_there() -> None:
    for pod in PODS:
        (container,) = pod["containers"]
        mounts = {mount["name"]: Path(mount["mountPath"]) for mount in container["volumeMounts"]}
        assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
        assert Path(container["command"][4]).parent == mounts["shared"]
        # Relative paths of the file are taken from there: else each pod has checkpoints of its own.
        assert Path(container["workingDir"]) == mounts["shared"]


def closed(schema: Any) -> Any:
    """The schema with no fields but those that it names, as ``kubectl --validate=strict`` is."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(each) for name, each in schema.items()}
    if "properties" in found and not found.get("x-kubernetes-preserve-unknown-fields"):
        found.setdefault("additionalProperties", False)
    return found


@pytest.mark.skipif(CRD is None, reason="RECD_PYTORCHJOB_CRD names no schema of the operator")
def test_the_operator_takes_the_manifest() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    crd = YAML(typ="safe").load(Path(str(CRD)))
    (version,) = (each for each in crd["spec"]["versions"] if each["served"])
    names = crd["spec"]["names"]
    assert MANIFEST["kind"] == names["kind"]
    assert MANIFEST["apiVersion"] == f"{crd['spec']['group']}/{version['name']}"
    schema = closed(version["schema"]["openAPIV3Schema"])
    jsonschema.validate(MANIFEST, schema)
    for wrong in ({"nprocPerNode": 8}, {"backoffLimit": 3}):
        spec = {**MANIFEST["spec"], **wrong}
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate({**MANIFEST, "spec": spec}, schema)


@pytest.mark.skipif(not by_night(), reason="starts Ray and torchrun, 40 s of a core, by night")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="there is no setpriv here")
def test_losses_are_those_of_torchrun_under_ray_train(tmp_path: Path) -> None:
    pytest.importorskip("ray.train")
    on_ray, on_hosts = blocks(PAGE, "python")
    (registry,) = re.findall(r'REGISTRY = """\n(.*?)"""', on_hosts, re.S)
    start = "import ray; ray.init(num_cpus=2, include_dashboard=False, object_store_memory=10**8)\n"
    assert on_ray.count('"--resume"') == 1
    code = start + on_ray.replace('"--resume"', '"--json", "losses.json"')
    run = ["recd", "run", "registry.yaml", "--json", "losses.json"]
    commands = {
        "ray": [sys.executable, "-c", code],
        "torchrun": ["torchrun", "--nproc-per-node", "2", "--no-python", *run],
    }
    losses = {}
    for name, command in commands.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "registry.yaml").write_text(registry)
        with tempfile.TemporaryDirectory() as home:  # a short path, as Ray's sockets stand in it
            own = {"HOME": home, "RAY_TMPDIR": home, "RAY_USAGE_STATS_ENABLED": "0"}
            env = {**os.environ, **own}
            subprocess.run(command, cwd=folder, env=env, check=True, timeout=900)
        losses[name] = json.loads((folder / "losses.json").read_text())["losses"]
    assert len(losses["ray"]) == 4
    assert losses["ray"] == losses["torchrun"]

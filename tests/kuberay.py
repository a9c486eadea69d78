"""Builds the folders of deploy/kubernetes, and checks what they contain: operators' resources against
the schemas of tests/operators.py, all others and each pod against those of Kubernetes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

from tests.operators import KINDS

KUBERNETES = "1.31"


def check(resource: dict[str, Any]) -> None:
    """Raise if its operator or Kubernetes would refuse it."""
    if (
        resource["kind"] == "NetworkAttachmentDefinition"
    ):  # neither of Ray nor of Kubernetes; it contains JSON for CNI
        assert set(resource["spec"]) == {"config"}
        assert {"cniVersion", "type"} <= set(json.loads(resource["spec"]["config"]))
        return
    schema = KINDS.get((resource["apiVersion"], resource["kind"]))
    if schema is None:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
        return
    Draft202012Validator(schema).validate(resource.get("spec", {}))
    if resource["kind"] == "TrainingRuntime":
        for job in jobs(resource):
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **job}
            kubernetes_validate.validate(whole, KUBERNETES, strict=True)
    if not resource["apiVersion"].startswith("ray.io/"):
        return
    for spec in pods(resource):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def pods(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specs of all pods: the head's, the workers', and that of a job's submitter."""
    templates = [group["template"] for group in groups(resource)]
    if "submitterPodTemplate" in resource["spec"]:
        templates.append(resource["spec"]["submitterPodTemplate"])
    return [template["spec"] for template in templates]


def jobs(runtime: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the Jobs of which a TrainJob of this runtime consists."""
    return [each["template"] for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]]


def groups(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the group of the head and those of the workers."""
    spec = resource["spec"].get("rayClusterSpec", resource["spec"])
    return [spec["headGroupSpec"], *spec["workerGroupSpecs"]]


def build(folder: Path) -> list[dict[str, Any]]:
    """Build a folder like `kubectl kustomize`, as far as deploy/ uses it: resources, components,
    then patches."""
    resources: list[dict[str, Any]] = []
    _add(folder, resources)
    return resources


def _add(folder: Path, resources: list[dict[str, Any]]) -> None:
    """Add the resources of a folder to the list, then apply its patches to all of them."""
    settings = yaml.safe_load((folder / "kustomization.yaml").read_text())
    assert set(settings) <= {
        "apiVersion",
        "kind",
        "resources",
        "components",
        "patches",
        "images",
        "configMapGenerator",
    }, settings
    for name in settings.get("resources", ()):
        resources += _load((folder / name).resolve())
    resources += [_config_map(folder, **each) for each in settings.get("configMapGenerator", ())]
    for name in settings.get("components", ()):
        part = (folder / name).resolve()
        assert yaml.safe_load((part / "kustomization.yaml").read_text())["kind"] == "Component", (
            part
        )
        _add(part, resources)
    for patch in settings.get("patches", ()):
        for resource in resources:
            target, name = patch["target"], resource["metadata"]["name"]
            if resource["kind"] == target["kind"] and re.fullmatch(target.get("name", ".*"), name):
                for step in yaml.safe_load(patch["patch"]):
                    apply(resource, **step)


def _load(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        yield from build(path)
    else:
        yield from yaml.safe_load_all(path.read_text())


def _config_map(
    folder: Path, name: str, files: list[str], options: dict[str, Any]
) -> dict[str, Any]:
    assert options.pop("disableNameSuffixHash"), "a name that does not change with the contents"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, **options},
        "data": {file: (folder / file).read_text() for file in files},
    }


def apply(document: Any, op: str, path: str, value: Any = None) -> None:
    """Apply one step of a JSON patch (RFC 6902)."""
    *parents, last = (part.replace("~1", "/").replace("~0", "~") for part in path.split("/")[1:])
    for part in parents:
        document = document[int(part) if isinstance(document, list) else part]
    assert op in ("add", "replace"), op
    if last == "-":
        document.append(value)
        return
    assert op == "add" or last in document, f"{path} is not there"
    document[last] = value

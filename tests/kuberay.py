"""Schemas of KubeRay's resources: the fields of their specs and the types of these.

They are written by hand from the types in ray-operator/apis/ray/v1 of KubeRay 1.6, with every field
of the types that deploy/ uses. Other fields are refused, so that a misspelt field is found; `{}` is
a field that deploy/ does not use. Pods are checked against the schema of Kubernetes.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml
from jsonschema import Draft202012Validator

KUBERNETES = "1.31"
TEXT, FLAG, COUNT = {"type": "string"}, {"type": "boolean"}, {"type": "integer", "minimum": 0}
POD = {"type": "object", "required": ["spec"]}
PARAMS = {"type": "object", "additionalProperties": TEXT}


def record(required: str, **fields: Any) -> dict[str, Any]:
    """Return the schema of an object with these fields and no others."""
    return {
        "type": "object",
        "properties": fields,
        "required": required.split(),
        "additionalProperties": False,
    }


GROUP = {"rayStartParams": PARAMS, "template": POD, "labels": PARAMS, "resources": PARAMS}
CLUSTER = record(
    "headGroupSpec",
    rayVersion=TEXT,
    authOptions=record("", mode={"enum": ["disabled", "token"]}, secretName=TEXT, enableK8sTokenAuth=FLAG),
    enableInTreeAutoscaling=FLAG,
    autoscalerOptions=record(
        "",
        idleTimeoutSeconds=COUNT, upscalingMode={"enum": ["Default", "Aggressive", "Conservative"]},
        version={"enum": ["v1", "v2"]}, image=TEXT, imagePullPolicy=TEXT, resources={}, securityContext={}, env={},
        envFrom={}, volumeMounts={}, command={}, args={},
    ),
    headGroupSpec=record("template", serviceType=TEXT, headService={}, enableIngress=FLAG, ingressOptions={}, **GROUP),
    workerGroupSpecs={
        "type": "array",
        "items": record(
            "groupName template minReplicas maxReplicas",
            groupName=TEXT, replicas=COUNT, minReplicas=COUNT, maxReplicas=COUNT, numOfHosts=COUNT,
            idleTimeoutSeconds=COUNT, priority=COUNT, suspend=FLAG, scaleStrategy={}, **GROUP,
        ),
    },
    suspend=FLAG, managedBy=TEXT, headServiceAnnotations=PARAMS, upgradeStrategy={}, gcsFaultToleranceOptions={},
    historyServerOptions={}, networkPolicy={}, tlsOptions={},
)  # fmt: skip
JOB = record(
    "",
    entrypoint=TEXT, runtimeEnvYAML=TEXT, rayClusterSpec=CLUSTER, shutdownAfterJobFinishes=FLAG,
    ttlSecondsAfterFinished=COUNT, activeDeadlineSeconds=COUNT, backoffLimit=COUNT, suspend=FLAG,
    submissionMode={"enum": ["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"]},
    jobId=TEXT, metadata=PARAMS, managedBy=TEXT, clusterSelector=PARAMS, entrypointResources=TEXT,
    entrypointNumCpus={"type": "number"}, entrypointNumGpus={"type": "number"}, submitterPodTemplate={},
    submitterConfig=record("", backoffLimit=COUNT), deletionStrategy={},
)  # fmt: skip
KINDS = {"RayCluster": CLUSTER, "RayJob": JOB}


def check(resource: dict[str, Any]) -> None:
    """Raise if KubeRay or Kubernetes would refuse it."""
    if (
        resource["kind"] == "NetworkAttachmentDefinition"
    ):  # neither of Ray nor of Kubernetes; it contains JSON for CNI
        assert set(resource["spec"]) == {"config"}
        assert {"cniVersion", "type"} <= set(json.loads(resource["spec"]["config"]))
        return
    if resource["kind"] not in KINDS:
        kubernetes_validate.validate(resource, KUBERNETES, strict=True)
        return
    assert resource["apiVersion"] == "ray.io/v1"
    Draft202012Validator(KINDS[resource["kind"]]).validate(resource["spec"])
    for spec in pods(resource):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": spec}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)


def pods(resource: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the specs of all pods: the head's, the workers', and that of a job's submitter."""
    templates = [group["template"] for group in groups(resource)]
    if "submitterPodTemplate" in resource["spec"]:
        templates.append(resource["spec"]["submitterPodTemplate"])
    return [template["spec"] for template in templates]


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
    }, settings
    for name in settings.get("resources", ()):
        resources += _load((folder / name).resolve())
    for name in settings.get("components", ()):
        part = (folder / name).resolve()
        assert yaml.safe_load((part / "kustomization.yaml").read_text())["kind"] == "Component", (
            part
        )
        _add(part, resources)
    for patch in settings.get("patches", ()):
        for resource in resources:
            if resource["kind"] == patch["target"]["kind"]:
                for step in yaml.safe_load(patch["patch"]):
                    apply(resource, **step)


def _load(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        yield from build(path)
    else:
        yield from yaml.safe_load_all(path.read_text())


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

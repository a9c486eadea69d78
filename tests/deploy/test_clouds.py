"""deploy/aws.yaml, gcp.yaml, azure.yaml held against Ray's schema and templates, moto's EC2, and
cluster.yaml."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import ray.autoscaler
import yaml
from moto import mock_aws
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.conftest import ROOT

RAY = Path(ray.autoscaler.__file__).parent
CLOUDS = ["aws", "gcp", "azure"]
OWN = yaml.safe_load((ROOT / "cluster.yaml").read_text())
TEXTS = {cloud: (ROOT / "deploy" / f"{cloud}.yaml").read_text() for cloud in CLOUDS}
REGION = "us-east-1"


def config(cloud: str) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load(TEXTS[cloud])
    return settings


def gpu_nodes(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the node type that asks the cloud for machines with GPUs."""
    node: dict[str, Any] = settings["available_node_types"]["gpu"]["node_config"]
    return node


@pytest.mark.parametrize("cloud", CLOUDS)
def test_ray_takes_the_file(cloud: str) -> None:
    settings = prepare_config(config(cloud))
    validate_config(settings)
    assert settings["provider"]["type"] == cloud
    assert settings["provider"]["cache_stopped_nodes"] is False
    head, gpu = (settings["available_node_types"][name] for name in ("head", "gpu"))
    assert settings["head_node_type"] == "head"
    assert "GPU" not in head["resources"]
    assert (head["min_workers"], head["max_workers"]) == (0, 0)
    assert gpu["resources"] == {"CPU": 96, "GPU": 8}
    assert 0 <= gpu["min_workers"] < gpu["max_workers"] == settings["max_workers"]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_nodes_are_set_up_as_those_of_cluster_yaml(cloud: str) -> None:
    settings = prepare_config(config(cloud))
    same = [
        "file_mounts",
        "rsync_exclude",
        "setup_commands",
        "head_start_ray_commands",
        "worker_start_ray_commands",
    ]
    assert {name: settings[name] for name in same} == {name: OWN[name] for name in same}
    assert settings["worker_setup_commands"] == OWN["setup_commands"]
    assert settings["docker"] == {}


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_head_gets_the_sdk_that_ray_asks_for(cloud: str) -> None:
    defaults = yaml.safe_load((RAY / cloud / "defaults.yaml").read_text())
    (theirs,), (ours,) = defaults["head_setup_commands"], config(cloud)["head_setup_commands"]
    assert ours.startswith("~/.raydist/env/bin/python -m pip install ")
    wanted = re.findall(r"(?<=[\s'])([a-z][a-z0-9-]+)(?=[=>])", theirs)
    assert wanted
    assert set(wanted) <= set(re.split(r"[\s=]+", ours))


@pytest.mark.parametrize("cloud", CLOUDS)
def test_what_a_person_changes_is_marked(cloud: str) -> None:
    marked = re.findall(r"# (\d)\. ", TEXTS[cloud])
    (last,) = re.findall(r"^# Change the lines marked 1 to (\d);", TEXTS[cloud], re.MULTILINE)
    assert marked == [str(number) for number in range(1, int(last) + 1)]
    assert f"ray up -y deploy/{cloud}.yaml" in TEXTS[cloud]
    assert "storage=/shared/runs" in TEXTS[cloud]


@pytest.mark.parametrize("cloud", CLOUDS)
def test_the_first_commands_are_sound(cloud: str) -> None:
    """The one that mounts the file server too, which a person brings to life by taking its #
    away."""
    living = TEXTS[cloud].replace("  # - mountpoint", "  - mountpoint")
    commands = yaml.safe_load(living)["initialization_commands"]
    assert len(commands) == 2
    check = [str(Path(sys.executable).parent / "shellcheck"), "--shell=bash", "-"]
    done = subprocess.run(
        check, input="\n".join(commands), capture_output=True, text=True, check=False
    )
    assert done.stdout + done.stderr == ""


@pytest.fixture
def ec2(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """EC2 as moto plays it, where a role for the head is there already (Ray waits 30 s after it
    makes one)."""
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray makes a key in ~/.ssh
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "tests")
    with mock_aws():
        iam = boto3.client("iam", REGION)
        iam.create_role(RoleName="ray-autoscaler-v1", AssumeRolePolicyDocument="{}")
        iam.create_instance_profile(InstanceProfileName="ray-autoscaler-v1")
        iam.add_role_to_instance_profile(
            InstanceProfileName="ray-autoscaler-v1", RoleName="ray-autoscaler-v1"
        )
        yield boto3.client("ec2", REGION)


def with_ids(ec2: Any) -> dict[str, Any]:
    """deploy/aws.yaml with a subnet, a security group and an image that are there."""
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/24", AvailabilityZone=f"{REGION}a")[
        "Subnet"
    ]["SubnetId"]
    group = ec2.create_security_group(GroupName="raydist", Description="raydist", VpcId=vpc)[
        "GroupId"
    ]
    image = ec2.describe_images()["Images"][0]["ImageId"]
    text = TEXTS["aws"]
    for before, after in (("subnet-0", subnet), ("sg-0", group), ("ami-0", image)):
        text, count = re.subn(rf"\b{before}0+", after, text)
        assert count == 1, before
    settings: dict[str, Any] = prepare_config(yaml.safe_load(text))
    return settings


def test_ray_makes_machines_on_efa_of_it(ec2: Any) -> None:
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

    settings = AWSNodeProvider.bootstrap_config(with_ids(ec2))
    assert "create-placement-group --group-name raydist --strategy cluster" in TEXTS["aws"]
    (kind,) = ec2.describe_instance_types(InstanceTypes=[gpu_nodes(settings)["InstanceType"]])[
        "InstanceTypes"
    ]
    counted = {"CPU": kind["VCpuInfo"]["DefaultVCpus"], "GPU": kind["GpuInfo"]["Gpus"][0]["Count"]}
    assert settings["available_node_types"]["gpu"]["resources"] == counted
    cards = gpu_nodes(settings)["NetworkInterfaces"]
    assert len(cards) == kind["NetworkInfo"]["MaximumNetworkCards"]
    assert [(card["NetworkCardIndex"], card["DeviceIndex"]) for card in cards] == [
        (0, 0),
        (1, 1),
        (2, 1),
        (3, 1),
    ]
    provider = AWSNodeProvider(settings["provider"], settings["cluster_name"])
    tags = {"ray-node-type": "worker", "ray-user-node-type": "gpu", "ray-launch-config": "tests"}
    sent: list[dict[str, Any]] = []
    events = provider.ec2_fail_fast.meta.client.meta.events
    events.register("before-call.ec2.RunInstances", lambda params, **_: sent.append(params["body"]))
    provider.create_node(gpu_nodes(settings), tags, 1)
    (request,) = sent
    assert request["Placement.GroupName"] == "raydist"
    assert request["MetadataOptions.HttpTokens"] == "required"
    assert [request[f"NetworkInterface.{card}.InterfaceType"] for card in (1, 2, 3, 4)] == [
        "efa"
    ] * 4
    (launched,) = ec2.describe_instances()["Reservations"]
    (machine,) = launched["Instances"]
    assert machine["InstanceType"] == "p4d.24xlarge"
    # the head's subnet and groups are those of all cards: they reach each other
    head = settings["available_node_types"]["head"]["node_config"]
    assert {card["SubnetId"] for card in cards} == {machine["SubnetId"]} == set(head["SubnetIds"])
    assert {group for card in cards for group in card["Groups"]} == set(head["SecurityGroupIds"])


def test_gcp_places_machines_near_each_other() -> None:
    settings = config("gcp")
    provider, node = settings["provider"], gpu_nodes(settings)
    assert node["resourcePolicies"] == [
        f"projects/{provider['project_id']}/regions/{provider['region']}/resourcePolicies/raydist"
    ]
    assert node["scheduling"]["onHostMaintenance"] == "TERMINATE"
    assert provider["availability_zone"].startswith(provider["region"])
    assert [card["nicType"] for card in node["networkInterfaces"]] == ["GVNIC"]


def test_azure_asks_for_what_rays_template_knows() -> None:
    """And says what that lacks: when a Ray has it, this fails, and the comment in the file is out
    of date."""
    template = json.loads((RAY / "_private" / "_azure" / "azure-vm-template.json").read_text())
    settings = config("azure")
    for kind in settings["available_node_types"].values():
        assert set(kind["node_config"]["azure_arm_parameters"]) <= set(template["parameters"])
    size = gpu_nodes(settings)["azure_arm_parameters"]["vmSize"]
    assert re.fullmatch(r"Standard_(ND|HB)\d+\w*r\w*", size), "the sizes with InfiniBand have an r"
    assert gpu_nodes(settings)["azure_arm_parameters"]["imageOffer"] == "ubuntu-hpc"
    assert re.fullmatch(r"[123]", settings["provider"]["availability_zone"]), "one zone"
    lacking = re.compile(
        r"availabilitySet|virtualMachineScaleSet|proximityPlacementGroup", re.IGNORECASE
    )
    assert lacking.findall(json.dumps(template)) == []
    assert "ONE FABRIC" in TEXTS["azure"]

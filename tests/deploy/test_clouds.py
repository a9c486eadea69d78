"""deploy/aws.yaml, gcp.yaml, azure.yaml held against Ray's schema and templates, moto's EC2, and
cluster.yaml."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import boto3
import pytest
import ray.autoscaler
import yaml
from moto import mock_aws
from ray.autoscaler._private.updater import NodeUpdater
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.conftest import ROOT

RAY = Path(ray.autoscaler.__file__).parent
CLOUDS = ["aws", "gcp", "azure"]
OWN = yaml.safe_load((ROOT / "cluster.yaml").read_text())
TEXTS = {cloud: (ROOT / "deploy" / f"{cloud}.yaml").read_text() for cloud in CLOUDS}
REGION = "us-east-1"
SDKS = [
    *("httplib2", "google_auth_httplib2", "googleapiclient", "googleapiclient.discovery"),
    *("googleapiclient.errors", "azure", "azure.common", "azure.common.credentials", "azure.core"),
    *("azure.core.exceptions", "azure.identity", "azure.mgmt", "azure.mgmt.compute"),
    *("azure.mgmt.network", "azure.mgmt.resource", "azure.mgmt.resource.resources"),
    "azure.mgmt.resource.resources.models",
]
"""What Ray imports for Google Cloud and Azure, beyond its own packages and google-auth."""


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


@pytest.fixture
def ray_with_sdk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ray's code for Google Cloud and Azure can be imported: stand-ins for the clouds' SDKs are
    there, which take every call."""
    loaded = set(sys.modules)
    for name in SDKS:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    yield
    for name in set(sys.modules) - loaded:
        del sys.modules[name]


@pytest.mark.usefixtures("ray_with_sdk")
def test_only_the_head_has_a_public_address_on_gcp() -> None:
    """What Ray sends to Compute Engine; the others reach pip's index through a NAT of their
    network."""
    from ray.autoscaler._private.gcp.config import _configure_subnet
    from ray.autoscaler._private.gcp.node import GCPCompute

    compute = MagicMock()
    compute.subnetworks().list().execute.return_value = {"items": [{"selfLink": "default"}]}
    settings = _configure_subnet(prepare_config(config("gcp")), compute)
    cloud = GCPCompute(compute, "my-project", "us-central1-a", "raydist")
    cards = {}
    for name, kind in settings["available_node_types"].items():
        cloud.create_instance(kind["node_config"], {"ray-node-name": name}, False)
        body = compute.instances().insert.call_args.kwargs["body"]
        (cards[name],) = body["networkInterfaces"]
    assert {name: "accessConfigs" in card for name, card in cards.items()} == {
        "head": True,
        "gpu": False,
    }
    (network,) = re.findall(r"gcloud compute routers create raydist --network=(\S+)", TEXTS["gcp"])
    assert cards["gpu"]["network"] == f"global/networks/{network}"
    assert "gcloud compute routers nats create raydist --router=raydist" in TEXTS["gcp"]


@pytest.mark.usefixtures("ray_with_sdk")
def test_only_the_head_has_a_public_address_on_azure() -> None:
    """What Ray sends to Azure, and by which addresses it logs in."""
    from ray.autoscaler._private._azure.node_provider import AzureNodeProvider

    settings = config("azure")
    made = {"msi": "", "nsg": "", "subnet": "", "unique_id": "1234"}  # by `ray up`
    with patch.object(
        sys.modules[AzureNodeProvider.__module__], "get_cloud_from_metadata_requests"
    ):
        provider = AzureNodeProvider({**settings["provider"], **made}, "raydist")
    place = SimpleNamespace(location=settings["provider"]["location"], zones=["1", "2"])
    public = {}
    for name, kind in settings["available_node_types"].items():
        node = kind["node_config"]
        size = SimpleNamespace(name=node["azure_arm_parameters"]["vmSize"], location_info=[place])
        provider.compute_client.resource_skus.list.return_value = [size]
        role = "head" if name == settings["head_node_type"] else "worker"
        provider.create_node(node, {"ray-node-type": role}, 1)
        sent = provider.resource_client.deployments.create_or_update.call_args.kwargs
        properties = sent["parameters"]["properties"]
        assert set(properties["parameters"]) <= set(properties["template"]["parameters"])
        assert properties["parameters"]["zones"] == {"value": ["1"]}
        public[name] = properties["parameters"]["provisionPublicIp"]["value"]
        assert public[name] is not logs_in_within(settings, role == "head")
    assert public == {"head": True, "gpu": False}


def logs_in_within(settings: dict[str, Any], head: bool) -> bool:
    """Return whether Ray logs in to a node by its address within the cloud's network."""
    provider = MagicMock()
    names = ["auth_config", "file_mounts", "initialization_commands", "setup_commands"]
    names += ["ray_start_commands", "runtime_hash", "file_mounts_contents_hash", "cluster_name"]
    given = {"node_id": "1", "provider_config": settings["provider"], "provider": provider}
    NodeUpdater(**dict.fromkeys(names), **given, is_head_node=head)
    within: bool = provider.get_command_runner.call_args.args[5]
    return within


def test_azures_machines_without_public_address_reach_pips_index() -> None:
    """Networks that are made by an API from 2025-07-01 on let nothing out without a NAT gateway,
    unless they are told to. When Ray uses a newer one, the file must say how to make a gateway."""
    template = json.loads((RAY / "_private" / "_azure" / "azure-config-template.json").read_text())
    (network,) = [
        each
        for each in template["resources"]
        if each["type"] == "Microsoft.Network/virtualNetworks"
    ]
    assert network["apiVersion"] < "2025-07-01"
    assert "defaultOutboundAccess" not in json.dumps(network)


def test_a_request_that_a_program_on_a_machine_of_aws_passes_on_gets_no_role() -> None:
    for kind in config("aws")["available_node_types"].values():
        options = {"HttpTokens": "required", "HttpPutResponseHopLimit": 1}
        assert kind["node_config"]["MetadataOptions"] == options


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

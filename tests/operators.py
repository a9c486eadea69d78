"""Schemas of the operators' resources: the fields of their specs and the types of these.

They are written by hand from the operators' own types, from which their CRDs are made:
ray-operator/apis/ray/v1 of KubeRay 1.6, apis/kueue/v1beta2 of Kueue (since 0.15),
pkg/apis/monitoring/v1 of the Prometheus Operator, and those of Kubeflow Trainer 2.3 with JobSet's,
as its package kubeflow-trainer-api has them. They have the fields of the types that deploy/
uses. Other fields are refused, so that a misspelt field is found; `{}` is a field that deploy/ does
not use.
"""

from __future__ import annotations

from typing import Any

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
QUANTITY = {"type": ["integer", "string"], "pattern": r"^[0-9.]+([KMGTPE]i|[mkMGTPE])?$"}
NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "maxLength": 253}
SELECTOR = record("", matchLabels=PARAMS, matchExpressions={})
CLUSTER_QUEUE = record(
    "",
    resourceGroups={"type": "array", "minItems": 1, "maxItems": 16, "items": record(
        "coveredResources flavors",
        coveredResources={"type": "array", "minItems": 1, "maxItems": 64, "items": TEXT},
        flavors={"type": "array", "minItems": 1, "maxItems": 64, "items": record(
            "name resources",
            name=NAME,
            resources={"type": "array", "minItems": 1, "maxItems": 64, "items": record(
                "name nominalQuota", name=TEXT, nominalQuota=QUANTITY, borrowingLimit=QUANTITY, lendingLimit=QUANTITY,
            )},
        )},
    )},
    cohortName=NAME, queueingStrategy={"enum": ["StrictFIFO", "BestEffortFIFO"]}, namespaceSelector=SELECTOR,
    stopPolicy={"enum": ["None", "Hold", "HoldAndDrain"]}, flavorFungibility={}, preemption={},
    admissionChecksStrategy={}, fairSharing={}, admissionScope={},
)  # fmt: skip
LOCAL_QUEUE = record(
    "", clusterQueue=NAME, stopPolicy=CLUSTER_QUEUE["properties"]["stopPolicy"], fairSharing={}
)  # fmt: skip
FLAVOR = record("", nodeLabels=PARAMS, nodeTaints={}, tolerations={}, topologyName=NAME)
DURATION = {
    "type": "string",
    "pattern": r"^(0|(\d+y)?(\d+w)?(\d+d)?(\d+h)?(\d+m)?(\d+s)?(\d+ms)?)$",
}
RELABELING = record(
    "",
    sourceLabels={"type": "array", "items": {"type": "string", "pattern": r"^[a-zA-Z_][a-zA-Z0-9_]*$"}},
    targetLabel=TEXT, regex=TEXT, replacement=TEXT, separator=TEXT, modulus=COUNT,
    action={"enum": ["replace", "keep", "drop", "hashmod", "labelmap", "labeldrop", "labelkeep", "lowercase", "uppercase",
                     "keepequal", "dropequal"]},
)  # fmt: skip
PODS = record(
    "selector",
    selector=SELECTOR,
    podMetricsEndpoints={"type": "array", "items": record(
        "",
        port=TEXT, portNumber=COUNT, path=TEXT, interval=DURATION, scrapeTimeout=DURATION,
        relabelings={"type": "array", "items": RELABELING}, metricRelabelings={"type": "array", "items": RELABELING},
        honorLabels=FLAG, honorTimestamps=FLAG, filterRunning=FLAG, trackTimestampsStaleness=FLAG, followRedirects=FLAG,
        enableHttp2=FLAG, proxyUrl=TEXT, noProxy=TEXT, proxyFromEnvironment=FLAG, scheme={}, params={}, targetPort={},
        tlsConfig={}, authorization={}, basicAuth={}, bearerTokenSecret={}, oauth2={}, proxyConnectHeader={},
    )},
    namespaceSelector=record("", any=FLAG, matchNames={"type": "array", "items": TEXT}),
    jobLabel=TEXT, podTargetLabels={"type": "array", "items": TEXT}, sampleLimit=COUNT, targetLimit=COUNT, labelLimit=COUNT,
    labelNameLengthLimit=COUNT, labelValueLengthLimit=COUNT, keepDroppedTargets=COUNT, scrapeClass=TEXT,
    attachMetadata={}, bodySizeLimit={}, scrapeProtocols={}, fallbackScrapeProtocol={}, selectorMechanism={},
    scrapeClassicHistograms=FLAG, scrapeNativeHistograms=FLAG, convertClassicHistogramsToNHCB=FLAG,
    nativeHistogramBucketLimit=COUNT, nativeHistogramMinBucketFactor={},
)  # fmt: skip
RULES = record(
    "",
    groups={"type": "array", "items": record(
        "name",
        name=TEXT, interval=DURATION, query_offset=DURATION, limit=COUNT, labels=PARAMS, partial_response_strategy=TEXT,
        rules={"type": "array", "items": record(
            "expr",
            alert=TEXT, record=TEXT, expr=TEXT, keep_firing_for=DURATION, labels=PARAMS, annotations=PARAMS, **{"for": DURATION},
        )},
    )},
)  # fmt: skip
JOB_OF_PODS = record(
    "spec", metadata=record("", labels=PARAMS, annotations=PARAMS), spec={"type": "object"}
)
"""A Job of Kubernetes, which tests/kuberay.py holds against Kubernetes' schema."""
RUNTIME = record(
    "template",
    mlPolicy=record("", numNodes=COUNT, torch={}, mpi={}, flux={}, jax={}, xgboost={}),
    podGroupPolicy={},
    template=record(
        "spec",
        metadata={},
        spec=record(
            "replicatedJobs",
            replicatedJobs={"type": "array", "items": record(
                "name template", name=NAME, template=JOB_OF_PODS, replicas={"const": 1}, groupName=TEXT, dependsOn={},
            )},
            network={}, successPolicy={}, failurePolicy={}, startupPolicy={}, suspend=FLAG, coordinator={}, managedBy=TEXT,
            ttlSecondsAfterFinished=COUNT, volumeClaimPolicies={},
        ),
    ),
)  # fmt: skip
TRAIN_JOB = record(
    "runtimeRef",
    runtimeRef=record("name", name=NAME, kind={"enum": ["TrainingRuntime", "ClusterTrainingRuntime"]}, apiGroup=TEXT),
    trainer=record(
        "",
        args={"type": "array", "items": TEXT}, command={"type": "array", "items": TEXT}, env={}, image=TEXT,
        numNodes=COUNT, numProcPerNode=COUNT, resourcesPerNode=record("", limits=PARAMS, requests=PARAMS),
    ),
    initializer={}, runtimePatches={}, suspend=FLAG, managedBy=TEXT, activeDeadlineSeconds=COUNT,
)  # fmt: skip
KINDS = {
    ("ray.io/v1", "RayCluster"): CLUSTER,
    ("ray.io/v1", "RayJob"): JOB,
    ("kueue.x-k8s.io/v1beta2", "ResourceFlavor"): FLAVOR,
    ("kueue.x-k8s.io/v1beta2", "ClusterQueue"): CLUSTER_QUEUE,
    ("kueue.x-k8s.io/v1beta2", "LocalQueue"): LOCAL_QUEUE,
    ("monitoring.coreos.com/v1", "PodMonitor"): PODS,
    ("monitoring.coreos.com/v1", "PrometheusRule"): RULES,
    ("trainer.kubeflow.org/v1alpha1", "TrainingRuntime"): RUNTIME,
    ("trainer.kubeflow.org/v1alpha1", "TrainJob"): TRAIN_JOB,
}
"""The schema of the spec of each kind."""

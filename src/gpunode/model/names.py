"""Every name that other software can see: drivers, labels, annotations, taints, gates.

Kept in one module so that a name is changed in one place and can be looked up in one place.
"""

from typing import Final

DOMAIN: Final = "gpunode.dev"
DEFAULT_DRIVER: Final = "gpu.gpunode.dev"
SYSTEM_NAMESPACE: Final = "gpunode-system"

# Scheduling gate that the admission policy adds and only the controller removes.
PLACEMENT_GATE: Final = "gpunode.dev/placement"
# Namespace label that switches gang placement on.
GANG_NAMESPACE_LABEL: Final = "gpunode.dev/gang-scheduling"
GANG_NAMESPACE_VALUE: Final = "enabled"

# Device taint (NoSchedule) that keeps kube-scheduler from allocating devices the controller owns.
MANAGED_TAINT: Final = "gpunode.dev/managed"
# Device taint (NoSchedule) on what stays published only because a claim still holds it or its GPU's old layout.
RETAINED_TAINT: Final = "gpunode.dev/retained"
# Device taint (NoSchedule) on what the node has not let go of, though the claim it was prepared for is gone.
HELD_TAINT: Final = "gpunode.dev/held"
# Prefix of the taint keys that health puts on devices: gpunode.dev/xid, gpunode.dev/ecc, ...
HEALTH_TAINT_PREFIX: Final = "gpunode.dev/"
# Prefix of the taint keys (effect None) that tell how long gangs may stay in spite of the health taint of that name:
# grace.gpunode.dev/xid, ... See gpunode.model.grace.
GRACE_TAINT_PREFIX: Final = "grace.gpunode.dev/"
# Device taint (NoSchedule) by which a person takes a device out of service (gpunode quarantine).
QUARANTINE_TAINT: Final = "gpunode.dev/quarantine"
HEALTH_DIMENSIONS: Final = ("xid", "ecc", "remap", "fabric", "link", "presence", "prepare")

# Annotation on pods: which decision placed them.
DECISION_ANNOTATION: Final = "gpunode.dev/decision"
# Annotation on Jobs: the restart under way, JSON; present from before suspend until after resume.
RESTART_ANNOTATION: Final = "gpunode.dev/restart"
# Annotation, value "true", on pods that nobody re-creates (or their PodGroup): evict them all the same on a fault.
EVICT_ON_FAULT_ANNOTATION: Final = "gpunode.dev/evict-on-fault"
# Label by which Kueue takes charge of a Job's suspend field.
KUEUE_QUEUE_LABEL: Final = "kueue.x-k8s.io/queue-name"
# Condition the controller keeps on every PodGroup it looks after.
PLACED_CONDITION: Final = "gpunode.dev/Placed"

CLAIM_FINALIZER: Final = "resource.kubernetes.io/delete-protection"

# ConfigMap (one key a node) through which faults reach agents on fake hardware.
FAULTS_CONFIGMAP: Final = "gpunode-faults"

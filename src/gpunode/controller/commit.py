"""The controller's only writer: turns actions into API writes.

Every write carries the resourceVersion it was decided on and is safe to repeat. A write that lost a race ends the
action; what it had done so far is either undone (allocations of a gang whose gates are still closed) or completed
by the next decision, which sees it in the snapshot.
"""

import asyncio
import logging
from collections.abc import Coroutine, Iterable

from gpunode.controller import patches
from gpunode.controller.world import World
from gpunode.kube.client import Api, decode
from gpunode.kube.errors import ApiError, UnreachableError
from gpunode.kube.events import ObjectRef, Recorder
from gpunode.kube.kinds import CLAIMS, JOBS, PODS
from gpunode.model.core import Job, Pod, PodGroup
from gpunode.model.gang import (
    Action,
    Bind,
    ClaimAllocation,
    EnsureTaintRule,
    Evict,
    Place,
    Reason,
    ReasonCode,
    Release,
    Report,
    Resume,
)
from gpunode.model.meta import Condition
from gpunode.model.names import PLACEMENT_GATE
from gpunode.model.resource import ResourceClaim
from gpunode.model.times import stamp_now
from gpunode.model.wording import some

logger = logging.getLogger(__name__)
FIELD_MANAGER = "gpunode-controller"
_PARALLEL_WRITES = 16
_RELEASE_TRIES = 6
# A gang passes through several reasons to wait within milliseconds of its creation; only one that lasts is told.
_TELL_AFTER_S = 0.5
_ABOUT_PLACED = (ReasonCode.PLACED, ReasonCode.FAULT_GRACE)


class Committer:
    """Applies actions. Failures of single actions are logged and left to the next decision."""

    def __init__(self, api: Api, world: World, recorder: Recorder) -> None:
        self._api = api
        self._world = world
        self._recorder = recorder
        self._slots = asyncio.Semaphore(_PARALLEL_WRITES)
        self._waiting: dict[str, tuple[ReasonCode, float]] = {}
        self._told: set[str] = set()

    async def apply(self, actions: Iterable[Action]) -> int:
        """Carry out one decision's actions in order; the number that failed and must be decided again."""
        actions = tuple(actions)
        reports = {action.gang for action in actions if isinstance(action, Report)}
        self._waiting = {gang: known for gang, known in self._waiting.items() if gang in reports}
        # Where the decision itself says how a gang is placed (say, without pins, or with a fault), its words stand.
        self._told = {a.gang for a in actions if isinstance(a, Report) and a.reason.code in _ABOUT_PLACED}
        failed = 0
        for action in actions:
            try:
                await self._apply(action)
            except (ApiError, UnreachableError, KeyError) as error:
                failed += 1
                stale = isinstance(error, KeyError) or (isinstance(error, ApiError) and error.raced)
                level = logging.INFO if stale else logging.ERROR
                logger.log(level, "%s not completed, will decide again: %s", _describe(action), error)
        return failed

    async def _apply(self, action: Action) -> None:
        match action:
            case Place():
                await self._place(action)
            case Evict():
                await self._evict(action)
            case Resume():
                await self._resume(action)
            case Bind():
                await self._bind(action)
            case Release():
                await self._take_back(action)
            case Report():
                if self._lasts(action):
                    await self._report(action.gang, action.reason)
            case EnsureTaintRule():
                await self._ensure_rule(action.driver)

    def _lasts(self, report: Report) -> bool:
        """Whether the gang has waited for this reason long enough to tell people; that it is placed is told at once."""
        if report.reason.code is ReasonCode.PLACED:
            return True
        now = asyncio.get_running_loop().time()
        code, since = self._waiting.get(report.gang, (None, now))
        if code is not report.reason.code:
            since = now
        self._waiting[report.gang] = (report.reason.code, since)
        return now - since >= _TELL_AFTER_S

    async def _place(self, place: Place) -> None:
        self._check_members(place)
        pods = self._world.caches.pods.items
        consumers: dict[str, list[Pod]] = {}
        allocations: dict[str, ClaimAllocation] = {}
        for assignment in place.assignments:
            for one in assignment.claims:
                allocations[one.claim] = one
                consumers.setdefault(one.claim, []).append(pods[assignment.pod])
        written: list[ResourceClaim] = []
        try:
            await _all(self._allocate(one, consumers[claim], written) for claim, one in allocations.items())
            self._check_members(place)
        except Exception:
            await asyncio.gather(*map(self._undo, written))
            raise
        releases: list[tuple[str, str | None]] = [(assignment.pod, assignment.node) for assignment in place.assignments]
        releases += [(pod, None) for pod in place.stragglers]
        await _all(self._release(pod, place.decision, node) for pod, node in releases)
        if place.assignments:
            nodes = sorted({assignment.node for assignment in place.assignments})
            text = f"{len(place.assignments)} pods placed on {some(nodes, 8)} (decision {place.decision})"
            logger.info("gang %s: %s", place.gang, text)
            if place.gang not in self._told:
                await self._report(place.gang, Reason(ReasonCode.PLACED, text))

    def _check_members(self, place: Place) -> None:
        """Raise KeyError if a member is gone, going, or another pod of the same name: no gate may open for it."""
        for assignment in place.assignments:
            pod = self._world.caches.pods.items[assignment.pod]
            if pod.terminating or pod.metadata.uid != assignment.uid:
                raise KeyError(f"pod {assignment.pod} is not the one that was decided on")

    async def _allocate(self, one: ClaimAllocation, consumers: list[Pod], written: list[ResourceClaim]) -> None:
        """Write one allocation, and add the claim as it then is to `written`."""
        claim = self._world.caches.claims.items[one.claim]
        add_finalizer = patches.finalizer(claim)
        async with self._slots:
            if add_finalizer is not None:
                claim = self._seen(await self._api.patch(CLAIMS.path_of(one.claim), add_finalizer))
            body = patches.allocate(claim.metadata.resource_version, one.allocation, consumers)
            written.append(self._seen(await self._api.patch(CLAIMS.path_of(one.claim, "status"), body)))

    async def _bind(self, bind: Bind) -> None:
        pod = self._world.caches.pods.items[bind.pod]
        if pod.spec.node_name:
            return
        body = {
            "apiVersion": "v1",
            "kind": "Binding",
            "metadata": {"name": pod.metadata.name, "namespace": pod.metadata.namespace, "uid": pod.metadata.uid},
            "target": {"apiVersion": "v1", "kind": "Node", "name": bind.node},
        }
        await self._api.create(PODS.path_of(bind.pod, "binding"), body)
        note = f"bound to {bind.node}: finished members of its group leave kube-scheduler waiting for minCount"
        await self._recorder.emit(_pod_ref(pod), "BoundByController", note, "Normal", "Bind")

    async def _take_back(self, release: Release) -> None:
        claims = [self._world.caches.claims.items[key] for key in release.claims]
        logger.warning("gang %s: taking back %d allocations it cannot use", release.gang, len(claims))
        await asyncio.gather(*(self._undo(claim) for claim in claims))

    async def _undo(self, claim: ResourceClaim) -> None:
        body = patches.deallocate(claim.metadata.resource_version)
        try:
            async with self._slots:
                self._seen(await self._api.patch(CLAIMS.path_of(claim.metadata.key, "status"), body))
        except (ApiError, UnreachableError) as error:
            logger.warning("allocation of claim %s is left to the next decision: %s", claim.metadata.key, error)

    def _seen(self, data: bytes) -> ResourceClaim:
        claim = decode(data, ResourceClaim)
        self._world.caches.claims.observe(claim)
        return claim

    async def _release(self, key: str, decision: str, node: str | None) -> None:
        """Open one pod's gate. Others may write to the pod meanwhile (labels, annotations, its status): as long as
        its spec is the one that was decided on, that is no reason to decide again."""
        pod = decided = self._world.caches.pods.items[key]
        for left in reversed(range(_RELEASE_TRIES)):
            if all(gate.name != PLACEMENT_GATE for gate in pod.spec.scheduling_gates):
                return
            try:
                async with self._slots:
                    data = await self._api.patch(PODS.path_of(key), patches.release(pod, decision, node), kind="json")
                self._world.caches.pods.observe(decode(data, Pod))
                return
            except ApiError as error:
                if not left or not error.raced or error.not_found:
                    raise
                pod = await self._api.get(PODS.path_of(key), Pod)
                if pod.metadata.uid != decided.metadata.uid or pod.terminating or pod.spec != decided.spec:
                    raise

    async def _evict(self, evict: Evict) -> None:
        logger.warning("evicting gang %s: %s", evict.gang, evict.reason.text)
        intent = {
            "decision": evict.decision,
            "gang": evict.gang,
            "reason": evict.reason.code,
            "devices": list(evict.devices),
            "started": stamp_now(),
        }
        for key in evict.jobs:
            job = self._world.caches.jobs.items[key]
            await self._patch_job(key, patches.suspend(job.metadata.resource_version, intent))
            await self._recorder.emit(
                _job_ref(job), evict.reason.code, evict.reason.text, "Warning", "SuspendAndResume"
            )
        for key in evict.pods:
            await self._evict_pod(key, evict.reason)
        await self._report(evict.gang, evict.reason)

    async def _evict_pod(self, key: str, reason: Reason) -> None:
        pod = self._world.caches.pods.items[key]
        namespace, _, name = key.rpartition("/")
        body = {
            "apiVersion": "policy/v1",
            "kind": "Eviction",
            "metadata": {"name": name, "namespace": namespace},
            "deleteOptions": {"preconditions": {"uid": pod.metadata.uid}},
        }
        await self._api.create(PODS.path_of(key, "eviction"), body)
        await self._recorder.emit(_pod_ref(pod), reason.code, reason.text, "Warning", "Evict")

    async def _resume(self, resume: Resume) -> None:
        job = self._world.caches.jobs.items[resume.job]
        await self._patch_job(resume.job, patches.resume(job.metadata.resource_version))
        logger.info("job %s resumed", resume.job)

    async def _patch_job(self, key: str, body: patches.Json) -> None:
        data = await self._api.patch(JOBS.path_of(key), body)
        self._world.caches.jobs.observe(decode(data, Job))

    async def _ensure_rule(self, driver: str) -> None:
        kind = self._world.served.taint_rules
        if kind is None:
            return
        try:
            data = await self._api.create(kind.path(), patches.taint_rule(kind.group_version, driver))
        except ApiError as error:
            if error.status != 409:
                raise
            return
        if self._world.caches.taint_rules is not None:
            self._world.caches.taint_rules.observe(decode(data, kind.type))

    async def _report(self, gang: str, reason: Reason) -> None:
        """Show the gang's one current reason as a condition and, when it changed, as an Event."""
        kind, _, key = gang.partition("/")
        placed = reason.code is ReasonCode.PLACED
        fresh = Condition(type="", status="True" if placed else "False", reason=reason.code.value, message=reason.text)
        target = self._target(kind, key)
        if target is None:
            return
        about, path, current = target
        body = patches.condition(current, fresh, stamp_now())
        if body is None:
            return
        apply = {
            "apiVersion": about.api_version,
            "kind": about.kind,
            "metadata": {"name": about.name, "namespace": about.namespace, "uid": about.uid},
            "status": {"conditions": [body]},
        }
        await self._api.patch(path, apply, kind="apply", params={"fieldManager": FIELD_MANAGER, "force": "true"})
        await self._recorder.emit(about, reason.code, reason.text, "Normal" if placed else "Warning", "Place")

    def _target(self, kind: str, key: str) -> tuple[ObjectRef, str, tuple[Condition, ...]] | None:
        """The object that carries a gang's condition; None where it is gone."""
        caches = self._world.caches
        if kind == "podgroup" and caches.pod_groups is not None:
            group: PodGroup | None = caches.pod_groups.items.get(key)
            if group is None:
                return None
            ref = ObjectRef(
                caches.pod_groups.kind.group_version,
                "PodGroup",
                group.metadata.name,
                group.metadata.namespace,
                group.metadata.uid,
            )
            return ref, caches.pod_groups.kind.path_of(key, "status"), group.status.conditions
        pod = caches.pods.items.get(key)
        if pod is None:
            return None
        return _pod_ref(pod), PODS.path_of(key, "status"), pod.status.conditions


async def _all(writes: Iterable[Coroutine[None, None, None]]) -> None:
    """Let every write end, then raise the first error there was."""
    ended = await asyncio.gather(*writes, return_exceptions=True)
    for one in ended:
        if isinstance(one, BaseException):
            raise one


def _describe(action: Action) -> str:
    subject = getattr(action, "gang", "") or getattr(action, "job", "") or getattr(action, "driver", "")
    return f"{type(action).__name__} {subject}"


def _job_ref(job: Job) -> ObjectRef:
    return ObjectRef("batch/v1", "Job", job.metadata.name, job.metadata.namespace, job.metadata.uid)


def _pod_ref(pod: Pod) -> ObjectRef:
    return ObjectRef("v1", "Pod", pod.metadata.name, pod.metadata.namespace, pod.metadata.uid)

"""Kubernetes Events (events.k8s.io/v1), with repeats of the same fact held back."""

import logging
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

from gpunode.kube.client import Api
from gpunode.kube.errors import ApiError, UnreachableError
from gpunode.model.times import stamp_micro

logger = logging.getLogger(__name__)
_REPEAT_AFTER_S = 600
_MAX_REMEMBERED = 4096
_NOTE_LIMIT = 1024


@dataclass(frozen=True)
class ObjectRef:
    """What an Event is about."""

    api_version: str
    kind: str
    name: str
    namespace: str = ""
    uid: str = ""


class Recorder:
    """Writes Events on behalf of one component. Failing to write one is logged, never raised."""

    def __init__(self, api: Api, component: str, instance: str) -> None:
        self._api = api
        self._component = component
        self._instance = instance
        self._seen: dict[tuple[ObjectRef, str, str], datetime] = {}

    async def emit(
        self,
        about: ObjectRef,
        reason: str,
        note: str,
        kind: Literal["Normal", "Warning"] = "Normal",
        action: str = "Observe",
        related: ObjectRef | None = None,
    ) -> None:
        """Write one Event unless the same was written in the last ten minutes. note is cut at 1024 characters."""
        now = datetime.now(UTC)
        key = (about, reason, note)
        last = self._seen.get(key)
        if last is not None and (now - last).total_seconds() < _REPEAT_AFTER_S:
            return
        if len(self._seen) >= _MAX_REMEMBERED:
            self._seen.clear()
        self._seen[key] = now
        namespace = about.namespace or "default"
        body = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{about.name[:200]}.{uuid.uuid4().hex[:16]}", "namespace": namespace},
            "eventTime": stamp_micro(now),
            "reportingController": f"gpunode.dev/{self._component}",
            "reportingInstance": self._instance[:128],
            "action": action,
            "reason": reason,
            "type": kind,
            "note": note[:_NOTE_LIMIT],
            "regarding": _ref(about),
        }
        if related is not None:
            body["related"] = _ref(related)
        try:
            await self._api.create(f"/apis/events.k8s.io/v1/namespaces/{namespace}/events", body)
        except (ApiError, UnreachableError) as error:
            logger.warning("could not write Event %s about %s/%s: %s", reason, about.kind, about.name, error)


def _ref(ref: ObjectRef) -> dict[str, str]:
    parts = {
        "apiVersion": ref.api_version,
        "kind": ref.kind,
        "name": ref.name,
        "namespace": ref.namespace,
        "uid": ref.uid,
    }
    return {name: value for name, value in parts.items() if value}

"""Our side of the kubelet's gRPC services, one table of method handlers a service.

The v1 and v1beta1 (v1 and v1alpha1 for health) services differ in nothing but message types, so each is built from
the module that has the types.
"""

from __future__ import annotations  # grpc classes are generic in their stubs only

import logging
from collections.abc import AsyncIterator, Sequence
from types import ModuleType
from typing import Any, Final, Protocol

import grpc
from google.protobuf.message import Message

from gpunode.kubelet.errors import ClaimError
from gpunode.kubelet.health import MESSAGE_LIMIT, HealthFeed, HealthReport
from gpunode.kubelet.prepare import Prepared
from gpunode.kubelet.proto import dra_v1_pb2, dra_v1beta1_pb2, health_v1_pb2, health_v1alpha1_pb2, registration_v1_pb2
from gpunode.kubelet.resolve import ClaimRef

logger = logging.getLogger(__name__)

# In our order of preference: the kubelet takes the first one that it knows.
SUPPORTED_VERSIONS: Final = (
    "v1.DRAPlugin",
    "v1beta1.DRAPlugin",
    "v1.DRAResourceHealth",
    "v1alpha1.DRAResourceHealth",
)

Context = grpc.aio.ServicerContext[Any, Any]


class Preparer(Protocol):
    """What answers the DRA calls: `PrepareEngine`."""

    async def prepare(self, refs: Sequence[ClaimRef]) -> dict[str, Prepared | ClaimError]: ...

    async def unprepare(self, refs: Sequence[ClaimRef]) -> dict[str, ClaimError | None]: ...


class RegistrationCallbacks(Protocol):
    """What the kubelet asks and tells over the registration socket."""

    def info(self) -> registration_v1_pb2.PluginInfo: ...

    def status(self, registered: bool, error: str) -> None: ...


def dra_handlers(preparer: Preparer) -> list[grpc.GenericRpcHandler]:
    """DRA v1 and v1beta1."""
    return [_dra(preparer, dra_v1_pb2), _dra(preparer, dra_v1beta1_pb2)]


def health_handlers(feed: HealthFeed, pool: str) -> list[grpc.GenericRpcHandler]:
    """DRA health v1 (1.37) and v1alpha1 (1.36 knows no other)."""
    return [_health(feed, pool, health_v1_pb2), _health(feed, pool, health_v1alpha1_pb2)]


def registration_handler(callbacks: RegistrationCallbacks) -> grpc.GenericRpcHandler:
    """pluginregistration v1."""
    pb = registration_v1_pb2

    async def get_info(_request: Message, _context: Context) -> Message:
        return callbacks.info()

    async def notify(request: registration_v1_pb2.RegistrationStatus, _context: Context) -> Message:
        callbacks.status(request.plugin_registered, request.error)
        return pb.RegistrationStatusResponse()

    return grpc.method_handlers_generic_handler(
        pb.DESCRIPTOR.services_by_name["Registration"].full_name,
        {
            "GetInfo": _unary(get_info, pb.InfoRequest),
            "NotifyRegistrationStatus": _unary(notify, pb.RegistrationStatus),
        },
    )


def _unary(behaviour: Any, request: type[Message]) -> grpc.RpcMethodHandler[Any, Any]:
    return grpc.unary_unary_rpc_method_handler(
        behaviour, request_deserializer=request.FromString, response_serializer=_serialize
    )


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _refs(request: Any) -> list[ClaimRef]:
    return [ClaimRef(c.namespace, c.name, c.uid) for c in request.claims]


def _dra(preparer: Preparer, pb: ModuleType) -> grpc.GenericRpcHandler:
    with_shares = "share_id" in pb.Device.DESCRIPTOR.fields_by_name

    async def prepare(request: Any, _context: Context) -> Message:
        response: Message = pb.NodePrepareResourcesResponse()
        for uid, result in (await preparer.prepare(_refs(request))).items():
            item = response.claims[uid]  # type: ignore[attr-defined]
            if isinstance(result, ClaimError):
                item.error = result.message
                continue
            for device in result:
                item.devices.add(
                    request_names=device.requests, pool_name=device.pool, device_name=device.device,
                    cdi_device_ids=device.cdi_ids, **({"share_id": device.share_id} if with_shares else {}),
                )  # fmt: skip
            item.SetInParent()
        return response

    async def unprepare(request: Any, _context: Context) -> Message:
        response: Message = pb.NodeUnprepareResourcesResponse()
        for uid, error in (await preparer.unprepare(_refs(request))).items():
            response.claims[uid].error = "" if error is None else error.message  # type: ignore[attr-defined]
        return response

    return grpc.method_handlers_generic_handler(
        pb.DESCRIPTOR.services_by_name["DRAPlugin"].full_name,
        {
            "NodePrepareResources": _unary(prepare, pb.NodePrepareResourcesRequest),
            "NodeUnprepareResources": _unary(unprepare, pb.NodeUnprepareResourcesRequest),
        },
    )


def _health(feed: HealthFeed, pool: str, pb: ModuleType) -> grpc.GenericRpcHandler:
    async def watch(_request: Message, _context: Context) -> AsyncIterator[Message]:
        async for report in feed.watch():
            yield _report_message(report, feed.timeout_s, pool, pb)

    handler = grpc.unary_stream_rpc_method_handler(
        watch,
        request_deserializer=pb.NodeWatchResourcesRequest.FromString,
        response_serializer=_serialize,
    )
    service = pb.DESCRIPTOR.services_by_name["DRAResourceHealth"].full_name
    return grpc.method_handlers_generic_handler(service, {"NodeWatchResources": handler})


def _report_message(report: HealthReport, timeout_s: float, pool: str, pb: ModuleType) -> Message:
    status = {True: pb.HEALTHY, False: pb.UNHEALTHY, None: pb.UNKNOWN}
    response: Message = pb.NodeWatchResourcesResponse(
        devices=[
            pb.DeviceHealth(
                device=pb.DeviceIdentifier(pool_name=pool, device_name=name),
                health=status[device.healthy],
                last_updated_time=report.changed,
                health_check_timeout_seconds=max(1, int(timeout_s)),
                message=device.message[:MESSAGE_LIMIT],
            )
            for name, device in sorted(report.devices.items())
        ]
    )
    return response

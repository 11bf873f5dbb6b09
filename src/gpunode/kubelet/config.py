"""Opaque configuration of claims and classes: GpuConfig and MigConfig, gpunode.dev/v1alpha1.

    apiVersion: gpunode.dev/v1alpha1
    kind: GpuConfig                  # MigConfig for partitions
    sharing:
      strategy: TimeSlicing          # None (default), TimeSlicing (GpuConfig only) or MPS
      timeSlicing: {interval: Long}  # Default, Short, Medium, Long
      mps: {activeThreadPercentage: 25, pinnedDeviceMemoryLimit: 10Gi}

Strict: an unknown field, kind or value is refused with its path, so that a typing error never means "default".
"""

import re
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Final

import msgspec

from gpunode.model.names import DOMAIN
from gpunode.model.quantity import parse
from gpunode.model.resource import AllocatedConfig

API_VERSION: Final = f"{DOMAIN}/v1alpha1"
_AT = re.compile(r" - at `\$\.?(?P<path>[^`]*)`")


class ConfigError(Exception):
    """The configuration cannot be used; the message begins with the path of the field."""


class Interval(StrEnum):
    """How long a process runs before the GPU switches to the next one, in the driver's own steps."""

    DEFAULT = "Default"
    SHORT = "Short"
    MEDIUM = "Medium"
    LONG = "Long"


class TimeSlicing(msgspec.Struct, frozen=True, tag_field="strategy", tag="TimeSlicing"):
    """Containers of the claim take turns on each GPU."""

    interval: Interval = Interval.DEFAULT


class Mps(msgspec.Struct, frozen=True, omit_defaults=True, tag_field="strategy", tag="MPS"):
    """Containers of the claim run side by side on each device.

    active_thread_percentage: of the multiprocessors, a client. pinned_memory_bytes: of device memory, a client.
    """

    active_thread_percentage: int | None = None
    pinned_memory_bytes: int | None = None


Sharing = TimeSlicing | Mps


class Config(msgspec.Struct, frozen=True):
    """A decoded configuration. sharing None: the device is used as it is."""

    kind: str
    sharing: Sharing | None = None


class _Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """Carries the codec settings only."""


class _TimeSlicing(_Strict, frozen=True):
    interval: Interval = Interval.DEFAULT


class _Mps(_Strict, frozen=True):
    active_thread_percentage: Annotated[int, msgspec.Meta(ge=1, le=100)] | None = None
    pinned_device_memory_limit: Annotated[str, msgspec.Meta(max_length=64)] | None = None


class _Strategy(StrEnum):
    NONE = "None"
    TIME_SLICING = "TimeSlicing"
    MPS = "MPS"


class _Sharing(_Strict, frozen=True):
    strategy: _Strategy
    time_slicing: _TimeSlicing | None = None
    mps: _Mps | None = None


class _Document(_Strict, frozen=True):
    api_version: str
    kind: str
    sharing: _Sharing | None = None


def decode(parameters: object, path: str = "parameters") -> Config:
    """Decode opaque parameters. Raises ConfigError naming the field below `path`."""
    try:
        document = msgspec.convert(parameters, type=_Document)
    except msgspec.ValidationError as error:
        raise ConfigError(_with_path(path, str(error))) from None
    except RecursionError:
        raise ConfigError(f"{path}: nested too deeply") from None
    if document.api_version != API_VERSION:
        raise ConfigError(f"{path}.apiVersion: {document.api_version[:80]!r} is not known; use {API_VERSION}")
    if document.kind not in ("GpuConfig", "MigConfig"):
        raise ConfigError(f"{path}.kind: {document.kind[:80]!r} is not known; use GpuConfig or MigConfig")
    return Config(document.kind, _sharing(document, f"{path}.sharing"))


def _sharing(document: _Document, path: str) -> Sharing | None:
    sharing = document.sharing
    if sharing is None:
        return None
    fields = {_Strategy.TIME_SLICING: ("timeSlicing", sharing.time_slicing), _Strategy.MPS: ("mps", sharing.mps)}
    for strategy, (name, value) in fields.items():
        if value is not None and sharing.strategy is not strategy:
            raise ConfigError(f"{path}.{name}: only with strategy {strategy}, but strategy is {sharing.strategy}")
    if sharing.strategy is _Strategy.NONE:
        return None
    if sharing.strategy is _Strategy.TIME_SLICING:
        if document.kind == "MigConfig":
            raise ConfigError(f"{path}.strategy: TimeSlicing is set for whole GPUs only; a MigConfig has None or MPS")
        return TimeSlicing((sharing.time_slicing or _TimeSlicing()).interval)
    mps = sharing.mps or _Mps()
    return Mps(mps.active_thread_percentage, _memory(mps.pinned_device_memory_limit, f"{path}.mps"))


def _memory(text: str | None, path: str) -> int | None:
    if text is None:
        return None
    try:
        value = parse(text)
    except ValueError as error:
        raise ConfigError(f"{path}.pinnedDeviceMemoryLimit: {error}") from None
    if value <= 0:
        raise ConfigError(f"{path}.pinnedDeviceMemoryLimit: must be more than 0, is {text!r}")
    return value


def _with_path(path: str, message: str) -> str:
    found = _AT.search(message)
    inner = found.group("path") if found else ""
    return f"{path}{'.' if inner else ''}{inner}: {_AT.sub('', message)}"[:512]


def sharing_for(configs: Sequence[AllocatedConfig], driver: str, request: str, *, partition: bool) -> Sharing | None:
    """The sharing that applies to a device allocated for `request` ("req" or "req/sub").

    Class before claim, and within each the last that matches wins. A configuration that names no request applies to
    the devices of its own kind only; one that names the request of a device of the other kind is an error.
    Other drivers' configurations are not looked at. Raises ConfigError.
    """
    wanted = "MigConfig" if partition else "GpuConfig"
    chosen: Config | None = None
    for index, config in _ordered(configs):
        if config.opaque is None or config.opaque.driver != driver or not _applies(config.requests, request):
            continue
        path = f"status.allocation.devices.config[{index}].opaque.parameters"
        decoded = decode(config.opaque.parameters, path)
        if decoded.kind == wanted:
            chosen = decoded
        elif config.requests:
            raise ConfigError(
                f"{path}.kind: {decoded.kind} names request {request!r}, whose device is "
                f"{'a partition' if partition else 'a whole GPU'}; use {wanted}"
            )
    return chosen.sharing if chosen else None


def _ordered(configs: Sequence[AllocatedConfig]) -> Iterable[tuple[int, AllocatedConfig]]:
    return sorted(enumerate(configs), key=lambda item: item[1].source != "FromClass")


def _applies(requests: Sequence[str], request: str) -> bool:
    return not requests or request in requests or request.partition("/")[0] in requests


def lint(document: object, driver: str) -> list[str]:
    """What is wrong with our driver's parameters in a claim, claim template or device class; empty if nothing.

    document: the object as YAML or JSON gave it. Each item begins with the path of the field.
    """
    devices = ("devices",) if _at(document, "kind") != "ResourceClaimTemplate" else ("spec", "devices")
    path = ("spec",) if _at(document, "kind") == "DeviceClass" else ("spec", *devices)
    configs = document
    for part in (*path, "config"):
        configs = _at(configs, part)
    found = []
    for index, config in enumerate(configs if isinstance(configs, list) else ()):
        opaque = _at(config, "opaque")
        if _at(opaque, "driver") == driver:
            try:
                decode(_at(opaque, "parameters"), f"{'.'.join(path)}.config[{index}].opaque.parameters")
            except ConfigError as error:
                found.append(str(error))
    return found


def _at(value: object, key: str) -> object:
    return value.get(key) if isinstance(value, dict) else None

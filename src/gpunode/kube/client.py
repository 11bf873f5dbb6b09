"""The only Kubernetes API client: typed reads, patches, watches.

The official client (`kubernetes.aio`) supplies configuration, authentication and transport; objects are decoded
with msgspec straight into the few fields that are used, which is an order of magnitude less work than its models.
"""

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import aiohttp
import msgspec
import yaml
from kubernetes.aio.client.configuration import Configuration
from kubernetes.aio.client.rest import RESTClientObject
from kubernetes.aio.config import ConfigException, load_incluster_config
from kubernetes.aio.config.kube_config import load_kube_config
from yarl import URL

from gpunode.kube.errors import ApiError, ConfigError, UnreachableError
from gpunode.model.meta import ApiStruct, ObjectMeta

logger = logging.getLogger(__name__)
T = TypeVar("T")

PatchType = Literal["merge", "json", "apply", "strategic"]
_PATCH_CONTENT: Mapping[PatchType, str] = {
    "merge": "application/merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
    "strategic": "application/strategic-merge-patch+json",
}
_REQUEST_TIMEOUT_S = 30.0
_IN_CLUSTER_TOKEN = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_MAX_LINE = 16 * 2**20
_REMEDY = "start a local cluster with `gpunode cluster up`, or name a file with --kubeconfig"


class _Status(ApiStruct, frozen=True):
    reason: str = ""
    message: str = ""
    code: int = 0


class ListMeta(ApiStruct, frozen=True):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class WatchEvent(ApiStruct, frozen=True):
    type: str
    object: msgspec.Raw


class Bookmark(ApiStruct, frozen=True):
    metadata: ObjectMeta = ObjectMeta()


async def load_configuration(kubeconfig: Path | None) -> Configuration:
    """Configuration from a file, from the pod's ServiceAccount, or from KUBECONFIG / ~/.kube/config.

    Raises ConfigError naming what was tried.
    """
    in_cluster = kubeconfig is None and _IN_CLUSTER_TOKEN.exists()
    if kubeconfig is None and not in_cluster and not any(file.exists() for file in _usual_places()):
        raise ConfigError(f"no cluster configuration: KUBECONFIG and ~/.kube/config name no file; {_REMEDY}")
    configuration = Configuration()
    try:
        if in_cluster:
            load_incluster_config(client_configuration=configuration)
        else:
            await load_kube_config(
                config_file=str(kubeconfig) if kubeconfig else None,
                client_configuration=configuration,
                persist_config=False,
            )
    except (ConfigException, OSError, yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:
        # The loader takes the file's structure for granted and fails in any of these ways where it is another.
        source = kubeconfig or " and ".join(str(file) for file in _usual_places())
        raise ConfigError(f"no cluster configuration in {source} ({error}); {_REMEDY}") from None
    return configuration


def _usual_places() -> tuple[Path, ...]:
    named = os.environ.get("KUBECONFIG") or "~/.kube/config"
    return tuple(Path(name).expanduser() for name in named.split(os.pathsep) if name)


class Api:
    """A connection to one API server. Create with `await Api.connect(...)`, close with `await api.close()`."""

    def __init__(self, configuration: Configuration, user_agent: str = "gpunode") -> None:
        self._configuration = configuration
        self._rest = RESTClientObject(configuration)
        self._user_agent = user_agent

    @classmethod
    async def connect(cls, kubeconfig: Path | None = None, user_agent: str = "gpunode") -> "Api":
        """Raises ConfigError when there is no usable configuration. Does not send anything yet."""
        return cls(await load_configuration(kubeconfig), user_agent)

    @property
    def server(self) -> str:
        return str(self._configuration.host)

    async def close(self) -> None:
        await self._rest.close()

    async def __aenter__(self) -> "Api":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def request(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        timeout_s: float = _REQUEST_TIMEOUT_S,
    ) -> bytes:
        """One request, answered whole. Raises ApiError on a refusal, UnreachableError when there is no answer."""
        timeout = aiohttp.ClientTimeout(total=timeout_s, connect=10)
        response = await self._send(method, path, body, params, content_type, timeout)
        try:
            data = await response.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(f"{method} {path}: the answer broke off ({error})") from None
        if response.status >= 300:
            raise _refusal(method, path, response.status, data)
        return data

    async def get(self, path: str, kind: type[T], params: Mapping[str, str] | None = None) -> T:
        """Read and decode one object. Raises ApiError, UnreachableError."""
        return msgspec.json.decode(await self.request("GET", path, params=params), type=kind)

    async def list(self, path: str, kind: type[T], params: Mapping[str, str] | None = None) -> tuple[list[T], str]:
        """All objects of a collection, page by page, and the resourceVersion to watch from."""
        items: list[T] = []
        query = {"limit": "500", **(params or {})}
        page_type = msgspec.defstruct("Page", [("metadata", ListMeta), ("items", list[kind])])  # type: ignore[valid-type]
        while True:
            page: Any = await self.get(path, page_type, query)
            items += page.items
            if not page.metadata.continue_:
                return items, page.metadata.resource_version
            query["continue"] = page.metadata.continue_

    async def create(self, path: str, body: object) -> bytes:
        return await self.request("POST", path, body)

    async def delete(self, path: str, body: object = None, params: Mapping[str, str] | None = None) -> None:
        await self.request("DELETE", path, body, params=params)

    async def patch(
        self, path: str, body: object, kind: PatchType = "merge", params: Mapping[str, str] | None = None
    ) -> bytes:
        """Patch one object. With "apply" the fieldManager must be in `params`."""
        return await self.request("PATCH", path, body, params=params, content_type=_PATCH_CONTENT[kind])

    async def watch(self, path: str, params: Mapping[str, str]) -> AsyncIterator[WatchEvent]:
        """Events until the server ends the watch.

        Raises ApiError (`gone` when the version is too old), UnreachableError.
        """
        query = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": "290", **params}
        timeout = aiohttp.ClientTimeout(total=None, connect=10, sock_read=310)
        response = await self._send("GET", path, None, query, "application/json", timeout)
        try:
            if response.status >= 300:
                raise _refusal("WATCH", path, response.status, await response.read())
            decoder = msgspec.json.Decoder(WatchEvent)
            async for line in _lines(response):
                event = decoder.decode(line)
                if event.type == "ERROR":
                    raise _refusal("WATCH", path, 0, bytes(event.object))
                yield event
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise UnreachableError(f"WATCH {path}: broke off ({error or type(error).__name__})") from None
        finally:
            response.close()

    async def _send(
        self,
        method: str,
        path: str,
        body: object,
        params: Mapping[str, str] | None,
        content_type: str,
        timeout: aiohttp.ClientTimeout,
    ) -> aiohttp.ClientResponse:
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": self._user_agent}
        token = await self._configuration.get_api_key_with_prefix("BearerToken", alias="authorization")
        if token:
            headers["Authorization"] = token
        url = self._configuration.host + path
        if params:
            url = str(URL(url).with_query(dict(params)))
        plain = None if body is None else msgspec.to_builtins(body)
        try:
            answer = await self._rest.request(method, url, headers, plain, _request_timeout=timeout)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            # aiohttp words a refused connection in its own terms; the system's are the ones people know.
            number = error.errno if isinstance(error, OSError) else None
            detail = os.strerror(number) if number else str(error) or type(error).__name__
            raise UnreachableError(f"{method} {path}: no answer from {self.server} ({detail})") from None
        return answer.response  # type: ignore[no-any-return]


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Newline-delimited records of any length up to 16 MiB."""
    rest = b""
    async for chunk in response.content.iter_any():
        rest += chunk
        if len(rest) > _MAX_LINE:
            raise OSError(f"a watch event is longer than {_MAX_LINE} bytes")
        *whole, rest = rest.split(b"\n")
        for line in whole:
            if line:
                yield line


def _refusal(method: str, path: str, status: int, data: bytes) -> ApiError:
    try:
        answer = msgspec.json.decode(data, type=_Status)
    except msgspec.MsgspecError:
        return ApiError(method, path, status, "Unreadable", data[:200].decode("utf-8", "replace"))
    return ApiError(method, path, answer.code or status, answer.reason, answer.message)


def decode(data: bytes, kind: type[T]) -> T:
    """The object in the answer to a write. Raises ApiError for an answer that is none: as good as no answer."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ApiError("answer", kind.__name__, 200, "Unreadable", str(error)) from None


async def reachable(api: Api) -> None:
    """Raise UnreachableError or ApiError unless the API server answers; for start-up checks."""
    async with asyncio.timeout(15):
        await api.request("GET", "/version", timeout_s=10)

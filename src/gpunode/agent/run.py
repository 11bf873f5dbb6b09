"""The node agent process: hardware and health in, slices, claims and health reports out."""

import asyncio
import logging

from gpunode.agent.inventory import DriverReplacedError, first_inventory
from gpunode.agent.machine import open_machine
from gpunode.agent.node import NodeAgent
from gpunode.agent.options import AgentOptions
from gpunode.hardware.rescan import Scanner
from gpunode.health.catalogue import CatalogueError
from gpunode.health.policy import PolicyError
from gpunode.kube.client import Api
from gpunode.kube.errors import ApiError, ConfigError, UnreachableError
from gpunode.kube.events import ObjectRef, Recorder
from gpunode.kube.kinds import NODES
from gpunode.kubelet.plugin import KubeletPaths, PluginError

logger = logging.getLogger(__name__)
EXPECTED_ERRORS = (
    ConfigError,
    UnreachableError,
    ApiError,
    PluginError,
    PolicyError,
    CatalogueError,
    DriverReplacedError,
    OSError,
)


async def run_agent(options: AgentOptions) -> None:
    """Run until cancelled. Raises one of EXPECTED_ERRORS when the agent cannot start or go on."""
    KubeletPaths(options.kubelet_dir, options.cdi_dir).prepare(options.driver)
    machine = await asyncio.to_thread(open_machine, options)
    scanner = Scanner(machine.nvml, machine.roots, options.node)
    async with await Api.connect(options.kubeconfig, "gpunode-agent") as api:
        about = await _node(api, options.node)
        recorder = Recorder(api, "agent", options.node)
        inventory = await first_inventory(scanner, recorder, about)
        logger.info("found %d GPUs, driver %s", len(inventory.gpus), inventory.driver_version or "unknown")
        await NodeAgent(options, machine, api, recorder, about, scanner, inventory).run()


async def _node(api: Api, name: str) -> ObjectRef:
    """The Node object. Raises ConfigError when it does not exist."""
    try:
        node = await api.get(NODES.path(name=name), NODES.type)
    except ApiError as error:
        if not error.not_found:
            raise
        raise ConfigError(
            f"the cluster at {api.server} has no Node {name}: name this machine's Node with --node-name, "
            "and start its kubelet first"
        ) from None
    return ObjectRef("v1", "Node", name, uid=node.metadata.uid)

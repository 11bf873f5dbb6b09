"""The node agent process: hardware and health in, slices, claims and health reports out."""

import asyncio
import logging
from collections.abc import Sequence
from typing import Literal

from gpunode.agent.claims import LiveClaims
from gpunode.agent.faults import FaultOrders
from gpunode.agent.injection import device_nodes
from gpunode.agent.inventory import first_inventory, rescan_forever
from gpunode.agent.machine import Machine, open_machine
from gpunode.agent.monitor import HealthMonitor
from gpunode.agent.options import AgentOptions
from gpunode.agent.sources import follow_kernel_log, follow_nvml
from gpunode.health.devices import device_map
from gpunode.health.machine import HealthMachine
from gpunode.health.signals import OperatorClear
from gpunode.health.state import Transition
from gpunode.kube.client import Api
from gpunode.kube.errors import ApiError, ConfigError, UnreachableError
from gpunode.kube.events import ObjectRef, Recorder
from gpunode.kube.kinds import NODES
from gpunode.kubelet.cdi import CdiStore
from gpunode.kubelet.checkpoint import CheckpointFile, Entries
from gpunode.kubelet.files import NodeLock
from gpunode.kubelet.health import DeviceReport, HealthFeed
from gpunode.kubelet.plugin import KubeletPaths, KubeletPlugin, PluginError
from gpunode.kubelet.prepare import PrepareEngine
from gpunode.kubelet.resolve import Node
from gpunode.model.faults import FaultOrder
from gpunode.model.hardware import Inventory
from gpunode.model.health import Level
from gpunode.model.resource import ResourceSlice
from gpunode.slices.planner import SliceConfig, plan
from gpunode.slices.publisher import Publisher

logger = logging.getLogger(__name__)
EXPECTED_ERRORS = (ConfigError, UnreachableError, ApiError, PluginError, OSError)


async def run_agent(options: AgentOptions) -> None:
    """Run until cancelled. Raises one of EXPECTED_ERRORS when the agent cannot start or go on."""
    machine = await asyncio.to_thread(open_machine, options)
    KubeletPaths(options.kubelet_dir, options.cdi_dir).prepare(options.driver)
    async with await Api.connect(options.kubeconfig, "gpunode-agent") as api:
        about = await _node(api, options.node)
        recorder = Recorder(api, "agent", options.instance or options.node)
        inventory = await first_inventory(machine, recorder, about)
        logger.info("found %d GPUs, driver %s", len(inventory.gpus), inventory.driver_version or "unknown")
        await _Agent(options, machine, api, recorder, about, inventory).run()


async def _node(api: Api, name: str) -> ObjectRef:
    """The Node object. Raises ApiError naming the node when it does not exist."""
    node = await api.get(NODES.path(name=name), NODES.type)
    return ObjectRef("v1", "Node", name, uid=node.metadata.uid)


class _Agent:
    """Holds the parts together: every change ends in `_publish`, which tells all readers of health the same."""

    def __init__(
        self,
        options: AgentOptions,
        machine: Machine,
        api: Api,
        recorder: Recorder,
        about: ObjectRef,
        inventory: Inventory,
    ) -> None:
        self._options = options
        self._machine = machine
        self._api = api
        self._about = about
        self._inventory = inventory
        self._look_again = asyncio.Event()
        self._slices = SliceConfig(driver=options.driver, node=options.node)
        self._recorder = recorder
        self._feed = HealthFeed()
        state = options.state_dir / "health.json"
        self._monitor = HealthMonitor(HealthMachine(), state, self._on_transitions)
        self._publisher = Publisher(api, recorder, about, options.driver, self._plan)
        paths = KubeletPaths(options.kubelet_dir, options.cdi_dir)
        self._held: frozenset[str] = frozenset()
        self._engine = PrepareEngine(
            node=Node(options.driver, options.node, inventory.boot_id),
            claims=LiveClaims(api),
            devices=lambda: device_nodes(self._inventory, machine.roots),
            checkpoint=CheckpointFile(paths.checkpoint(options.driver)),
            cdi=CdiStore(options.cdi_dir, options.driver),
            lock=NodeLock(paths.lock(options.driver)),
            changed=self._on_claims,
        )
        self._plugin = KubeletPlugin(
            options.driver,
            options.node,
            paths,
            self._engine,
            self._feed,
            on_registered=self._on_registered,
            instance=options.instance,
        )

    async def run(self) -> None:
        transitions = await asyncio.to_thread(self._monitor.start, self._inventory.boot_id, device_map(self._inventory))
        await self._engine.recover()
        self._publish()
        await self._plugin.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publisher.run())
                tasks.create_task(self._monitor.run())
                tasks.create_task(follow_kernel_log(self._machine.roots.kmsg, self._monitor))
                tasks.create_task(follow_nvml(self._machine.nvml, self._monitor))
                tasks.create_task(self._on_transitions(transitions))
                tasks.create_task(self._announce())
                tasks.create_task(self._rescan())
                if self._machine.execute is not None:
                    done = self._options.state_dir / "fault-orders-done.json"
                    orders = FaultOrders(self._api, self._recorder, self._about, done, self._execute)
                    tasks.create_task(orders.run())
        finally:
            await self._plugin.stop()

    async def _rescan(self) -> None:
        await rescan_forever(self._machine, self._options.node, self._inventory, self._look_again, self._on_hardware)

    def _on_hardware(self, inventory: Inventory) -> None:
        self._inventory = inventory
        self._monitor.use(device_map(inventory))
        self._publish()

    async def _execute(self, order: FaultOrder) -> None:
        """Carry out an order on the fake machine. A recovery is a board put right by a person, and told so."""
        if self._machine.execute is None:
            raise LookupError("this agent runs on real hardware")
        await self._machine.execute(order)
        self._look_again.set()
        if order.recover:
            await self._monitor.put(OperatorClear(device=order.device, by=f"fault order {order.id}"))

    async def _announce(self) -> None:
        await self._publisher.published.wait()
        await self._plugin.registered.wait()
        logger.info("ready: slices published, plugin registered with the kubelet")

    async def _on_registered(self) -> None:
        # A kubelet that just started has wiped the node's slices.
        self._publisher.poke()

    def _plan(self, existing: Sequence[ResourceSlice]) -> tuple[ResourceSlice, ...]:
        return plan(self._inventory, self._monitor.health, self._slices, existing, self._held)

    def _on_claims(self, entries: Entries) -> None:
        """Devices that this node has given out stay published whatever happens to them."""
        held = frozenset(device.device for entry in entries.values() for device in entry.devices)
        if held != self._held:
            self._held = held
            self._publish()

    def _publish(self) -> None:
        """Tell everyone who reads health: the slices and the kubelet."""
        health = self._monitor.health
        names = set(device_nodes(self._inventory, self._machine.roots)) | set(health.devices) | self._held
        self._feed.update(
            {
                name: DeviceReport(health.of(name).level is not Level.UNHEALTHY, health.of(name).message)
                for name in sorted(names)
            }
        )
        self._publisher.poke()

    async def _on_transitions(self, transitions: Sequence[Transition]) -> None:
        self._publish()
        self._look_again.set()
        for one in transitions:
            reason, kind = _event(one)
            logger.warning("%s %s %s: %s", one.device, one.dimension, one.change, one.message)
            await self._recorder.emit(self._about, reason, f"{one.device}: {one.message}", kind, "WatchHealth")


def _event(transition: Transition) -> tuple[str, Literal["Normal", "Warning"]]:
    """Event reason and type of something that happened to a device."""
    if transition.change == "cleared":
        return "GpuRecovered", "Normal"
    if transition.level is Level.HEALTHY:
        return "GpuNotice", "Normal"
    return ("GpuUnhealthy" if transition.level is Level.UNHEALTHY else "GpuDegraded"), "Warning"

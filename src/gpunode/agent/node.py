"""The parts of the agent on one node, put together: every change ends in `_publish`, so all readers hear the same."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence

import msgspec
from prometheus_client import CollectorRegistry

from gpunode.agent.claim_status import ClaimStatuses
from gpunode.agent.claims import LiveClaims, Lookout
from gpunode.agent.faults import FaultOrders
from gpunode.agent.inventory import HardwareWatch
from gpunode.agent.leftovers import LeftoverWatch
from gpunode.agent.libraries import DriverLibraries
from gpunode.agent.machine import Machine
from gpunode.agent.metrics import HealthCollector
from gpunode.agent.monitor import HealthMonitor
from gpunode.agent.options import AgentOptions
from gpunode.agent.sources import follow_kernel_log, follow_nvml
from gpunode.agent.succession import Succession
from gpunode.agent.voice import Voice
from gpunode.hardware.compute_mode import ComputeModes
from gpunode.hardware.nodes import device_nodes
from gpunode.hardware.partitions import MigPartitioner
from gpunode.hardware.rescan import Scanner
from gpunode.health.catalogue import load_catalogue
from gpunode.health.devices import device_map
from gpunode.health.machine import HealthMachine
from gpunode.health.policy import load_policy
from gpunode.health.signals import OperatorClear, PrepareResult
from gpunode.health.state import Transition
from gpunode.kube.client import Api
from gpunode.kube.events import ObjectRef, Recorder
from gpunode.kubelet.cdi import CdiStore
from gpunode.kubelet.checkpoint import CheckpointFile, Entries
from gpunode.kubelet.guard import BlackHoleGuard
from gpunode.kubelet.health import DeviceReport, HealthFeed
from gpunode.kubelet.lock import NodeLock
from gpunode.kubelet.metrics import KubeletMetrics
from gpunode.kubelet.mps.control import MpsDaemons
from gpunode.kubelet.plugin import KubeletPaths, KubeletPlugin
from gpunode.kubelet.prepare import PrepareEngine
from gpunode.kubelet.processes import OpenDevices
from gpunode.kubelet.reconcile import SecondLook
from gpunode.kubelet.resolve import Node
from gpunode.kubelet.sharing import Strategies
from gpunode.kubelet.timeslice import TimeSlices
from gpunode.model.faults import FaultOrder
from gpunode.model.hardware import Gpu, Inventory, device_name
from gpunode.model.health import Level
from gpunode.model.injection import DeviceNodes
from gpunode.model.names import HELD_TAINT
from gpunode.model.resource import ResourceSlice
from gpunode.monitoring import serve_metrics
from gpunode.slices.layout import SliceConfig
from gpunode.slices.planner import plan
from gpunode.slices.publisher import Publisher

logger = logging.getLogger(__name__)


class NodeAgent:
    """One node's agent, from its first inventory on."""

    def __init__(
        self,
        options: AgentOptions,
        machine: Machine,
        api: Api,
        recorder: Recorder,
        about: ObjectRef,
        scanner: Scanner,
        inventory: Inventory,
    ) -> None:
        self._options = options
        self._machine = machine
        self._api = api
        self._recorder = recorder
        self._about = about
        self._inventory = inventory
        self._in_use: frozenset[str] = frozenset()
        self._held: frozenset[str] | None = None
        self._voice = Voice(recorder, about)
        self._paths = KubeletPaths(options.kubelet_dir, options.cdi_dir)
        self._slices = SliceConfig(
            driver=options.driver,
            node=options.node,
            mode=options.mode,
            modes=options.modes,
            managed_taint=options.managed_taint,
        )
        self._registry = CollectorRegistry()
        self._feed = HealthFeed()
        policy = load_policy(options.health_policy)
        # The guard counts failures by distinct claim; what it passes on is a fault at once.
        counted = msgspec.structs.replace(policy, prepare_failures=1)
        self._guard = BlackHoleGuard(self._on_black_hole, self._on_black_hole_over, policy.prepare_failures)
        state = options.state_dir / "health.json"
        health = HealthMachine(load_catalogue(options.xid_catalogue), counted)
        self._monitor = HealthMonitor(health, state, self._on_health, self._voice.complain, self._in_charge)
        self._publisher = Publisher(api, recorder, about, options.driver, self._plan)
        self._statuses = ClaimStatuses(api, options.driver, options.node, self._in_charge)
        self._libraries = DriverLibraries(machine.libraries, self._voice.complain)
        self._engine, second_look = self._make_engine()
        processes = OpenDevices(machine.roots.proc)
        self._leftovers = LeftoverWatch(processes, self._engine.entries, lambda: self._inventory, machine.roots)
        mark = self._leftovers.mark
        self._watch = HardwareWatch(scanner, machine.nvml, inventory, self._monitor, self._on_hardware, mark)
        self._lookout = Lookout(second_look.run, self._on_held)
        self._succession = Succession(self._paths, options.driver, options.instance, self._on_succession)
        self._plugin = KubeletPlugin(
            options.driver,
            options.node,
            self._paths,
            self._engine,
            self._feed,
            on_registered=self._on_registered,
            instance=options.instance,
        )

    def _make_engine(self) -> tuple[PrepareEngine, SecondLook]:
        options, machine, paths = self._options, self._machine, self._paths
        claims = LiveClaims(self._api, options.driver, options.node)
        metrics = KubeletMetrics(self._registry)
        directory = paths.plugin_dir(options.driver)
        engine = PrepareEngine(
            node=Node(options.driver, options.node, self._inventory.boot_id),
            claims=claims,
            devices=self._device_nodes,
            checkpoint=CheckpointFile(paths.checkpoint(options.driver)),
            cdi=CdiStore(options.cdi_dir, options.driver, common=self._libraries.current),
            lock=NodeLock(paths.lock(options.driver)),
            allocated=claims.allocated,
            partitioner=self._partitioner(),
            sharing=Strategies(
                TimeSlices(directory / "timeslices", machine.run),
                MpsDaemons(directory / "mps", ComputeModes(machine.nvml)),
            ),
            notify=self._voice.notice,
            changed=self._on_claims,
            metrics=metrics,
            guard=self._guard,
        )
        look = SecondLook(engine, claims, self._voice.notice, OpenDevices(machine.roots.proc), metrics)
        return engine, look

    def _partitioner(self) -> MigPartitioner | None:
        """Makes partitions on the dynamic GPUs only: elsewhere they are an administrator's."""
        if "dynamic" not in (self._options.mode, *self._options.modes.values()):
            return None
        return MigPartitioner(self._machine.nvml, self._machine.roots, self._dynamic)

    def _dynamic(self) -> list[Gpu]:
        return [gpu for gpu in self._inventory.gpus if self._slices.mode_of(gpu) == "dynamic"]

    async def run(self) -> None:
        """Serve the node until cancelled. Raises PluginError when the kubelet cannot be served."""
        self._registry.register(HealthCollector(lambda: (self._monitor.state, self._monitor.health)))
        serve_metrics(self._registry, self._options.metrics_port, self._missing)
        transitions = await asyncio.to_thread(self._monitor.start, self._inventory.boot_id, device_map(self._inventory))
        await self._libraries.start()
        await self._engine.recover()
        self._publish()
        await self._plugin.start()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._publisher.run())
                tasks.create_task(self._monitor.run())
                tasks.create_task(self._watch.run())
                tasks.create_task(self._leftovers.run())
                tasks.create_task(follow_kernel_log(self._machine.roots.kmsg, self._monitor, self._voice.complain))
                tasks.create_task(follow_nvml(self._machine.nvml, self._monitor))
                tasks.create_task(self._on_health(transitions))
                tasks.create_task(self._succession.run())
                tasks.create_task(self._lookout.run())
                tasks.create_task(self._statuses.run())
                tasks.create_task(self._libraries.run())
                tasks.create_task(self._announce())
                if self._machine.execute is not None:
                    done = self._options.state_dir / "fault-orders-done.json"
                    orders = FaultOrders(self._api, self._recorder, self._about, done, self._execute)
                    tasks.create_task(orders.run())
                for rest in self._machine.resume(self._watch.wake):
                    tasks.create_task(rest)
        finally:
            await self._plugin.stop()
            self._engine.close()

    async def _announce(self) -> None:
        await self._publisher.published.wait()
        await self._plugin.registered.wait()
        logger.info("ready: slices published, plugin registered with the kubelet")

    async def _execute(self, order: FaultOrder) -> Coroutine[None, None, None] | None:
        """Carry out an order on the fake machine. A recovery is a board put right by a person, and told so."""
        if self._machine.execute is None:
            raise LookupError("this agent runs on real hardware")
        rest = await self._machine.execute(order, self._watch.wake)
        if order.recover:
            await self._monitor.put(OperatorClear(device=order.device, by=f"fault order {order.id}"))
        return rest

    def _device_nodes(self) -> dict[str, DeviceNodes]:
        dynamic = frozenset(device_name(gpu.pci) for gpu in self._dynamic())
        return device_nodes(self._inventory, self._machine.roots, dynamic)

    def _missing(self) -> str:
        """What keeps this agent from being ready, for the probe that a rolling update waits for."""
        # Where another agent publishes there is nothing to wait for: it may be the older of the two that does, after a
        # step of the clock, and a rolling update would wait for this one to be ready before it ends that one.
        published = self._publisher.published.is_set() or self._succession.superseded
        parts = {"slices": published, "the kubelet": self._plugin.registered.is_set()}
        return " and ".join(name for name, there in parts.items() if not there)

    def _plan(self, existing: Sequence[ResourceSlice]) -> tuple[ResourceSlice, ...] | None:
        if self._succession.superseded:
            return None
        held = _published_as_held(existing) if self._held is None else self._held
        return plan(self._inventory, self._monitor.health, self._slices, existing, self._in_use, held)

    def _publish(self) -> None:
        """Tell everyone who reads health: the slices, the kubelet, the claims."""
        health = self._monitor.health
        names = set(self._device_nodes()) | set(health.devices) | self._in_use
        reports = {
            name: DeviceReport(health.of(name).level is not Level.UNHEALTHY, health.of(name).message)
            for name in sorted(names)
        }
        self._feed.update(reports)
        self._statuses.update(health=reports)
        self._publisher.poke()

    async def _on_registered(self) -> None:
        # A kubelet that just started has wiped the node's slices.
        self._publisher.poke()

    def _on_succession(self) -> None:
        """Another agent came or left: what it did meanwhile is news to us."""
        self._statuses.forget()
        self._publisher.poke()
        self._lookout.wake()

    def _on_hardware(self, inventory: Inventory) -> None:
        if inventory.driver_version != self._inventory.driver_version:
            self._libraries.wake()
        self._inventory = inventory
        self._monitor.use(device_map(inventory))
        self._publish()

    def _on_claims(self, entries: Entries) -> None:
        """Devices that this node has given out stay published whatever happens to them."""
        self._statuses.update(entries)
        self._lookout.called(entries)
        in_use = frozenset(device.device for entry in entries.values() for device in entry.devices)
        if in_use != self._in_use:
            self._in_use = in_use
            self._publish()

    def _on_held(self, held: frozenset[str]) -> None:
        """Devices that no claim has but the node has not let go of are nobody's to be given."""
        self._held = held
        self._publisher.poke()

    async def _on_health(self, transitions: Sequence[Transition]) -> None:
        """Returns at once: health goes on whether or not the API server answers."""
        self._publish()
        for one in transitions:
            logger.warning("%s %s %s: %s", one.device, one.dimension, one.change, one.message)
        if self._in_charge():
            self._voice.health(transitions)

    def _on_black_hole(self, device: str, message: str) -> None:
        self._voice.later(self._monitor.put(PrepareResult(device, message)))

    def _on_black_hole_over(self, device: str) -> None:
        self._voice.later(self._monitor.put(PrepareResult(device)))

    def _in_charge(self) -> bool:
        return not self._succession.superseded


def _published_as_held(slices: Sequence[ResourceSlice]) -> frozenset[str]:
    """What the agent before us had found: until we have looked ourselves, its word stands."""
    return frozenset(d.name for s in slices for d in s.spec.devices if any(t.key == HELD_TAINT for t in d.taints))

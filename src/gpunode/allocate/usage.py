"""What is in use: devices, shares of devices, and counters. Mutable, with exact inverses."""

from collections.abc import Iterable, Mapping

from gpunode.allocate.pools import DeviceId, Pool, PoolDevice, result_id
from gpunode.model.quantity import parse_milli
from gpunode.model.resource import AllocationResult


class Usage:
    """Counts what claims hold; every `take` has a `give` that restores the state exactly.

    Counters are counted only for devices that are still published, as kube-scheduler does.
    """

    def __init__(self, pools: Mapping[tuple[str, str], Pool], results: Iterable[AllocationResult] = ()) -> None:
        self._pools = pools
        self._published: dict[tuple[str, str], dict[str, PoolDevice]] = {}
        self.held: dict[DeviceId, int] = {}
        self._shares: dict[DeviceId, int] = {}
        self._consumed: dict[DeviceId, dict[str, int]] = {}
        self._counters: dict[tuple[str, str], dict[tuple[str, str], int]] = {}
        for result in results:
            self.take_result(result)

    def take_result(self, result: AllocationResult) -> None:
        self._result(result, 1)

    def give_result(self, result: AllocationResult) -> None:
        self._result(result, -1)

    def _result(self, result: AllocationResult, sign: int) -> None:
        if result.admin_access:
            return
        id_ = result_id(result)
        key = (id_.driver, id_.pool)
        pool = self._pools.get(key)
        device = None
        if pool is not None and pool.counters:
            published = self._published.get(key)
            if published is None:
                published = self._published[key] = {d.id.device: d for d in pool.devices}
            device = published.get(id_.device)
        shared = result.consumed_capacity if result.share_id is not None else None
        self._change(id_, device, shared, sign)

    def take(self, device: PoolDevice, consumed: Mapping[str, str] | None) -> None:
        """Take a device: whole, or (with `consumed`) one share of it."""
        self._change(device.id, device, consumed, 1)

    def give(self, device: PoolDevice, consumed: Mapping[str, str] | None) -> None:
        self._change(device.id, device, consumed, -1)

    def _change(self, id_: DeviceId, device: PoolDevice | None, consumed: Mapping[str, str] | None, sign: int) -> None:
        table = self.held if consumed is None else self._shares
        before = table.get(id_, 0)
        after = before + sign
        if after:
            table[id_] = after
        else:
            del table[id_]
        if consumed:
            amounts = self._consumed.setdefault(id_, {})
            for name, text in consumed.items():
                amounts[name] = amounts.get(name, 0) + sign * parse_milli(text)
        # A device consumes its counters once, however many hold it.
        if device is not None and device.counters and (before == 0 or after == 0):
            counters = self._counters.setdefault((id_.driver, id_.pool), {})
            for key, amount in device.counters:
                counters[key] = counters.get(key, 0) + sign * amount

    def free(self, device: PoolDevice, consumed: Mapping[str, str] | None, beside: bool = False) -> bool:
        """Whether the device can be given: whole, or (with `consumed`) one more share of it.

        beside: also where somebody has it whole.
        """
        id_ = device.id
        if id_ in self.held and not beside:
            return False
        if consumed is None:
            return id_ not in self._shares and (not device.counters or self._counters_left(device))
        if id_ not in self._shares:
            return not device.counters or self._counters_left(device)
        used = self._consumed.get(id_, {})
        return all(
            used.get(name, 0) + parse_milli(text) <= parse_milli(device.device.capacity[name].value)
            for name, text in consumed.items()
        )

    def shares(self, device: PoolDevice) -> tuple[object, ...]:
        """What is shared out of a device, as a comparable value."""
        used = self._consumed.get(device.id, {})
        return (self._shares.get(device.id, 0), tuple(sorted(item for item in used.items() if item[1])))

    def _counters_left(self, device: PoolDevice) -> bool:
        key = (device.id.driver, device.id.pool)
        used, total = self._counters.get(key, {}), self._pools[key].counters
        return all(used.get(counter, 0) + amount <= total[counter] for counter, amount in device.counters)

"""decide(): from a snapshot to actions. Pure and deterministic; all of the placement side is behind it."""

from datetime import datetime

from gpunode.gang.admit import admit
from gpunode.gang.blast import alarm
from gpunode.gang.board import Board
from gpunode.gang.derived import Derived, View
from gpunode.gang.faults import react, resumes
from gpunode.gang.gangs import GangState, find_gangs
from gpunode.gang.quorum import bindings
from gpunode.gang.settled import afterwards
from gpunode.model.gang import Action, Config, EnsureTaintRule, Reason, ReasonCode, Report, Snapshot
from gpunode.model.names import MANAGED_TAINT
from gpunode.model.resource import DeviceTaintRule


class Decider:
    """decide() with memory of values that depend only on unchanged objects.

    Gives the same answers as `decide`, faster, when successive snapshots share objects. Not safe for use by several
    threads at once.
    """

    def __init__(self) -> None:
        self._derived = Derived()

    def decide(self, snapshot: Snapshot, now: datetime, config: Config) -> tuple[Action, ...]:
        """See the function of the same name."""
        view = self._derived.begin(snapshot, config)
        actions: list[Action] = [EnsureTaintRule(d) for d in missing_rules(snapshot, view, config)]
        actions += resumes(snapshot)
        states = find_gangs(snapshot, self._derived.owners(snapshot, view, config))
        board = Board(snapshot, self._derived, view)
        stopped: set[str] = set()
        notes: dict[str, Reason] = {}
        failures = alarm(view, config, now)
        for state in states:
            reaction = react(board, state, now, failures)
            if reaction.action is not None:
                actions.append(reaction.action)
                stopped.add(state.gang.key)
            elif reaction.note is not None:
                notes[state.gang.key] = reaction.note
        for state in states:
            if state.gang.key not in stopped:
                actions += _turn(board, state, notes.get(state.gang.key), now, config)
        return tuple(actions)


def decide(snapshot: Snapshot, now: datetime, config: Config) -> tuple[Action, ...]:
    """What to do about a snapshot: taint rules, resumed Jobs, faults, then the queue.

    The queue is strict in order (priority, then age, then name) but not in blocking: a gang that does not fit lets
    later, smaller ones pass, so a stream of small gangs can delay a large one without bound. Reservations are what
    bounds that; they are not part of this version.
    """
    return Decider().decide(snapshot, now, config)


def _turn(board: Board, state: GangState, note: Reason | None, now: datetime, config: Config) -> list[Action]:
    """One gang's turn in the queue. note: what is to be said of it unless it waits for something."""
    actions: list[Action] = [*bindings(board, state)]
    if state.waiting:
        outcome = admit(board, state, now)
        actions += [action for action in (outcome.release, outcome.place) if action is not None]
        reason = outcome.reason
    else:
        reason = afterwards(state, board.snapshot, now, config)
    if note is not None and (reason is None or reason.code is ReasonCode.PLACED):
        reason = note
    if reason is not None:
        actions.append(Report(state.gang.key, reason))
    return actions


def missing_rules(snapshot: Snapshot, view: View, config: Config) -> tuple[str, ...]:
    """Drivers whose devices nothing keeps kube-scheduler off: no rule, and not all slices carry the taint."""
    ruled = {d for rule in snapshot.taint_rules.values() for d in config.drivers if keeps_off(rule, d)}
    missing: list[str] = []
    for driver in sorted(config.drivers - ruled):
        devices = [d for (name, _), pool in view.pools.items() if name == driver for d in pool.devices]
        if not devices or not all(d.managed for d in devices):
            missing.append(driver)
    return tuple(missing)


def keeps_off(rule: DeviceTaintRule, driver: str) -> bool:
    """Whether a rule puts the managed taint on all devices of a driver."""
    selector, taint = rule.spec.device_selector, rule.spec.taint
    return (
        taint.key == MANAGED_TAINT
        and taint.effect == "NoSchedule"
        and selector is not None
        and selector.driver in (None, driver)
        and selector.pool is None
        and selector.device is None
    )

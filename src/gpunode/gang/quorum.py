"""Members that kube-scheduler will never bind, although they have their place.

It waits until as many pods of a native PodGroup as minCount are alive, and finished ones do not count: once one
member has succeeded, a re-created sibling waits for ever (kubernetes/kubernetes#142330; seen on 1.37.2).
"""

from gpunode.gang.board import Board, location
from gpunode.gang.gangs import GangState, Stage
from gpunode.model.gang import Bind


def bindings(board: Board, state: GangState) -> tuple[Bind, ...]:
    """Binds for the released members of a group that is complete only with its finished members.

    Everywhere else kube-scheduler binds. The node must still take the pod as it would have for kube-scheduler.
    """
    gang = state.gang
    alive = len(state.members)
    if not gang.key.startswith("podgroup/") or not alive < gang.min_count <= alive + gang.finished:
        return ()
    if state.waiting:
        return ()
    found = []
    for member in state.members:
        node = location(member.pod, board.snapshot)
        if member.stage is Stage.RELEASED and not member.foreign_gates and node and board.stays(member.pod, node):
            found.append(Bind(gang.key, member.key, node))
    return tuple(found)

"""Node selectors, as node affinity and devices that are not on one node use them.

Source of the meaning: k8s.io/component-helpers/scheduling/corev1/nodeaffinity.
"""

from gpunode.model.core import Node
from gpunode.model.resource import NodeSelector, NodeSelectorRequirement, NodeSelectorTerm


def matches_node(selector: NodeSelector, node: Node) -> bool:
    """Whether any term matches; a term without requirements matches nothing."""
    return any(_term(term, node) for term in selector.node_selector_terms)


def pinned_node(selector: NodeSelector | None) -> str:
    """The node that a selector of exactly one `matchFields metadata.name In [node]` names, or ""."""
    if selector is None or len(selector.node_selector_terms) != 1:
        return ""
    for requirement in selector.node_selector_terms[0].match_fields:
        if requirement.key == "metadata.name" and requirement.operator == "In" and len(requirement.values) == 1:
            return requirement.values[0]
    return ""


def node_selector(node: str) -> NodeSelector:
    """The exact shape that lets the node's own driver write claim status (one term, one field)."""
    field = NodeSelectorRequirement(key="metadata.name", operator="In", values=(node,))
    return NodeSelector(node_selector_terms=(NodeSelectorTerm(match_fields=(field,)),))


def _term(term: NodeSelectorTerm, node: Node) -> bool:
    if not term.match_expressions and not term.match_fields:
        return False
    labels = node.metadata.labels
    return all(_requirement(r, labels.get(r.key)) for r in term.match_expressions) and all(
        r.key == "metadata.name" and _requirement(r, node.metadata.name) for r in term.match_fields
    )


def _requirement(requirement: NodeSelectorRequirement, value: str | None) -> bool:
    operator, values = requirement.operator, requirement.values
    if operator in ("In", "NotIn"):
        return (value is not None and value in values) == (operator == "In")
    if operator in ("Exists", "DoesNotExist"):
        return (value is not None) == (operator == "Exists")
    if operator in ("Gt", "Lt") and value is not None and len(values) == 1:
        try:
            left, right = int(value), int(values[0])
        except ValueError:
            return False
        return left > right if operator == "Gt" else left < right
    return False

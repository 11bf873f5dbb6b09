"""Pictures of a node: a tree and a distance table for terminals, an SVG for everything else."""

from collections.abc import Sequence
from xml.sax.saxutils import escape

from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from gpunode.model.hardware import Gpu, Inventory, Nic
from gpunode.slices.describe import nvlink_domains

_STYLES = {"NV": "green", "ROOT": "cyan", "NODE": "yellow", "SYS": "dim"}
_LEGEND = "NV<n> n NVLinks   ROOT same PCIe root   NODE same NUMA node   SYS across NUMA nodes   ? not known"


def placement_tree(inventory: Inventory) -> Tree:
    """NUMA nodes, in them PCIe roots, in them GPUs and network devices; then the NVLink domains."""
    tree = Tree(f"[bold]{inventory.node}[/bold]")
    for numa, roots in _places(inventory).items():
        branch = tree.add("NUMA node " + ("unknown" if numa is None else str(numa)))
        for root, found in roots.items():
            stem = branch.add(f"PCIe {root or 'root unknown'}")
            for device in found:
                stem.add(_label(inventory, device))
    groups = _domains(inventory)
    links = tree.add("NVLink") if any(gpu.links for gpu in inventory.gpus) else None
    for domain, gpus in groups.items() if links else ():
        names = ", ".join(_short(inventory, gpu) for gpu in gpus)
        if links is not None:
            links.add(Text(f"{domain}: {names}"))
    return tree


def distance_table(inventory: Inventory) -> Table:
    """How far each GPU is from each GPU and network device."""
    others: list[Gpu | Nic] = [*inventory.gpus, *inventory.nics]
    table = Table("", *(_short(inventory, device) for device in others), box=None, pad_edge=False)
    for gpu in inventory.gpus:
        cells = [Text("X") if device is gpu else _distance_text(gpu, device) for device in others]
        table.add_row(_short(inventory, gpu), *cells)
    return table


def legend() -> Text:
    return Text(_LEGEND, style="dim")


def distance(gpu: Gpu, other: Gpu | Nic) -> str:
    """NV<n>, ROOT, NODE, SYS or ?: the nearest thing the two share."""
    if isinstance(other, Gpu) and other.uuid in gpu.nvlink_peers:
        direct = sum(link.active and link.peer == other.uuid for link in gpu.links)
        return f"NV{direct or sum(link.active for link in gpu.links)}"
    if gpu.pcie_root and gpu.pcie_root == other.pcie_root:
        return "ROOT"
    if gpu.numa_node is None or other.numa_node is None:
        return "?"
    return "NODE" if gpu.numa_node == other.numa_node else "SYS"


def _distance_text(gpu: Gpu, other: Gpu | Nic) -> Text:
    found = distance(gpu, other)
    return Text(found, style=_STYLES.get(found.rstrip("0123456789"), ""))


def _places(inventory: Inventory) -> dict[int | None, dict[str, list[Gpu | Nic]]]:
    """Devices by NUMA node and PCIe root, both in order; the unknown node last."""
    found: list[Gpu | Nic] = [*inventory.gpus, *inventory.nics]
    numas = sorted({d.numa_node for d in found}, key=lambda n: (n is None, n))
    places: dict[int | None, dict[str, list[Gpu | Nic]]] = {}
    for numa in numas:
        here = sorted((d for d in found if d.numa_node == numa), key=lambda d: (d.pcie_root, str(d.pci)))
        places[numa] = {
            root: [d for d in here if d.pcie_root == root] for root in dict.fromkeys(d.pcie_root for d in here)
        }
    return places


def _domains(inventory: Inventory) -> dict[str, list[Gpu]]:
    domains = nvlink_domains(inventory)
    groups: dict[str, list[Gpu]] = {}
    for gpu in inventory.gpus:
        groups.setdefault(domains.get(gpu.uuid, f"fabric {gpu.fabric.state}"), []).append(gpu)
    return groups


def _short(inventory: Inventory, device: Gpu | Nic) -> str:
    """GPU0, GPU1 in PCI order; network devices by RDMA name."""
    if isinstance(device, Gpu):
        return f"GPU{inventory.gpus.index(device)}"
    return device.rdma or f"NIC{inventory.nics.index(device)}"


def _label(inventory: Inventory, device: Gpu | Nic) -> Text:
    text = Text(f"{_short(inventory, device)} {device.pci}")
    if isinstance(device, Gpu):
        text.append(f" {device.product}")
        down = sum(not link.active for link in device.links)
        if down:
            text.append(f"  {down} of {len(device.links)} NVLinks down", style="red")
    return text


# SVG: NUMA nodes side by side, PCIe roots as frames in them; NVLink above as one bar a domain.

_BOX_W, _BOX_H, _GAP, _TOP = 132, 44, 10, 96
_GPU_FILL, _NIC_FILL, _DEAD, _LINK = "#76b900", "#4a90d9", "#d0021b", "#5d8a00"


def svg_picture(inventory: Inventory) -> str:
    """A picture of the node as an SVG document; colours work on light and dark grounds."""
    boxes, frames, width, height = _layout(inventory)
    parts = [*frames, *_bars(inventory, boxes)]
    parts += [_device_box(inventory, device, x, y) for device, (x, y) in boxes]
    parts.append(_text(_GAP, height - 12, f"{inventory.node}   driver {inventory.driver_version or 'unknown'}", 12))
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    style = 'font-family="sans-serif" font-size="11" fill="#333"'
    ground = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return f"{head} {style}>\n{ground}\n" + "\n".join(parts) + "\n</svg>\n"


Boxes = list[tuple[Gpu | Nic, tuple[int, int]]]


def _layout(inventory: Inventory) -> tuple[Boxes, list[str], int, int]:
    """Positions of devices, frames of roots and NUMA nodes, and the size of it all. In a root the GPUs stand in one
    row, so that each is reached from above, and the network devices in another below."""
    bottom = _TOP + 44 + 2 * (_BOX_H + _GAP)
    boxes: Boxes = []
    frames: list[str] = []
    x = _GAP
    for numa, roots in _places(inventory).items():
        column = x + _GAP
        inner: list[str] = []
        for root, found in roots.items():
            rows: tuple[list[Gpu | Nic], ...] = tuple([d for d in found if isinstance(d, kind)] for kind in (Gpu, Nic))
            wide = max(len(row) for row in rows) * (_BOX_W + _GAP) + _GAP
            inner += [
                _rect(column, _TOP + 24, wide, bottom - _TOP - 24, "#f4f4f4", "#ccc"),
                _text(column + 8, _TOP + 38, root or "PCIe root unknown", 10),
            ]
            for level, row in enumerate(rows):
                y = _TOP + 44 + level * (_BOX_H + _GAP)
                boxes += [(d, (column + _GAP + i * (_BOX_W + _GAP), y)) for i, d in enumerate(row)]
            column += wide + _GAP
        name = "NUMA node " + ("unknown" if numa is None else str(numa))
        frames += [_rect(x, _TOP, column - x, bottom - _TOP + _GAP, "none", "#999"), _text(x + 8, _TOP + 15, name, 12)]
        x, frames = column + _GAP, frames + inner
    return boxes, frames, max(x, 320), bottom + _GAP + 36


def _bars(inventory: Inventory, boxes: Boxes) -> list[str]:
    """One bar a NVLink domain with a line to each of its GPUs; a GPU without a link that is up has none."""
    places = {device.uuid: place for device, place in boxes if isinstance(device, Gpu)}
    parts: list[str] = []
    linked = {n: [g for g in gpus if any(link.active for link in g.links)] for n, gpus in _domains(inventory).items()}
    for level, (name, gpus) in enumerate((n, gpus) for n, gpus in linked.items() if gpus):
        y = _TOP - 24 - 16 * (level % 4)
        xs = [places[g.uuid][0] + _BOX_W // 2 for g in gpus]
        left, right = min(xs), max(xs)
        parts.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" stroke="{_LINK}" stroke-width="5"/>')
        parts.append(_text(left, y - 6, f"NVLink domain {name}", 10))
        parts += [_line(x, y, places[g.uuid][1], g) for x, g in zip(xs, gpus, strict=True)]
    return parts


def _line(x: int, top: int, bottom: int, gpu: Gpu) -> str:
    active = sum(link.active for link in gpu.links)
    whole = active == len(gpu.links)
    dash = "" if whole else ' stroke-dasharray="4 3"'
    return (
        f'<line x1="{x}" y1="{top}" x2="{x}" y2="{bottom}" stroke="{_LINK if whole else _DEAD}" '
        f'stroke-width="2"{dash}><title>{active} of {len(gpu.links)} NVLinks are up</title></line>'
    )


def _device_box(inventory: Inventory, device: Gpu | Nic, x: int, y: int) -> str:
    lines = [_short(inventory, device), str(device.pci)]
    fill, stroke = _NIC_FILL, _NIC_FILL
    if isinstance(device, Gpu):
        dead = bool(device.links) and not any(link.active for link in device.links)
        fill, stroke = _GPU_FILL, _DEAD if dead else _GPU_FILL
        active = sum(link.active for link in device.links)
        lines[0] += f"  {active}/{len(device.links)} NVLinks" if device.links else ""
    return _rect(x, y, _BOX_W, _BOX_H, fill, stroke) + _lines(x + 8, y + 18, lines)


def _lines(x: int, y: int, lines: Sequence[str]) -> str:
    return "".join(_text(x, y + 16 * i, line, 11, "#fff") for i, line in enumerate(lines))


def _rect(x: int, y: int, width: int, height: int, fill: str, stroke: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" '
        f'fill="{fill}" stroke="{stroke}" stroke-width="2"/>'
    )


def _text(x: int, y: int, text: str, size: int, fill: str = "#333") -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{fill}">{escape(text)}</text>'

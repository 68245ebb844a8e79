"""Describes buffers that a network writes in its forward pass, as spectral_norm does.

A buffer is read once, by a node of its own, and its new value is one of the graph's (``updates``):

    u --read--> normalize(W v) --> ...          updates: {u: normalize}
                     '--> sigma --> W / sigma --> conv

Parameters change between steps only. So a value that comes from parameters and buffers alone
follows from how many microbatches one process has computed before (``parallel.buffer_states``).
What depends on the images is refused: another layout would see other parts of them.
"""

from __future__ import annotations

from hires.core.errors import ConfigError
from hires.plan.graph import INPUT, Graph, Node, Parameter, ancestors, renamed
from hires.plan.operators.operator_table import updates_statistics

READ = "clone.default"
"""Operator of the node that reads a buffer: what it returns is not the buffer's memory."""
_MAY = (
    "hires keeps the running statistics of norms, and buffers whose new values come without "
    "gradients from parameters and buffers alone, as those of spectral_norm"
)


def written(name: str, why: str = "") -> ConfigError:
    """Returns the error of a forward pass that changes a parameter, or a buffer in another way."""
    return ConfigError(
        f"the network's forward pass writes to {name}{why}; {_MAY}: compute the rest without "
        f"writing to parameters or buffers"
    )


def with_reads(nodes: list[Node], updates: dict[str, str], facts: dict[str, Parameter]) -> set[str]:
    """Adds a node to each buffer that is updated, which all its readers read instead.

    Returns the names of these nodes.
    """
    added = set()
    for name, value in updates.items():
        readers = [index for index, node in enumerate(nodes) if name in node.params]
        maker = next((i for i, node in enumerate(nodes) if node.name == value), 0)
        args = {"self": {"param": name}, "memory_format": None}
        taken = {node.name for node in nodes}
        own = next(n for i in range(len(taken) + 1) if (n := f"{name}.read{'_' * i}") not in taken)
        for index in readers:
            nodes[index] = renamed(nodes[index], {}, {name: own})
        fact = facts[name]
        read = Node(own, READ, args, fact.shape, fact.dtype, name.rpartition(".")[0])
        nodes.insert(min([maker, *readers]), read)
        added.add(own)
    return added


def constant_updates(
    nodes: list[Node], updates: dict[str, str], facts: dict[str, Parameter]
) -> set[str]:
    """Returns the buffers that nothing reads, with a table that depends on nothing but shapes.

    Each call makes the same.
    """
    by_name = {node.name: node for node in nodes}
    read = {name for node in nodes for name in node.params}
    found = set()
    for buffer, value in updates.items():
        sources = ancestors(by_name, value)
        inputs = {p for one in sources if one in by_name for p in by_name[one].params}
        varies = INPUT in sources or not all(facts[name].is_constant for name in inputs)
        if buffer not in read and not varies:
            found.add(buffer)
    return found


def check_updates(graph: Graph) -> None:
    """Raises ConfigError if a layout could not update a buffer as one process does."""
    for node in filter(updates_statistics, graph.nodes):
        for name in ("running_mean", "running_var"):
            if "param" not in node.args[name]:
                raise written(f"{node.layer}.{name}", ", which a norm updates, too")
    for buffer, value in graph.updates.items():
        shape = graph.params[buffer].shape
        if value in graph.of_images:
            raise written(buffer, " what it computes from the images")
        if graph.needs_grad(value):
            raise written(buffer, " with gradients, which reach into the next call")
        if graph.shape(value) != shape:
            raise written(buffer, f" values of shape {graph.shape(value)}, where it has {shape}")
        if any(graph.by_name[one].seeded for one in ancestors(graph.by_name, value)):
            raise written(buffer, " random numbers")

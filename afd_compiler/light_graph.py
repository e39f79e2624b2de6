"""A torch.fx graph to which nodes are added quickly."""

from typing import Any

from torch import fx


class LightGraph(fx.Graph):
    """fx's graph, whose own way to add a node spends most of its time on a pretty name and a look at all arguments."""

    def create_node(
        self, op: str, target: Any, args: Any = None, kwargs: Any = None, name: Any = None, type_expr: Any = None
    ) -> fx.Node:
        node = fx.Node(self, f"_{self._len}", op, target, args or (), kwargs or {}, type_expr)
        self._insert(node)
        self._find_nodes_lookup_table.insert(node)
        self._len += 1
        return node

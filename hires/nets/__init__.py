"""Networks as plain ``nn.Module``s, and the tracing of any network to a graph."""

from hires.nets import custom, resnet
from hires.nets.registry import NETS

__all__ = ["NETS", "custom", "resnet"]

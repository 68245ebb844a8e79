"""Networks as plain ``nn.Module``s, and the tracing of any network to a graph."""

from hires.nets import amoebanet, custom, edsr, inception_bn, mpi4dl_resnet, resnet, unet
from hires.nets.build_network import NETS

__all__ = [
    "NETS",
    "amoebanet",
    "custom",
    "edsr",
    "inception_bn",
    "mpi4dl_resnet",
    "resnet",
    "unet",
]

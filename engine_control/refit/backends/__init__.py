"""The transports, one file each, both ends of the wire in it. The file's name is what a request calls it by."""

from engine_control.refit.backends.base import TransportContext, WeightItem, WeightTransport, transports

__all__ = ["TransportContext", "WeightItem", "WeightTransport", "transports"]

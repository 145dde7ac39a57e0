"""Which transport an EP group has."""

from weakref import WeakValueDictionary

from sonic_ep.dispatch.all_to_all import AllToAllTransport
from sonic_ep.dispatch.local import LocalTransport
from sonic_ep.dispatch.protocol import Transport
from sonic_ep.groups import EPGroup

_IN_USE: WeakValueDictionary[str, AllToAllTransport] = WeakValueDictionary()


def transport_type(group: EPGroup) -> type[LocalTransport] | type[AllToAllTransport]:
    """None for one rank, all-to-all for more."""
    return LocalTransport if group.size == 1 else AllToAllTransport


def transport_for(group: EPGroup) -> Transport:
    """The transport of a group, one object for all who use the group's ranks."""
    if transport_type(group) is LocalTransport:
        return LocalTransport()
    transport = _IN_USE.get(group.name)
    # A name can come back after torch.distributed has been initialised anew.
    if transport is None or transport.group.process_group is not group.process_group:
        transport = _IN_USE[group.name] = AllToAllTransport(group)
    return transport

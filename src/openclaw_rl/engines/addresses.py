"""Addresses and interfaces of this machine."""

import contextlib
import fcntl
import os
import socket
import struct
import sys

LOOPBACK = {"darwin": "lo0"}.get(sys.platform, "lo")
#: Linux's request for the address of an interface.
SIOCGIFADDR = 0x8915
#: A struct ifreq: the interface's name, and a socket address whose last four bytes of eight are the IPv4 address.
REQUEST = "256s"


def address_of(descriptor: int) -> str:
    """The address of this end of a connection."""
    with socket.socket(fileno=os.dup(descriptor)) as end:
        return str(end.getsockname()[0])


def interface_of(host: str) -> str:
    """The name of the interface with this IPv4 address; empty if it cannot be found."""
    if host.startswith("127."):
        return LOOPBACK
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack(REQUEST, name.encode()))
                if socket.inet_ntoa(answer[20:24]) == host:
                    return name
    return ""

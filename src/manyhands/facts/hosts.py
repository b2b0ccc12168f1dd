"""Network addresses as people read and write them."""

from __future__ import annotations

import ipaddress


def host_and_port(host: str, port: int) -> str:
    """Return '192.168.1.5:7077' or '[fd00::5]:7077': the brackets keep an IPv6 address apart from the port."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def plain_host(host: str) -> str:
    """Return one spelling for an address, whichever kind of socket reports it: '::ffff:192.168.1.5' is
    '192.168.1.5'. A name stays as it is."""
    address_text, percent, scope = host.strip("[]").partition("%")
    try:
        address = ipaddress.ip_address(address_text)
    except ValueError:
        return host
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address) + (percent + scope if mapped is None else "")

"""Addresses of the meta servers of a job: one ``HOST:PORT``, or several that share a store."""

from __future__ import annotations

from awex_core.errors import ConfigError


def split_addresses(text: str) -> list[str]:
    """The addresses in ``HOST:PORT`` or ``HOST:PORT,HOST:PORT``, in that order.

    Raises:
        ConfigError: one of them is something else.
    """
    addresses = [address.strip() for address in text.split(",")]
    for address in addresses:
        if address.count(":") > 1 and not address.startswith("[") and "/" not in address:
            raise ConfigError(
                f"meta server address {address!r}: an IPv6 address stands in brackets before its port, for example"
                " [::1]:8900"
            )
        host, _, port = address.rpartition(":")
        number = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 1 << 16
        if not host or "/" in address or not number:
            raise ConfigError(
                f"meta server address {address!r} is not HOST:PORT, for example 127.0.0.1:8900;"
                " several that share a store are separated by commas"
            )
    return addresses

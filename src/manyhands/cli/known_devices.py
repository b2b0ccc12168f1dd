"""`manyhands devices revoke`, `forget`, `allow`, `log`, `new-token`, `run-token`: who has joined, and their keys."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from manyhands.cli.options import Json

if TYPE_CHECKING:
    from manyhands.runtime.device_book import DeviceBook

Name = Annotated[str, typer.Argument(metavar="NAME", help="Of one that has joined, or its fingerprint.")]
MOST_LINES = 1000


def _book() -> DeviceBook:
    from manyhands.runtime.device_book import DeviceBook
    from manyhands.runtime.shared_token import config_folder

    return DeviceBook(config_folder())


def _record(event: str, name: str, key: str) -> None:
    from manyhands.runtime.audit import AuditLog
    from manyhands.runtime.shared_token import config_folder

    AuditLog(config_folder()).record(event, name=name, key=key)


def revoke(name: Name) -> None:
    """Keep a device out from now on, with the token or without; if it is connected, it is disconnected within
    seconds."""
    device = _book().revoke(name)
    _record("revoked", name, device.fingerprint)
    typer.echo(f"{', '.join(device.names)} is kept out: the key {device.fingerprint} is revoked.")
    typer.echo("If someone who has it also knows the token: manyhands devices new-token")
    typer.echo(f"To let it join again, with the token: manyhands devices forget {device.name}")


def forget(name: Name) -> None:
    """Delete what is stored about a device: it may join again with the token, also under a new key."""
    device = _book().forget(name)
    _record("forgotten", name, device.fingerprint)
    typer.echo(f"{', '.join(device.names)} is forgotten: it may join again with the token.")


def allow(
    name: Name,
    role: Annotated[str, typer.Argument(metavar="ROLE", help="coordinator or worker.")],
) -> None:
    """Allow a device to act in another role, too: a key is stored for the role in which it first joined."""
    from manyhands.facts.errors import BadValue
    from manyhands.transport.keys import Role

    roles = {each.text: each for each in Role}
    if role not in roles:
        raise BadValue(f"'{role:.40}' is no role; there are: {', '.join(sorted(roles))}.")
    device = _book().allow(name, roles[role])
    _record("allowed", f"{name} {role}", device.fingerprint)
    typer.echo(f"{', '.join(device.names)} may act as: {', '.join(device.roles)}.")


def new_token() -> None:
    """Make another token for new devices; those that have joined do not need it."""
    from manyhands.runtime.shared_token import renew_token

    path = renew_token()
    _record("new token", "", "")
    typer.echo(f"A new token is in {path}. Runs under way take the old one until they end.")


def run_token() -> None:
    """Print a token for one run, or one deployment, for a launcher to hand to coordinator and workers.

    It is kept nowhere, and it replaces keys: devices that join by it are known by their names alone, also when a
    container is started anew.
    """
    from manyhands.transport.security import new_secret

    typer.echo(new_secret())


def log(json: Json = False) -> None:
    """Show the audit log: joins, failed proofs, refusals, evictions, revocations."""
    from manyhands.cli.show import plain, print_json
    from manyhands.runtime.audit import AUDIT_FILE, entries
    from manyhands.runtime.shared_token import config_folder

    recorded = entries(config_folder())
    if json:
        print_json(recorded)
        return
    if not recorded:
        typer.echo(f"Nothing is recorded yet ({config_folder() / AUDIT_FILE}).")
    for entry in recorded[-MOST_LINES:]:
        facts = "  ".join(f"{key}={value}" for key, value in entry.items() if key not in ("time", "event"))
        typer.echo(plain(f"{entry.get('time', '')}  {entry.get('event', '')}  {facts}"))


def known() -> dict[str, Any]:
    """Return, for --json, this device's fingerprint (null: it has no key yet) and the devices that have joined."""
    import msgspec

    from manyhands.runtime.device_book import own_key
    from manyhands.runtime.shared_token import config_folder
    from manyhands.transport.keys import fingerprint

    key = own_key(config_folder(), make=False)
    joined = [{**msgspec.to_builtins(device), "fingerprint": device.fingerprint} for device in _book().devices()]
    return {"own_fingerprint": fingerprint(key.public) if key is not None else None, "joined": joined}


def show_known() -> None:
    """Print the devices that have joined as a table."""
    from manyhands.cli.show import print_table

    document = known()
    rows = [
        [
            ", ".join(device["names"]), ", ".join(device["roles"]) + (" (revoked)" if device["revoked"] else ""),
            device["fingerprint"], _moment(device["first_joined"]), _moment(device["last_seen"]),
        ]
        for device in document["joined"]
    ]  # fmt: skip
    if rows:
        print_table("Devices that have joined", ["name", "role", "fingerprint", "first joined", "last seen"], rows)
    else:
        typer.echo("No device has joined this one, nor has it joined another.")
    own_fingerprint = document["own_fingerprint"]
    typer.echo(
        f"This device: {own_fingerprint}"
        if own_fingerprint
        else "This device has no key yet; one is made when it first joins."
    )


def _moment(text: str) -> str:
    return text[:16].replace("T", " ")

"""What ``ssh`` says when it fails, as one line that names the host and the next step."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

from atoll.core.errors import ProvisionError
from atoll.core.validation import command_line, nearest
from atoll.providers.ssh.hosts import Target, config_hosts, targets

_SCAN_S = 5.0


class LoginDenied(ProvisionError):
    """No key was taken without asking; where there is a terminal, ssh may ask for a passphrase or a code."""

    @property
    def may_ask(self) -> bool:
        """Would the host take something that a person types?"""
        return re.search(r"\(\S*(password|keyboard-interactive)\S*\)", str(self)) is not None


def explain(target: Target, said: str, ssh: str) -> ProvisionError:
    """The error for what ``ssh`` wrote before it gave up on a host."""
    text = said.replace("\r", "")
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "it printed nothing")
    jump = (target.jump or _behind(target, ssh)) if re.search(_NEVER_MADE, text) else None
    if jump is not None:
        return ProvisionError(f"{target}: its jump host can't be used: {_why_not(jump.split(',')[0], ssh)}")
    if "Host key verification failed" in text or "HOST IDENTIFICATION HAS CHANGED" in text:
        return _host_key(target, text, ssh)
    if "Permission denied" in text or "Too many authentication failures" in text:
        return LoginDenied(f"{target}: {_denied(target, last, ssh)}")
    if "Could not resolve hostname" in text:
        name = target.host.rpartition("@")[2]
        hint = nearest(name, (each for each in config_hosts() if each != name))
        return ProvisionError(f"{target}: unknown host{hint or '.'} Is it spelt right, or missing in ~/.ssh/config?")
    for pattern, clause in _CAUSES:
        if re.search(pattern, text):
            return ProvisionError(f"{target}: {clause} ({last})")
    return ProvisionError(f"{target}: ssh failed: {last}. Try `{target.command}`")


_CAUSES = (
    (r"banner exchange", "hangs at login: it accepts connections, but its sshd does not answer. Is the host frozen?"),
    (r"Connection refused", "refuses connections: does sshd run there, and on this port?"),
    (r"No route to host|Network is unreachable", "can't be reached: is it up, and are you on its network or VPN?"),
    (r"timed out|not responding", "does not answer: is it up, and does a firewall let ssh through?"),
    (r"Connection (closed|reset) by|kex_exchange", "its sshd closed the connection: its log says why"),
    (r"Bad configuration option|terminating, \d+ bad", "your ssh config has a mistake"),
)


# What ssh says of a connection that a jump host never made, after what it says of the jump host.
_NEVER_MADE = "UNKNOWN port 65535|kex_exchange_identification: Connection closed"


def _behind(target: Target, ssh: str) -> str | None:
    """The jump host of the user's config, where there is one."""
    jump = resolved(target, ssh).get("proxyjump", "none")
    return None if jump == "none" else jump


def _why_not(jump: str, ssh: str) -> str:
    """Why a jump host can't be used: ssh keeps to itself what it said when it was one, so it is asked again."""
    (hop,) = targets([jump])
    options = ["-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", "-o", "ConnectTimeout=5", *hop.options]
    try:
        answer = subprocess.run(
            [ssh, *options, "--", hop.host, "true"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SCAN_S + 5,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return str(silent(hop, _SCAN_S + 5))
    if answer.returncode != 255:
        return f"{hop} lets us in, but no further: does its sshd allow forwarding (AllowTcpForwarding)?"
    return str(explain(hop, answer.stderr, ssh))


def silent(target: Target, limit_s: float, *, began: bool = False) -> ProvisionError:
    """The error for a host that let us in, or nearly, and then said nothing more; ``began``: the command has begun."""
    if began:
        return ProvisionError(
            f"{target}: a command that began there did not end within {limit_s:g} s: is the machine busy, or does what "
            "it waits for not answer, a file server or Slurm's controller?"
        )
    return ProvisionError(f"{target}: hangs at login: no answer within {limit_s:g} s. Try `{target.command}`")


def resolved(target: Target, ssh: str) -> dict[str, str]:
    """What the user's config makes of a target: ``hostname``, ``port``, ``user`` …; several values, one a line."""
    answer = subprocess.run(
        [ssh, "-G", *target.options, target.host], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10
    )
    found: dict[str, str] = {}
    for line in answer.stdout.splitlines():
        key, _, value = line.partition(" ")
        found[key] = f"{found[key]}\n{value}" if key in found else value
    return found


def _denied(target: Target, last: str, ssh: str) -> str:
    facts = resolved(target, ssh)
    user = facts.get("user", "?")
    files = [file for file in facts.get("identityfile", "").split("\n") if file and Path(file).expanduser().exists()]
    agent = " and the ssh agent's" if os.environ.get("SSH_AUTH_SOCK") else ""
    keys = f"the keys {', '.join(files)}{agent}" if files else f"no key file{agent or ' and no ssh agent'}"
    step = f"`{command_line('ssh-copy-id', *_port(target), target.host)}` puts one there, or name one with key="
    return f"does not let {user} in with {keys} ({last}): {step}"


def _port(target: Target) -> list[str]:
    return ["-p", str(target.port)] if target.port is not None else []


def _host_key(target: Target, said: str, ssh: str) -> ProvisionError:
    facts = resolved(target, ssh)
    name, port = facts.get("hostname", target.host), facts.get("port", "22")
    via = facts.get("proxyjump", "none") != "none" or facts.get("proxycommand", "none") != "none"
    entry = name if port == "22" else f"[{name}]:{port}"
    given = re.findall(r"SHA256:[\w+/=]+", said)
    offered = given or ([] if via else _scan(name, port))
    shown = (
        "its fingerprint is " + ", ".join(dict.fromkeys(offered)) if offered else "its fingerprint could not be read"
    )
    if "IDENTIFICATION HAS CHANGED" in said:
        where = re.search(r"Offending .* key in (\S+)", said)
        known = f" (known: {where[1]})" if where else ""
        return ProvisionError(
            f"{target}: its host key has CHANGED{known}: {shown}. Somebody may be intercepting the connection: ask "
            f"its administrator. If the host was reinstalled: `{command_line('ssh-keygen', '-R', entry)}`, then "
            f"`{target.command}` once"
        )
    file = (facts.get("userknownhostsfile") or "~/.ssh/known_hosts").split()[0]
    scan = f", or `{command_line('ssh-keyscan', '-p', port, name)} >> {file}`" if not via else ""
    return ProvisionError(
        f"{target}: its host key is not known: {shown}. Compare that with what its administrator says, then accept it: "
        f"`{target.command}` once{scan}"
    )


def _scan(name: str, port: str) -> list[str]:
    """Fingerprints that a host offers now, as ``SHA256:… (ED25519)``; none where it can't be asked."""
    try:
        keys = subprocess.run(
            ["ssh-keyscan", "-T", "4", "-p", port, name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SCAN_S,
        )
        prints = subprocess.run(
            ["ssh-keygen", "-lf", "-"], input=keys.stdout, capture_output=True, text=True, timeout=_SCAN_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    words = [line.split() for line in prints.stdout.splitlines()]
    return [f"{parts[1]} {parts[-1]}" for parts in words if len(parts) > 3]

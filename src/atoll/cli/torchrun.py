"""The flags of ``torchrun`` as ``atoll run`` takes them: in both spellings, and those with nothing left to say."""

from __future__ import annotations

from typing import Any

from atoll.cli.options import Command, normalized

# torchrun's flags that have nothing left to say here, and why; each is accepted and answered with one line.
_MET = "Atoll gives ranks their rendezvous itself"
_KEPT = "the output of every rank is shown and kept; `atoll logs CLUSTER` has it"
_NOT_NEEDED = {
    "--rdzv-backend": _MET,
    "--rdzv-endpoint": _MET,
    "--rdzv-conf": _MET,
    "--node-rank": _MET,
    "--master-addr": _MET,
    "--local-addr": _MET,
    "--monitor-interval": "the end of a rank is noticed at once",
    "--start-method": "ranks are started by exec",
    "--event-log-handler": "events are in the job's store",
    "--role": "every rank has the role `default`",
    "--log-dir": _KEPT,
    "--redirects": _KEPT,
    "--tee": _KEPT,
    "--logs-specs": _KEPT,
    "--duplicate-stdout-filters": _KEPT,
    "--duplicate-stderr-filters": _KEPT,
    "--numa-binding": "ranks are not bound to cores",
}
# Flags whose effect is missed where they stand after the script, which gets them.
_WANTED_EARLIER = ("--nodes", "--nproc-per-node", "--gpus", "--infra")
_SHORT = {"-r": "--redirects", "-t": "--tee"}


class RunCommand(Command):
    """Options end at the script: what follows is the script's own. Knows whether ``--`` stood before it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Take torchrun's flags that are not needed out, and read the others in both spellings."""
        flags = {name for param in self.params if getattr(param, "is_flag", False) for name in param.opts}
        flags |= set(ctx.help_option_names)
        own: list[str] = []
        notes: list[str] = []
        script: list[str] = []
        waiting = iter(args)
        for word in waiting:
            if word == "--" or not word.startswith("-"):
                script = [word, *waiting]
                break
            name, value = _flag(word)
            if name in flags:
                own.append(name if value is None else word)
                continue
            if value is None:
                value = next(waiting, None)
            if name in _NOT_NEEDED and value is not None:
                notes.append(f"{name} {value} is not needed: {_NOT_NEEDED[name]}")
            else:
                own += [name] if value is None else [name, value]
        late = [word for word in script[1:] if f"--{normalized(_flag(word)[0][2:])}" in _WANTED_EARLIER]
        if late and script[0] != "--":
            notes.append(f"{late[0]} is an argument of {script[0]}: Atoll's flags stand before the script")
        ctx.meta["atoll.notes"] = notes
        ctx.meta["atoll.command"] = script[:1] == ["--"]
        return super().parse_args(ctx, [*own, *script])


def _flag(word: str) -> tuple[str, str | None]:
    """A flag's name with ``-`` for ``_``, and the value that is written together with it."""
    if word[:2] in _SHORT:
        return _SHORT[word[:2]], word[2:].removeprefix("=") or None
    name, equals, value = word.partition("=")
    return name.replace("_", "-"), value if equals else None

"""``atoll completion``: what a shell offers after Tab. It reads names from files and imports next to nothing."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

_SCRIPTS = {
    "bash": """_atoll() {
    mapfile -t COMPREPLY < <(atoll completion words "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
    [[ ${#COMPREPLY[@]} == 1 && ${COMPREPLY[0]} == */ ]] && compopt -o nospace
}
complete -o default -F _atoll atoll""",
    "zsh": """_atoll() {
    local -a found
    found=("${(@f)$(atoll completion words "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -n $found[1] ]]; then compadd -a found; else _files; fi
}
compdef _atoll atoll""",
    "fish": "complete -c atoll -a '(atoll completion words (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'",
}
_FORMATS = ("table", "json")
_SECTION = re.compile(r"^class (\w+)\(Section\):\n(.*?)(?=^class |\Z)", re.M | re.S)
_FIELD = re.compile(r"^    (\w+): (\w+)", re.M)


def register(app: typer.Typer) -> None:
    """Add the command to ``atoll``."""
    settings = {"allow_interspersed_args": False, "allow_extra_args": True}
    app.command("completion", context_settings=settings)(completion)


def completion(
    context: typer.Context, shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]
) -> None:
    """Print the completion script of a shell.

    It completes commands, flags, clusters, recipes and recipe keys.

    \b
    In ~/.bashrc or ~/.zshrc, and in ~/.config/fish/config.fish:
        eval "$(atoll completion bash)"
        atoll completion fish | source
    """
    if shell == "words":
        assert context.parent is not None
        for word in words_after(context.parent.command, context.args):
            print(word)
        return
    if shell not in _SCRIPTS:
        raise typer.BadParameter(f"{shell}: expected bash, zsh or fish")
    print(_SCRIPTS[shell])


def words_after(command: Any, words: list[str]) -> list[str]:
    """The words that can take the place of the last one, which may be empty; none where a file may come."""
    *before, last = words or [""]
    path: list[str] = []
    while before and hasattr(command, "commands") and before[0] in command.commands:
        path.append(before[0])
        command = command.commands[before.pop(0)]
    return sorted(each for each in _candidates(command, " ".join(path), before, last) if each.startswith(last))


def _candidates(command: Any, path: str, before: list[str], last: str) -> Iterable[str]:
    if hasattr(command, "commands"):
        return [name for name, each in command.commands.items() if not each.hidden]
    options = {flag: each for each in command.params if each.param_type_name == "option" for flag in each.opts}
    valued = options.get(before[-1]) if before else None
    if valued is not None and not getattr(valued, "is_flag", False):
        return _VALUES.get(valued.name, lambda: ())()
    if last.startswith("-"):
        flags = [flag for flag, each in options.items() if not getattr(each, "hidden", False)]
        return [*flags, *(_recipe_keys() if path in ("train", "data preview", "recipes show") else ())]
    return _ARGUMENTS.get(path, lambda: ())()


def _clusters() -> list[str]:
    from atoll.core.paths import atoll_home

    return [path.parent.name for path in (atoll_home() / "clusters").glob("*/cluster.json")]


def _infras() -> list[str]:
    from atoll.providers import registry

    return registry.declared()


def _pools() -> list[str]:
    from atoll.functions.named.registry import named_pools

    return [pool["name"] for pool in named_pools()]


def _recipes() -> list[str]:
    shipped = Path(__file__).parents[1] / "train" / "recipe" / "shipped"
    return [file.stem for file in shipped.glob("*.toml")] + [file.name for file in Path().glob("*.toml")]


def _recipe_keys() -> list[str]:
    """``--train.steps``, …, read from the schema's text: importing it takes too long."""
    text = (Path(__file__).parents[1] / "train" / "recipe" / "schema.py").read_text()
    sections = {name: _FIELD.findall(body) for name, body in _SECTION.findall(text)}
    return [f"--{part}.{key}" for part, kind in sections["Recipe"] for key, _ in sections.get(kind, ())]


_VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "cluster": _clusters,
    "infra": _infras,
    "output": lambda: _FORMATS,
}
_ARGUMENTS: dict[str, Callable[[], Iterable[str]]] = {
    **dict.fromkeys(("train", "data preview", "recipes show", "recipes cp"), _recipes),
    **dict.fromkeys(("exec", "logs", "queue", "cancel", "status", "stop", "start", "down"), _clusters),
    **dict.fromkeys(("autostop", "ssh"), _clusters),
    **dict.fromkeys(("check", "gpus"), _infras),
    "pools down": _pools,
    "completion": lambda: _SCRIPTS,
}

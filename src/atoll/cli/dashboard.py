"""``atoll dashboard``: a page for people. Imports are late, so that help is fast."""

from __future__ import annotations

import socket
from typing import Annotated

import typer

from atoll.cli import shown
from atoll.core.errors import ConfigError
from atoll.core.validation import command_line

_DEFAULT = "outputs"  # where recipes put runs


def register(app: typer.Typer) -> None:
    """Add the command to ``atoll``."""
    app.command("dashboard")(dashboard)


def dashboard(
    folders: Annotated[
        list[str] | None,
        typer.Argument(metavar="FOLDERS", help=f"Folders with runs whose loss is shown; {_DEFAULT} by default."),
    ] = None,
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="Port; any free one by default.")] = 0,
) -> None:
    """Show clusters, jobs, logs, losses and GPUs in a browser.

    \b
        atoll dashboard
        atoll dashboard outputs /data/runs --port 8765

    Open the printed address; it is a secret. From another machine, forward the port with ssh, as the command says.
    Ctrl-C ends it.
    """
    from pathlib import Path

    try:
        from atoll.dashboard.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("starlette", "uvicorn", "anyio"):
            raise
        raise ConfigError(f'the dashboard needs {error.name}: pip install "atoll[dashboard]"') from None
    from atoll.dashboard.views import Views, check_folders

    found = check_folders(folders) if folders else [Path(_DEFAULT)]

    def say(address: str) -> None:
        shown.say(f"Dashboard: {address}")
        number = address.split(":")[2].partition("/")[0]
        forwards = command_line("ssh", "-N", "-L", f"{number}:127.0.0.1:{number}", socket.gethostname())
        shown.note(f"from another machine, first: {forwards}\nCtrl-C ends it")

    serve(Views(found), port, say)

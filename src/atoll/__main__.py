"""``python -m atoll``: the command, for where its script is not on PATH."""

from atoll.cli.main import main

main()

"""Where the examples run: every script takes its provider and its accelerator from here.

    python examples/functions/pytorch_basic.py                       # two nodes on this machine
    python examples/functions/pytorch_basic.py --accelerator H100    # another card, asked of the same provider

Local nodes use the GPUs of this machine, whatever their name, where there are enough for all nodes; else the
accelerator is simulated: its count is honoured, ranks run on CPU, and one line says so. For other hardware change
`provider`, and nothing else in any script.
"""

from __future__ import annotations

import argparse

import atoll as sky

_parser = argparse.ArgumentParser(allow_abbrev=False)
_parser.add_argument("--accelerator", default="A100", help="of each node, e.g. H100 or A100:2 (default: A100)")
_parser.add_argument("--hub", action="store_true", help="hugging_face_trainer.py: download what the guide downloads")
_arguments, _ = _parser.parse_known_args()

provider = sky.Local()
accelerator: str = _arguments.accelerator
hub: bool = _arguments.hub

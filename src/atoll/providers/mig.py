"""MIG slices that a pool makes of cards of this machine, and that are removed after it. Standard library only.

``python -m atoll.providers.mig`` makes them, answers with a line of JSON, and waits until its input has ended, as it
does with whoever wanted the slices, however that ends, and nobody leases one or computes on the card. Then it removes
them. A card's MIG mode is never changed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from atoll.agent.leases import Leases, holders

_SOURCE_ROOT = str(Path(__file__).resolve().parents[2])
_ANSWER_S = 60.0  # of one nvidia-smi
_LEAVE_S = 10.0  # ranks have ended; what else uses the card may take long
_RETRY_S, _LATE_RETRY_S = 0.2, 5.0

_makers: dict[str, subprocess.Popen[str]] = {}  # by the allocation that they made slices for


def make_slices(owner: str, cards: Sequence[tuple[int, str]], profiles: Sequence[str], holder: str) -> str | None:
    """Make slices on these cards, each an index and a UUID, for the allocation ``owner``; returns why it can't."""
    maker = subprocess.Popen(
        [sys.executable, "-m", "atoll.providers.mig", json.dumps([cards, profiles, holder])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([_SOURCE_ROOT, *filter(None, [os.getenv("PYTHONPATH")])])},
        start_new_session=True,  # Ctrl-C is the driver's
    )
    _makers[owner] = maker
    assert maker.stdout is not None
    try:
        answer = json.loads(maker.stdout.readline() or '{"why": "what makes them ended; its output is above"}')
    except BaseException:  # Ctrl-C
        remove_slices(owner)
        raise
    if "why" in answer:
        remove_slices(owner)
    return str(answer["why"]) if "why" in answer else None


def remove_slices(owner: str) -> None:
    """Remove what was made for an allocation, if anything was; waits while its ranks end, and no longer."""
    if (maker := _makers.get(owner)) is None:
        return
    assert maker.stdin is not None
    assert maker.stdout is not None
    maker.stdin.close()
    maker.stdout.close()
    try:
        maker.wait(_LEAVE_S)
    except subprocess.TimeoutExpired:
        print("atoll: the slices made for the pool are removed once nobody uses their GPU", file=sys.stderr)
    else:
        del _makers[owner]
        if maker.returncode:
            print(
                f"atoll: what removes the slices made for the pool has ended (exit code {maker.returncode}). "
                f"`nvidia-smi -L` lists those left; `nvidia-smi mig -i GPU -dci` and then `-dgi` remove them",
                file=sys.stderr,
            )


# ------------------------------------------------------------------------------------------- the process beside a pool
class _Card:
    """A card, and the slices that were made of it here."""

    def __init__(self, index: int, uuid: str) -> None:
        self.index, self.uuid = index, uuid
        self.made: list[str] = []  # IDs of GPU instances
        self._lease = Leases()

    def obstacle(self, holder: str) -> str | None:
        """Why no slices can be made of it, where none has been."""
        if self.made:
            return None
        mode = _smi("-i", str(self.index), "--query-gpu=mig.mode.current", "--format=csv,noheader").stdout.strip()
        if mode != "Enabled":
            return f"its MIG mode is {mode or 'unknown'} (its administrator sets it: nvidia-smi -i {self.index} -mig 1)"
        held_by = self._lease.lease([self.uuid], 1, holder)  # one maker a card
        return f"it is used by {held_by[self.uuid]}" if held_by else self.user()

    def user(self) -> str | None:
        """Who uses it, other than this process."""
        slices = _slices().get(self.uuid, [])
        for each, holder in holders(slices).items():
            return f"its slice {each} is used by {holder}"
        apps = _smi("--query-compute-apps=gpu_uuid,pid", "--format=csv,noheader")
        if apps.returncode != 0:
            return f"nvidia-smi does not say who uses it: {_last_line(apps)}"
        for line in apps.stdout.splitlines():
            where, _, pid = line.partition(",")
            if where.strip() in (self.uuid, *slices):
                return f"it is used by process {pid.strip()}"
        return None

    def make(self, profile: str) -> str | None:
        """Make a slice; returns why it can't."""
        done = _smi("mig", "-i", str(self.index), "-cgi", profile, "-C")
        self.made += re.findall(r"created GPU instance ID\s+(\d+)", done.stdout)
        return None if done.returncode == 0 else _last_line(done)

    def remove(self) -> bool:
        """Remove what was made; False if something uses the card."""
        if self.made and self.user() is not None:
            return False
        for made in list(self.made):
            of_card = ("mig", "-i", str(self.index))
            _smi(*of_card, "-dci", "-gi", made)  # where there is none, what follows goes on
            if _smi(*of_card, "-dgi", "-gi", made).returncode != 0:
                return False
            self.made.remove(made)
        return True


def _make(cards: list[_Card], profiles: list[str], holder: str) -> str | None:
    """Make all of these slices, the larger ones first, which have fewer places; returns why that can't be."""
    why: dict[int, str] = {}
    for profile in sorted(profiles, key=lambda each: [-int(size) for size in re.findall(r"\d+", each)]):
        for card in cards:
            refused = card.obstacle(holder) or card.make(profile)
            if refused is None:
                break
            why[card.index] = f"no {profile} on GPU {card.index}: {refused}"
        else:
            return "; ".join(why.values())
    return None


def _slices() -> dict[str, list[str]]:
    """UUIDs of the slices of each card, by its own."""
    found: dict[str, list[str]] = {}
    for uuid in re.findall(r"UUID: (\S+?)\)", _smi("-L").stdout):
        if not uuid.startswith("MIG-"):
            below = found.setdefault(uuid, [])
        else:
            below.append(uuid)
    return found


def _smi(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``nvidia-smi``; one that does not answer is one that refuses."""
    command = ["nvidia-smi", *arguments]
    try:
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ANSWER_S)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"nvidia-smi did not answer within {_ANSWER_S:g} s")


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    return ((done.stdout + done.stderr).strip().splitlines() or ["no output"])[-1]


def main() -> None:
    """Make slices, and remove them when they are no longer wanted."""
    wish: list[Any] = json.loads(sys.argv[1])
    cards, profiles, holder = [_Card(*card) for card in wish[0]], wish[1], wish[2]
    try:
        why = _make(cards, profiles, holder)
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps({} if why is None else {"why": why}), flush=True)
        if why is None:
            sys.stdin.read()
    finally:
        since = time.monotonic()
        while [card for card in cards if not card.remove()]:
            time.sleep(_RETRY_S if time.monotonic() < since + _LEAVE_S else _LATE_RETRY_S)


if __name__ == "__main__":
    main()

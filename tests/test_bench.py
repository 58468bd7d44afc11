"""The benchmark of growth runs, at small sizes, and its counts are linear: those hold under any load."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.long
def test_counts_grow_as_the_work_does(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(ROOT / "bench/scale.py"), "--quick", "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    fitted = {each["case"]: each["exponents"] for each in json.loads(out.read_text())}
    for case, count in (("real_jobs", "events"), ("supervised", "events"), ("supervised", "left_mb")):
        assert fitted[case][count] < 1.15, f"{count} of {case}: {done.stdout}"
    assert fitted["log_lines"]["left_mb"] < 1.1
    assert fitted["log_lines"]["tail_read_mb"] < 0.5

"""What preparing data costs: Atoll beside the `tokenizers` library used directly, on the same text.

    python bench/train_tokenize.py [--copies 5] [--rounds 3] [--json FILE]

The six Austen novels, as often as asked for, with a byte-level BPE of 4,096 tokens learnt from them. Ours reads the
files, tokenises, and writes and syncs shards; the peer gets the texts in memory and makes lists of numbers of them,
with `Tokenizer.encode_batch`. Both run in fresh processes, on all cores and on one. Tokens a second a core is tokens
over processor time, all threads together; tokens a second is over the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

NOVELS = Path(__file__).parents[1] / "examples/austen/data"
TARGET = 1.0  # of the peer's tokens a second a core


def measure_atoll(folder: Path, rounds: int) -> dict[str, float]:
    """Text files to shards that are on the disk."""
    from atoll.train.data.prepare import prepare
    from atoll.train.recipe.schema import DataSection

    def once() -> int:
        with tempfile.TemporaryDirectory() as cache:
            section = DataSection(path=str(folder / "texts"), tokenizer=str(folder / "tokenizer"), cache=cache)
            prepared = prepare(section, seq_len=1024, progress=lambda _: None, note=lambda _: None)
            num_tokens = prepared.train[0][0].num_tokens - prepared.train[0][0].num_documents
            prepared.close()
            return num_tokens

    return _timed(once, rounds)


def measure_tokenizers(folder: Path, rounds: int) -> dict[str, float]:
    """Texts in memory to lists of numbers in memory."""
    import tokenizers

    engine = tokenizers.Tokenizer.from_file(str(folder / "tokenizer/tokenizer.json"))
    texts = [path.read_text() for path in sorted((folder / "texts").iterdir())]

    def once() -> int:
        return sum(len(each.ids) for each in engine.encode_batch(texts, add_special_tokens=False))

    return _timed(once, rounds)


def _timed(once, rounds: int) -> dict[str, float]:
    once()  # pages, caches and threads
    per_core, per_s = [], []
    for _ in range(rounds):
        clock, processor = time.perf_counter(), time.process_time()
        num_tokens = once()
        per_core.append(num_tokens / (time.process_time() - processor))
        per_s.append(num_tokens / (time.perf_counter() - clock))
    return {"tokens": num_tokens, "per_core": statistics.median(per_core), "per_s": statistics.median(per_s)}


MEASURES = {"atoll": measure_atoll, "tokenizers": measure_tokenizers}


def main() -> None:
    """Measure each in a process of its own, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--copies", type=int, default=5, help="how often each novel is there")
    parser.add_argument("--rounds", type=int, default=3, help="the median of so many is shown")
    parser.add_argument("--json", type=Path, help="write the figures here too")
    parser.add_argument("--measure", choices=MEASURES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        print("RESULT " + json.dumps(MEASURES[options.measure](options.folder, options.rounds)))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _lay_out(folder, options.copies)
        figures = {
            f"{system}, {threads}": _run(system, folder, options.rounds, threads)
            for threads in ("all cores", "1 core")
            for system in MEASURES
        }
    show(figures)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2))


def _lay_out(folder: Path, copies: int) -> None:
    from atoll.train.data.tokenizer import train_bpe

    novels = sorted(NOVELS.glob("*.txt"))
    train_bpe([path.read_text() for path in novels], 4096).save(folder / "tokenizer")
    (folder / "texts").mkdir()
    for copy in range(copies):
        for path in novels:
            (folder / "texts" / f"{copy:03d}-{path.name}").write_bytes(path.read_bytes())


def _run(system: str, folder: Path, rounds: int, threads: str) -> dict[str, float]:
    print(f"measuring {system}, {threads} ...", file=sys.stderr)
    command = [sys.executable, __file__, "--measure", system, "--folder", str(folder), "--rounds", str(rounds)]
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false" if threads == "1 core" else "true"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    line = next((line for line in done.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        print(f"{system} could not be measured:\n{done.stderr[-2000:]}", file=sys.stderr)
        sys.exit(1)
    return json.loads(line.removeprefix("RESULT "))


def show(figures: dict[str, dict[str, float]]) -> None:
    """The table, in Markdown."""
    print(f"\n{os.cpu_count()} cores, Python {platform.python_version()}, {time.strftime('%Y-%m-%d')}\n")
    print("| figure | Atoll | tokenizers | Atoll ÷ tokenizers | target |")
    print("|---|---|---|---|---|")
    for threads in ("all cores", "1 core"):
        ours, theirs = figures[f"atoll, {threads}"], figures[f"tokenizers, {threads}"]
        if ours["tokens"] != theirs["tokens"]:
            sys.exit(f"not the same work: {ours['tokens']:,} tokens against {theirs['tokens']:,}")
        for key, title, target in (("per_core", "tokens/s a core", f"≥ {TARGET:g}"), ("per_s", "tokens/s", "–")):
            cells = " | ".join(f"{each[key]:,.0f}" for each in (ours, theirs))
            print(f"| {title}, {threads} | {cells} | {ours[key] / theirs[key]:.2f}× | {target} |")


if __name__ == "__main__":
    main()

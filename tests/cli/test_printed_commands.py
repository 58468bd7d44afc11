"""Every command that the launcher prints can be typed: its messages', its help's, the docs', and those of a session."""

from __future__ import annotations

import ast
import functools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import typer

import atoll as sky
from atoll.cli.app import app
from atoll.cli.main import main
from atoll.functions.named.registry import end_pool, named_pools
from atoll.tasks import clusters, lifecycle
from atoll.train.recipe.keys import field_of, flat
from atoll.train.recipe.overrides import parse_overrides

ROOT = Path(__file__).parents[2]
_NAMES_ONE = re.compile(r"\batoll [a-z{]|command_line")
TREES = {
    str(path.relative_to(ROOT)): ast.parse(text)
    for path in (ROOT / "src/atoll").rglob("*.py")
    if _NAMES_ONE.search(text := path.read_text())
}
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").rglob("README.md"))]
_QUOTED = re.compile(r"(?<!`)`(atoll [^`]+)`(?!`)")
_WORD = r"""(?:'[^']*'|"[^"]*"|[^\s;,()`'"])+"""
_TYPED = re.compile(rf"(?<![\w./`-])atoll(?: {_WORD})+")
_PLACE = re.compile(r"[A-Z]+(?:\.\.\.)?")  # TASK, NAME: what the reader has


# --------------------------------------------------------------------------------------------------- as it parses
def leaves(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command that does something, with the words that name it."""
    if not isinstance(command, click.Group) and not hasattr(command, "commands"):
        yield path, command
        return
    for name, each in command.commands.items():
        yield from leaves(each, (*path, name))


@pytest.fixture(scope="module")
def parse() -> Callable[[list[str]], None]:
    """Has ``atoll`` take these words, and do nothing."""
    root = typer.main.get_command(app)
    for path, command in leaves(root):
        if path[0] not in ("serve", "api", "cost-report", "show-gpus"):
            command.callback = lambda **given: None

    def parsed(words: list[str]) -> None:
        assert words[0] == "atoll"
        # What the reader has may be anything; a number is a name, a file and a number.
        asked = ["1" if _PLACE.fullmatch(word) else word for word in words[1:] if word not in ("...", "…")]
        root.main(asked, prog_name="atoll", standalone_mode=False)
        at = [place for place, word in enumerate(words) if re.match(r"--\w+\.", word)]
        keys = [each for place in at for each in words[place : place + 1 + ("=" not in words[place])]]
        if unknown := [path for path, _ in flat(parse_overrides(keys)) if field_of(path) is None]:
            raise sky.ConfigError(f"no recipe has {unknown}")

    return parsed


def refused(parse: Callable[[list[str]], None], found: list[tuple[str, list[str]]]) -> list[str]:
    """Those that ``atoll`` does not take, and why."""
    wrong = []
    for where, words in found:
        try:
            parse(words)
        except Exception as error:
            wrong.append(f"{where}: {shlex.join(words)}: {error}")
    return wrong


@functools.cache
def texts() -> list[tuple[str, str]]:
    """The texts of the sources that a user may see; ``{}`` is where something is put in."""
    found = []
    for path, tree in TREES.items():
        docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
                found.append((path, text))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | docs:
                found.append((path, node.value))
    return found


def test_commands_of_messages_are_taken(parse: Callable[[list[str]], None]) -> None:
    """Those that ``command_line`` makes, with a 1 for each word that only a run knows, and those in quotes."""
    found = [(path, shlex.split(each)) for path, text in texts() for each in _QUOTED.findall(text)]
    for path, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "command_line":
                words = [str(each.value) if isinstance(each, ast.Constant) else "1" for each in node.args]
                found += [(f"{path}:{node.lineno}", words)] if words[0] == "atoll" else []
    assert len(found) > 50
    # Which command it is only a run knows of a few.
    assert not refused(parse, [(where, words) for where, words in found if words[1] not in ("{}", "1")])


def test_no_message_makes_a_command_by_itself() -> None:
    """A name or a path that a text gets has to be quoted for a shell: ``command_line`` does it."""
    known = "|".join(re.escape(" ".join(path)) for path, _ in leaves(typer.main.get_command(app)))
    made = re.compile(rf"(?<![\w.])atoll (?:{known})(?: {_WORD})*? ?[^\s`]*{{")
    scripts = "src/atoll/cli/completion.py"  # quotes by its shells' own rules
    assert not [f"{path}: {text}" for path, text in texts() if made.search(text) and path != scripts]


def test_examples_of_help_are_taken(parse: Callable[[list[str]], None]) -> None:
    root = typer.main.get_command(app)
    found = [("atoll", each) for line in root.help.splitlines() for each in line.partition("→ ")[2].split(",  ")]
    for path, command in leaves(root):
        lines = [line.strip() for line in (command.help or "").splitlines()]
        found += [(" ".join(path), line) for line in lines if line.startswith("atoll ")]
    split = [(where, shlex.split(line)) for where, line in found if line.startswith("atoll ")]
    assert len(split) > 50
    assert not refused(parse, split)


def blocks(text: str) -> Iterator[str]:
    """The lines of a page's shell blocks that begin with ``atoll``, without what stands before and after it."""
    for block in re.findall(r"^```(?:bash|sh|console|shell)\n(.*?)^```", text, re.M | re.S):
        for line in re.sub(r"\$\([^)]*\)", "X", block.replace("\\\n", " ")).splitlines():
            if re.match(r"(?:\$ |# )?atoll ", line):
                yield line.removeprefix("$ ").removeprefix("# ")


def test_commands_of_the_docs_are_taken(parse: Callable[[list[str]], None]) -> None:
    found = []
    for path in PAGES:
        text = path.read_text()
        for line in blocks(text):
            lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if set(word) <= set(";&|"):
                    if words and words[0] == "atoll":
                        found.append((path.name, words))
                    words = []
                else:
                    words.append(word)
        plain = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
        for each in _QUOTED.findall(plain):
            words = [word for word in each.split() if word[0] not in "[…" and word[-1] != "]"]
            if len(words) > 2:
                found.append((path.name, shlex.split(" ".join(words).replace("[/NODE]", ""))))
    assert len(found) > 80
    assert not refused(parse, found)


# ---------------------------------------------------------------------------------------------------- as it runs
@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A state folder and a current folder, both with a space in their paths; clusters and pools end with the test."""
    folder = tmp_path / "my project"
    folder.mkdir()
    monkeypatch.setenv("ATOLL_HOME", str(tmp_path / "my home"))
    for name, value in {"CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(folder)
    yield tmp_path / "my home"
    for pool in named_pools():
        end_pool(pool["name"])
    for name in clusters.all_names():
        lifecycle.down(name)


@pytest.fixture
def session(home: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Session:
    return Session(monkeypatch, capfdbinary)


class Session:
    """Types commands, as a shell splits them, and then those that were printed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[bytes]) -> None:
        self._monkeypatch, self._capture = monkeypatch, capture
        # A shell on a node replaces this process: here it is a child that reads nothing.
        monkeypatch.setattr("atoll.cli.nodes._become", lambda command, env=os.environ: sys.exit(ended(command, env)))
        self.run_too: list[str] = []

    def types(self, line: str, code: int = 0) -> list[str]:
        """What that printed to be typed; it ended with this exit code."""
        self._monkeypatch.setattr(sys, "argv", shlex.split(line))
        self._capture.readouterr()
        got: Any = 0
        try:
            main()
        except SystemExit as error:
            got = error.code or 0
        sys.stdout.flush()
        self.said = text = b"".join(self._capture.readouterr()).decode()
        assert "Traceback" not in text
        assert got == code, f"{line}: {got}: {text}"
        return printed(text)

    def follows(self, lines: list[str], *expected: str, **codes: int) -> None:
        """Type what was printed, the ends of jobs first; ``codes`` are those that a command may end with."""
        assert lines == list(expected)
        for line in sorted(lines, key=lambda line: " cancel " not in line):
            typed = " ".join("true" if word in ("TASK", "CMD") else word for word in line.split(" "))
            self.run_too += self.types(typed, codes.get(typed.split(" ")[1], 0))


def ended(command: list[str], env: Any) -> int:
    return subprocess.run(command, env=env, stdin=subprocess.DEVNULL, timeout=60).returncode


def printed(text: str) -> list[str]:
    """The commands in a text, in quotes or not."""
    quoted = _QUOTED.findall(text)
    return [*quoted, *_TYPED.findall(_QUOTED.sub("", text))]


def test_the_recogniser() -> None:
    said = "atoll: no; `atoll down 'a b' -a` ends it. Next: atoll run 'it'\"'\"'s.py', atoll ssh t; or (atoll logs t 1)"
    assert printed(said) == ["atoll down 'a b' -a", "atoll run 'it'\"'\"'s.py'", "atoll ssh t", "atoll logs t 1"]


@pytest.mark.long
def test_what_the_commands_of_clusters_print_can_be_typed(session: Session) -> None:
    Path("my script.py").write_text("print('hi')")
    makes = "atoll launch -c my-cluster TASK"
    session.follows(session.types("atoll status"), makes)
    assert session.types("atoll queue my-cluster") == []
    session.follows(session.types("atoll status absent", 102), "atoll status --all")
    session.follows(session.types("atoll logs my-cluster 9", 102), "atoll queue my-cluster")
    session.follows(
        session.types("atoll launch 'my script.py'", 2),
        "atoll run 'my script.py'",
        "atoll launch --workdir . python 'my script.py'",
    )
    session.follows(session.types("atoll launch -c t -d 'sleep 60'"), "atoll logs t 1", "atoll cancel t 1", logs=103)
    session.types("atoll exec t -d 'sleep 60'")
    session.follows(
        session.types("atoll launch -c t --num-nodes 2 true", 2), "atoll logs t 2", "atoll cancel t 2", logs=103
    )
    session.follows(session.types("atoll exec t --num-nodes 2 true", 2), "atoll launch -c t TASK")
    sweep = session.types("atoll exec t -d --sweep N=1,2 'sleep 60'")
    session.follows(sweep, "atoll queue t", "atoll cancel t 4 5")
    session.follows(session.types("atoll queue t --skip-finished"), "atoll exec t TASK")
    session.follows(session.types("atoll stop t"), "atoll start t")
    session.types("atoll stop t")
    session.follows(session.types("atoll exec t true", 2), "atoll start t")
    session.follows(session.types("atoll down t"), "atoll logs t")
    session.follows(session.types("atoll exec t true", 102), "atoll launch -c t TASK")
    ran = session.types("atoll run 'my script.py'")
    session.follows(ran, f"atoll logs {ran[0].split()[-1]}")
    after = [line for line in session.run_too if "atoll-" in line]  # a cluster that nobody named
    name = after[-1].split()[-1]
    session.follows(after, f"atoll exec {name} TASK", f"atoll ssh {name}", f"atoll down {name}")


def test_what_is_printed_of_damage_files_and_pools_can_be_typed(session: Session, home: Path) -> None:
    folder = home / "clusters" / "b"
    folder.mkdir(parents=True)
    (folder / "cluster.json").write_text("{")
    session.follows(session.types("atoll status"), "atoll down --purge b")
    Path("two tasks.yaml").write_text("run: 'true'\n---\nrun: 'true'\n")
    with pytest.raises(sky.ConfigError) as several:
        sky.Task.from_yaml("two tasks.yaml")
    session.follows(printed(str(several.value)), "atoll launch 'two tasks.yaml'")
    with sky.ComputePool(name="crew", nodes=1, idle=60), pytest.raises(sky.ConfigError) as differs:
        sky.ComputePool(name="crew", nodes=2).__enter__()
    session.follows(printed(str(differs.value)), "atoll pools down crew")
    program = Path("a program")
    program.write_text("#!/bin/sh\n")
    session.types("atoll run --no-python './a program'", 2)
    said = re.search(r"is not executable: (chmod .*), or", session.said)
    assert said is not None
    subprocess.run(["sh", "-c", said[1]], check=True)
    session.types("atoll run --no-python './a program'")

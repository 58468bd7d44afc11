"""Variables of a task: how text arrives, who wins, what is a secret, and `.env` files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.core.errors import ConfigError
from atoll.tasks.entrypoint import load_tasks
from atoll.tasks.task import Task
from atoll.tasks.variables import gather, read_env_file, substitute


def load(folder: Path, content: str, **flags: list[str]) -> Task:
    path = folder / "task.yaml"
    path.write_text(content)
    (task,) = load_tasks(path, flags)
    return task


def test_text_arrives_as_yaml_reads_it_and_is_said_once(tmp_path: Path) -> None:
    task = load(
        tmp_path,
        """
envs:
  BOOL: true
  SHORT: 1.50
  ZEROS: 08
  OCTAL: 010
  QUOTED: "1.50"
  TIME: 12:30
  DAY: 2024-01-02
  PIN_KEY: 0123
  PLAIN: a b
  GIVEN: yes
""",
        env=["GIVEN=x"],
    )
    assert task.envs == {
        "BOOL": "True",
        "SHORT": "1.5",
        "ZEROS": "08",
        "OCTAL": "010",
        "QUOTED": "1.50",
        "TIME": "12:30",
        "DAY": "2024-01-02",
        "PLAIN": "a b",
        "GIVEN": "x",
    }
    assert task.secrets == {"PIN_KEY": "0123"}
    (note,) = task.notes
    assert note.endswith(
        "task.yaml:2: envs: YAML changes the text of some values (quotes keep it): "
        "BOOL: true is True, SHORT: 1.50 is 1.5"
    )


def test_who_wins(tmp_path: Path) -> None:
    first, second = tmp_path / "a.env", tmp_path / "b.env"
    first.write_text("A=file\nB=file\nC=file\n")
    second.write_text("C=second\n")
    task = load(
        tmp_path,
        "envs: {A: yaml, B: yaml, D: yaml}\n",
        env=["A=flag", "A=last"],
        env_file=[str(first), str(second)],
    )
    assert task.envs == {"A": "last", "B": "file", "C": "second", "D": "yaml"}


def test_what_is_a_secret(tmp_path: Path) -> None:
    task = load(
        tmp_path,
        "envs: {HF_TOKEN: a, TOKENIZERS_PARALLELISM: b, SEEN: c, MOVED: d}\nsecrets: {S: e, LATER:}\n",
        env=["S=over", "WANDB_API_KEY=k"],
        secret=["LATER=l", "MOVED=m", "NEW=n"],
    )
    assert task.envs == {"TOKENIZERS_PARALLELISM": "b", "SEEN": "c"}
    assert task.secrets == {
        "HF_TOKEN": "a",
        "S": "over",
        "LATER": "l",
        "MOVED": "m",
        "NEW": "n",
        "WANDB_API_KEY": "k",
    }
    assert load(tmp_path, "secrets: [secrets:A, B]\n", secret=["A=1", "B=2"]).secrets == {"A": "1", "B": "2"}


def test_copying_from_the_shell() -> None:
    assert gather("--env", ["A", "B=", "C=x=y"], [], {"A": "shell"}) == {"A": "shell", "B": "", "C": "x=y"}
    with pytest.raises(ConfigError, match=r"--env A: A is not set in your shell: export it, or give --env A=VALUE"):
        gather("--env", ["A"], [], {})
    for bad in ("=x", "a-b=x", "1A", ""):
        with pytest.raises(ConfigError, match="expected NAME=VALUE or NAME"):
            gather("--secret", [bad], [], {})


def test_an_env_file(tmp_path: Path) -> None:
    path = tmp_path / ".env"
    path.write_bytes(
        b"\xef\xbb\xbf# a comment\r\n"
        b"\r\n"
        b"PLAIN = a b # gone\r\n"
        b"export EXPORTED=1\n"
        b"HASH=a#b\n"
        b"EMPTY=\n"
        b"ONLY_COMMENT= # nothing\n"
        b"SINGLE='a # $HOME \\n' # gone\n"
        b'DOUBLE="a\\n\\"b\\" $HOME \\$X \\z"\n'
        b'LINES="one\n'
        b'two # kept"\n'
        b"DOLLAR=$HOME/${X}\n"
        b"INNER=a\"b\"'c'\n"
        b"EQUALS=a=b\n"
        b"LAST=end"
    )
    assert read_env_file(str(path)) == {
        "PLAIN": "a b",
        "EXPORTED": "1",
        "HASH": "a#b",
        "EMPTY": "",
        "ONLY_COMMENT": "",
        "SINGLE": "a # $HOME \\n",
        "DOUBLE": 'a\n"b" $HOME \\$X \\z',
        "LINES": "one\ntwo # kept",
        "DOLLAR": "$HOME/${X}",
        "INNER": "a\"b\"'c'",
        "EQUALS": "a=b",
        "LAST": "end",
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("A=1\nsesame\n", ":2: expected NAME=VALUE"),
        ("A=1\n\nB='sesame\n", ":3: expected NAME=VALUE, VALUE bare or wholly in quotes"),
        ("B='sesame'x\n", ":1: expected NAME=VALUE"),
        ("a-b=sesame\n", ":1: a-b=…: expected a name"),
        ("A=se\0same\n", ":1: A: the value contains a zero character"),
    ],
)
def test_mistakes_in_an_env_file(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / ".env"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        read_env_file(str(path))
    assert message in str(caught.value)
    assert "same" not in str(caught.value)


def test_an_env_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.env cannot be read: No such file"):
        read_env_file(str(tmp_path / "none.env"))


def test_references() -> None:
    known = {"A": "$B", "B": "b", "AB": "ab"}
    assert substitute("$A ${A}x $AB $C ${C} ${A:-z} $$A $1", known) == "$B $Bx ab $C ${C} ${A:-z} $$B $1"


@given(
    st.dictionaries(
        st.from_regex(r"[A-Z_]{1,6}", fullmatch=True),
        st.text(st.characters(codec="utf-8", exclude_characters="\0\r'\\"), max_size=12),
        max_size=4,
    )
)
def test_single_quotes_keep_everything_but_backslashes(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, str]
) -> None:
    path = tmp_path_factory.getbasetemp() / "quoted.env"
    path.write_text("".join(f"{name}='{value}'\n" for name, value in values.items()), "utf-8")
    assert read_env_file(str(path)) == values


def test_many_variables_cost_what_they_are(tmp_path: Path) -> None:
    num = 10_000
    began = time.process_time()
    task = load(tmp_path, "envs:\n" + "".join(f"  V{at}: x{at}\n" for at in range(num)) + "run: echo\n")
    assert len(task.envs) == num
    assert time.process_time() - began < 4  # a look at all of them for each took longer

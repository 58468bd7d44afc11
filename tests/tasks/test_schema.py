"""What is wrong in a task file is named in one line, with the line where it stands."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from atoll.core.errors import ConfigError
from atoll.tasks.entrypoint import load_tasks
from atoll.tasks.schema import Document, read_documents


def read(folder: Path, content: str) -> list[tuple[Any, Document]]:
    path = folder / "task.yaml"
    path.write_text(content)
    return read_documents(path, "task.yaml")


def complaint(folder: Path, content: str) -> str:
    path = folder / "task.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError) as caught:
        load_tasks(path, {})
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{folder}/")


def test_places_know_line_and_text(tmp_path: Path) -> None:
    ((value, at),) = read(tmp_path, "a: 1\nb:\n  - x\n  - {c: 010,\n     d: e}\nf: &m {g: 1}\nh:\n  <<: *m\n")
    assert value == {"a": 1, "b": ["x", {"c": "010", "d": "e"}], "f": {"g": 1}, "h": {"g": 1}}
    assert at.at() == "task.yaml:1"
    assert at.at("b", 1, "d") == "task.yaml:5: b[1].d"
    assert at.shown("b", 1, "c") == "010"
    assert at.shown("b") is None
    assert at.at("h", "g") == "task.yaml:6: h.g"  # where it was written
    assert at.at("b", "none", 3) == "task.yaml:2: b.none[3]"  # what is not there is looked for above
    assert Document("Task").at("resources", "cpus") == "Task: resources.cpus"
    assert Document("").at("num_nodes") == "--num-nodes"


def test_every_mistake_is_told_in_the_order_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_text("nmae: a\nnum_nodes: many\nresources:\n  cpus: lots\n  ports: [1, x]\nrun: [echo]\n")
    with pytest.raises(ConfigError) as caught:
        load_tasks(path, {})
    assert str(caught.value).replace(f"{path}", "task.yaml").splitlines() == [
        "task.yaml:1: nmae: there is no such key: did you mean 'name'?",
        "task.yaml:2: num_nodes is 'many': expected a whole number from 1 to 4096",
        "task.yaml:4: resources.cpus is 'lots': expected a number of CPUs, or a minimum: 4 or \"4+\"",
        "task.yaml:5: resources.ports is 'x': expected a port from 1 to 65535, or a range as in 8000-8010",
        "task.yaml:6: run is a list: expected text",
    ]


BOMB = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{at}: &{at} [{','.join([f'*{of}'] * 10)}]\n" for of, at in itertools.pairwise("abcdefghi")
)


def test_what_only_looks_like_a_number_stays_text(tmp_path: Path) -> None:
    content = "[2024-13-45, 010, 08, 1:30, 190:20:30.15, 0b11, 0o7, 1e3, 0, -3, 0x1F, 1.5, -.5, .inf, 1.0e+4]"
    ((value, _),) = read(tmp_path, content)
    assert value == [
        "2024-13-45",
        "010",
        "08",
        "1:30",
        "190:20:30.15",
        "0b11",
        "0o7",
        "1e3",
        0,
        -3,
        31,
        1.5,
        -0.5,
        math.inf,
        1e4,
    ]


def test_files_without_end_and_folders(tmp_path: Path) -> None:
    for path, said in (
        ("/dev/zero", "has more than 16 MiB: is it a task file?"),
        ("/", "cannot be read: Is a directory"),
    ):
        with pytest.raises(ConfigError, match=said):
            read_documents(Path(path), "task.yaml")


def test_deep_values_end(tmp_path: Path) -> None:
    assert complaint(tmp_path, "a: " + "[" * 2000) == "task.yaml: its values are nested too deeply"


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    assert len(complaint(tmp_path, f"num_nodes: {'x' * 500}\n")) < 150


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("name: a\nnum_node: 2\n", "task.yaml:2: num_node: there is no such key: did you mean 'num_nodes'?"),
        (
            "run: a\nresources:\n  cpus: 4\n  accelerator: L4\n",
            "task.yaml:4: resources.accelerator: there is no such key: did you mean 'accelerators'?",
        ),
        ("num_nodes: '2'\n", "task.yaml:1: num_nodes is '2': expected a whole number from 1 to 4096, without quotes"),
        ("run: x\nnum_nodes: 0\n", "task.yaml:2: num_nodes is 0: expected a whole number from 1 to 4096"),
        ("setup: [a, b]\n", "task.yaml:1: setup is a list: expected text"),
        ("run: true\n", "task.yaml:1: run is true: expected text, so put it in quotes"),
        ("name: 'a b'\n", "task.yaml:1: name is 'a b': expected letters"),
        (
            "resources:\n  spot_recovery: x\n",
            "task.yaml:2: resources.spot_recovery: this key is called job_recovery now",
        ),
        ("run: x\nservice:\n  replicas: 2\n", "task.yaml:2: service: this version runs jobs only"),
        ("pool: {workers: 1}\n", "task.yaml:1: pool: this version runs jobs only"),
        ("num_nodes: 3\nresources: {num_nodes: 2}\n", "task.yaml:2: resources.num_nodes is 2: expected the same"),
        ("file_mounts:\n  /a/: b\n", "task.yaml:2: file_mounts./a/: a target ends without /"),
        ("workdir: .\nfile_mounts:\n  ~/sky_workdir: b\n", "task.yaml:3: file_mounts.~/sky_workdir: that is where"),
        ("file_mounts:\n  /a: {mode: MUONT}\n", "task.yaml:2: file_mounts./a.mode is 'MUONT': expected MOUNT, COPY"),
        ("config: {hooks: [{run: x, events: [stp]}]}\n", "task.yaml:1: config.hooks[0].events[0] is 'stp': expected"),
        ("envs:\n  A: 1\n  2B: x\n", "task.yaml:3: envs.2B: expected a name of letters"),
        ("run: a\non: b\n", "task.yaml:2: on: there is no such key: known are name, workdir"),
        ("volumes:\n  a: 1\n", "task.yaml:2: volumes.a is 1: expected keys with values"),
        ("envs:\n  A: [1]\n", "task.yaml:2: envs.A: expected text or a number"),
        ("envs:\n  A:\n", "task.yaml:2: envs.A: no value: give one with --env A=…, or --env A"),
        ("secrets: [secrets:A]\n", "task.yaml:1: secrets.A: no value: give one with --secret A=…"),
        ("- a\n- b\n", "task.yaml:1 is a list: expected keys with values"),
        ("just words\n", "task.yaml:1 is 'just words': expected keys with values"),
        ("run: a\nname: b\nrun: c\n", "task.yaml:3: run is given twice: see line 1"),
        ("envs: {A: 1, A: 2}\n", "task.yaml:1: A is given twice: see line 1"),
        ("run: echo a: b\n", "task.yaml:1: not YAML: mapping values are not allowed here (text that holds"),
        ("run: a\n\tname: b\n", "task.yaml:2: not YAML: "),
        ("run: 'a\n", "task.yaml:2: not YAML: "),
        ("run: *x\n", "task.yaml:1: not YAML: found undefined alias"),
        ("run: {{ x }}\n", "task.yaml:1: not YAML: found unhashable key"),
        ("run: !!python/name:os.system x\n", "task.yaml:1: not YAML: the tag tag:yaml.org,2002:python/name"),
        ("num_nodes: !!int ''\n", "task.yaml:1: not YAML: the tag tag:yaml.org,2002:int: tags are not supported here"),
        ("num_nodes: 1000000000\n", "task.yaml:1: num_nodes is 1000000000: expected a whole number from 1 to 4096"),
        ("num_nodes: 010\n", "task.yaml:1: num_nodes is '010': expected a whole number from 1 to 4096"),
        ("num_nodes: 1:30\n", "task.yaml:1: num_nodes is '1:30': expected a whole number"),
        ("a: &x [*x]\n", "task.yaml:1: these values contain themselves"),
        (BOMB, "task.yaml:5: more than 100,000 values, aliases expanded"),
        ("run: a\nname: \x07\n", "task.yaml:2: not YAML: a character"),
        ("", "task.yaml is empty: "),
        ("---\n---\n", "task.yaml is empty: "),
    ],
)
def test_mistakes_are_named_with_their_line(tmp_path: Path, content: str, message: str) -> None:
    assert complaint(tmp_path, content).startswith(message)


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "task.yaml"
    path.write_bytes(b"\x7fELF\xff\xfe")
    with pytest.raises(ConfigError, match="is not text in UTF-8"):
        load_tasks(path, {})

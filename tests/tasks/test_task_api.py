"""Task files, whole: what is in them arrives, what is wrong in them is named with its line."""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.core.errors import ConfigError, UsageError
from atoll.tasks.entrypoint import load_command, load_entrypoint, load_tasks
from atoll.tasks.resources import Resources
from atoll.tasks.sdk import launch
from atoll.tasks.spec import JobSpec
from atoll.tasks.task import Task, fixed_ports

TRAIN = """
    name: minGPT-ddp
    resources:
      cpus: 4+
      accelerators: L4
    num_nodes: 2
    setup: |
      git clone --depth 1 https://example.com/examples || true
      pip install -r requirements.txt
    run: |
      cd examples/mingpt
      MASTER_ADDR=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
      torchrun \\
      --nnodes=$SKYPILOT_NUM_NODES \\
      --master_addr=$MASTER_ADDR \\
      --master_port=8008 \\
      --node_rank=${SKYPILOT_NODE_RANK} \\
      main.py
"""
TITAN = """
    name: torchtitan
    resources:
      accelerators: {H100:8, H200:8}
      memory: 1024GB
    num_nodes: 2
    workdir: .
    envs:
      CONFIG_FILE: "./llama3_8b.toml"
      HF_TOKEN: ""
    run: torchrun --master_addr $A --master_port 8008 -m torchtitan.train --job.config_file $CONFIG_FILE
"""
WORKER = """
    workdir: .
    resources:
      accelerators: L40S:1
      memory: 1024+
      num_nodes: 2
    envs: {TORCHFT_LIGHTHOUSE: "", SOCKET_IFNAME: eth0}
    run: |
      pkill -f torchrun || true
      uv run ./run_train.sh --rdzv_endpoint="$MASTER_ADDR:29500" --bind=$HEAD_NODE_IP:29510
"""


def write(folder: Path, content: str, name: str = "task.yaml") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(content).lstrip("\n"))
    return str(path)


def load(folder: Path, content: str, **flags: object) -> Task:
    (task,) = load_tasks(write(folder, content), flags)
    return task


def complaint(folder: Path, content: str, **flags: object) -> str:
    with pytest.raises(ConfigError) as caught:
        load(folder, content, **flags)
    message = str(caught.value)
    assert "\n" not in message
    return message.removeprefix(f"{folder}/")


# ------------------------------------------------------------------------------------------- what arrives
def test_the_mingpt_task_becomes_a_job(tmp_path: Path) -> None:
    spec, secrets = load(tmp_path, TRAIN).job()
    assert (spec.name, spec.num_nodes, spec.accelerator, spec.num_accelerators) == ("minGPT-ddp", 2, "L4", 1)
    assert spec.setup is not None
    assert spec.setup.startswith("git clone")
    assert spec.run is not None
    assert "--node_rank=${SKYPILOT_NODE_RANK} \\\nmain.py" in spec.run
    assert spec.ports == (8008,)
    assert secrets == {}
    assert not spec.workdir
    assert JobSpec.from_json(spec.to_json()) == spec


def test_more_nodes_and_cards_by_flags(tmp_path: Path) -> None:
    task = load(tmp_path, TRAIN, num_nodes=4, accelerators="L4:4", cpus="8+")
    spec, _ = task.job()
    assert (spec.num_nodes, spec.accelerator, spec.num_accelerators) == (4, "L4", 4)
    assert task.resources.cpus == "8+"


def test_the_torchtitan_task_takes_its_token_from_the_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_sesame")
    task = load(tmp_path, TITAN, env=["HF_TOKEN", "CONFIG_FILE=70b.toml"], num_nodes=4)
    spec, secrets = task.job(infra="local")
    assert (spec.accelerator, spec.num_accelerators, spec.num_nodes) == ("H100", 8, 4)
    assert [str(each.requested[0]) for each in task.resources.choices()] == ["H100:8", "H200:8"]
    assert spec.env == {"CONFIG_FILE": "70b.toml"}
    assert spec.secret_names == ()  # by its name alone: logs hide its value where that looks like a secret
    assert secrets == {"HF_TOKEN": "hf_sesame"}
    assert spec.workdir
    assert "hf_sesame" not in f"{task!r} {task.to_yaml_config()} {spec}"
    assert task.notes_for("local") == []


def test_the_symphony_worker_with_num_nodes_in_its_resources(tmp_path: Path) -> None:
    task = load(tmp_path, WORKER, env=["FT_REPLICA_ID=1", "SOCKET_IFNAME=lo"])
    assert task.num_nodes == 2
    assert [note.removeprefix(f"{tmp_path}/") for note in task.notes] == [
        "task.yaml:5: resources.num_nodes belongs next to resources, not in it; it is used anyway"
    ]
    spec, _ = task.job()
    assert spec.env == {"TORCHFT_LIGHTHOUSE": "", "SOCKET_IFNAME": "lo", "FT_REPLICA_ID": "1"}
    assert spec.ports == (29500, 29510)


def test_every_key_is_taken(tmp_path: Path) -> None:
    task = load(
        tmp_path,
        """
        name: all.of-it
        workdir: {url: "https://example.com/r.git", ref: main}
        num_nodes: 3
        resources:
          infra: ssh/lab
          job_recovery: {strategy: FAILOVER, max_restarts_on_errors: 2, recover_on_exit_codes: [33, 34]}
        file_mounts:
          /data: s3://bucket/data
          ~/ckpt: {name: out, source: [a, b], store: s3, persistent: false, mode: mount_cached}
        volumes: {/mnt/v: my-volume, /mnt/w: {size: 10Gi}}
        envs: {A: 1}
        secrets: {B: b}
        setup: echo setup
        run: echo run
        config: {docker: {run_options: [-v]}, hooks: [{run: save, events: [stop], timeout: 10}]}
        event_callback: echo done
        inputs: {in: 1}
        outputs: {out: 1}
        managed_secrets: [x]
        file_mounts_mapping: {}
        volume_mounts: []
        api_server_access: false
        _metadata: {a: 1}
        """,
    )
    assert task.infra == "ssh/lab"
    spec, secrets = task.job()
    assert (spec.restarts.on_errors, spec.restarts.on_exit_codes) == (2, (33, 34))
    assert (spec.env, secrets) == ({"A": "1"}, {"B": "b"})
    assert task.file_mounts["~/ckpt"]["mode"] == "MOUNT_CACHED"
    notes = "\n".join(task.notes_for("ssh/lab"))
    for named in (
        "strategy",
        "volumes./mnt/v",
        "file_mounts.~/ckpt can't be a MOUNT_CACHED",
        "config ",
        "event_callback",
    ):
        assert named in notes
    again = Task.from_yaml_config(yaml.safe_load(yaml.safe_dump(task.to_yaml_config())), secrets_overrides={"B": "b"})
    assert again.to_yaml_config() == task.to_yaml_config()
    assert again.job() == task.job()


def test_anchors_merges_and_empty_values(tmp_path: Path) -> None:
    task = load(
        tmp_path,
        """
        _metadata: &env {A: one, B: two}
        setup:
        resources:
        envs:
          <<: *env
          B: three
        run: echo
        """,
    )
    assert task.envs == {"A": "one", "B": "three"}
    assert (task.setup, task.resources) == (None, Resources())


# ------------------------------------------------------------------------------------------- what is wrong
def test_lines_are_right_in_every_document(tmp_path: Path) -> None:
    assert complaint(tmp_path, "name: p\n---\nrun: a\n---\nrun: b\nnodes: 2\n").startswith("task.yaml:6: nodes: ")


def test_wrong_flags_are_named_as_flags(tmp_path: Path) -> None:
    assert complaint(tmp_path, TRAIN, num_nodes=0) == "--num-nodes is 0: expected a whole number from 1 to 4096"
    assert complaint(tmp_path, TRAIN, cpus="many").startswith("--cpus is 'many': expected a number of CPUs")
    assert complaint(tmp_path, TRAIN, disk_tier="hihg").startswith("--disk-tier is 'hihg': expected low, ")
    assert complaint(tmp_path, TRAIN, infra="locla").endswith("did you mean 'local'?")
    assert complaint(tmp_path, TRAIN, workdir=".", git_url="x").startswith("--workdir and --git-url")


def test_secrets_stay_out_of_messages(tmp_path: Path) -> None:
    for line in ("envs: {API_KEY: [sesame]}", "secrets: {A: [sesame]}", "secrets: {A: {b: sesame}}"):
        assert "sesame" not in complaint(tmp_path, line)
    assert "sesame" not in complaint(tmp_path, TRAIN, env=["2X=sesame"])
    assert "sesame" not in complaint(tmp_path, "num_nodes: https://me:sesame@host/\n")


# ------------------------------------------------------------------------------- files, commands, pipelines
def test_what_an_entrypoint_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, TRAIN, "train.yaml")
    write(tmp_path, TRAIN, "my train.yml")
    none = {}
    assert load_entrypoint("train.yaml", none)[0].name == "minGPT-ddp"
    assert load_entrypoint("my train.yml", none)[0].name == "minGPT-ddp"
    assert load_entrypoint("python x.py --config train.yaml", none)[0].run == "python x.py --config train.yaml"
    assert load_entrypoint("./run.sh", none)[0].run == "./run.sh"
    with pytest.raises(ConfigError, match=r"there is no file trian\.yaml: did you mean 'train.yaml'"):
        load_entrypoint("trian.yaml", none)
    (tmp_path / "demo").mkdir()
    write(tmp_path / "demo", TRAIN, "task.yaml")
    with pytest.raises(ConfigError, match=r"there is no file demo/tsk\.yaml: did you mean 'demo/task.yaml'"):
        load_entrypoint("demo/tsk.yaml", none)
    with pytest.raises(ConfigError, match="there is no folder nowhere"):
        load_entrypoint("nowhere/train.yaml", none)
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(ConfigError, match="is a folder"):
        load_entrypoint("folder.yaml", none)
    os.mkfifo("pipe.yaml")
    with pytest.raises(ConfigError, match=r"pipe\.yaml is a pipe, a socket or a device"):
        load_entrypoint("pipe.yaml", none)
    os.symlink("self.yaml", "self.yaml")
    with pytest.raises(ConfigError, match=r"self\.yaml is a broken link to self\.yaml"):
        load_entrypoint("self.yaml", none)
    with pytest.raises(ConfigError, match="nothing to run"):
        load_entrypoint("  ", none)


def test_half_a_character_is_refused_and_a_byte_of_the_command_line_is_not(tmp_path: Path) -> None:
    half = r"\ud83d, which is half a character: write the whole one itself"
    for line in (r'run: "echo \uD83D"', r'run: "echo \uD83D\uDE00"', r'workdir: "\uD83D"', r'envs: {A: "\uD83D"}'):
        assert complaint(tmp_path, f"num_nodes: 1\n{line}") == f"task.yaml:2: the text contains {half}"
    with pytest.raises(ConfigError, match=r"Task: run: the script contains \\ud83d"):
        Task(run="echo \ud83d")
    with pytest.raises(ConfigError, match=r"envs\.A: the value contains \\ud83d"):
        Task(envs={"A": "\ud83d"})
    byte = os.fsdecode(b"\xe9")
    task = load_command(f"echo {byte}", {"env": [f"A={byte}"]})
    assert (task.run, task.envs) == (f"echo {byte}", {"A": byte})


def test_a_command_with_flags() -> None:
    flags = {
        "name": "hi",
        "num_nodes": 2,
        "accelerators": "none",
        "env": ["A=b=c"],
        "infra": "ssh/lab",
        "ports": ["80"],
    }
    task = load_command("echo $A", flags)
    assert (task.name, task.num_nodes, task.run, task.envs) == ("hi", 2, "echo $A", {"A": "b=c"})
    assert (task.infra, task.resources.ports, task.job()[0].ports) == ("ssh/lab", ["80"], ())


def test_several_documents_are_a_pipeline(tmp_path: Path) -> None:
    path = write(tmp_path, "name: pipe\nexecution: serial\n---\nname: a\nrun: a\n---\nenvs: {X:}\nrun: b\n---\n")
    tasks = load_tasks(path, {"env": ["X=1"]})
    assert [(task.name, task.run, task.envs) for task in tasks] == [("a", "a", {"X": "1"}), ("pipe-1", "b", {"X": "1"})]
    with pytest.raises(ConfigError, match="holds 3 tasks, a pipeline"):
        Task.from_yaml(path)
    assert "this version runs the tasks of a file one after the other" in complaint(
        tmp_path, "name: g\nexecution: parallel\n---\nrun: a\n---\nrun: b\n"
    )


def test_a_git_workdir_by_flags(tmp_path: Path) -> None:
    base = "workdir: {url: 'https://example.com/r.git', ref: main}\nrun: x\n"
    assert load(tmp_path, base, git_ref="v2").workdir == {"url": "https://example.com/r.git", "ref": "v2"}
    assert load(tmp_path, base, workdir="here").workdir == "here"
    assert load(tmp_path, "run: x\n", git_url="u").workdir == {"url": "u"}
    assert complaint(tmp_path, "run: x\nworkdir: .\n", git_ref="v2").endswith("a git workdir needs its url")


# ------------------------------------------------------------------------------------------------- Python
def test_a_task_written_in_python(tmp_path: Path) -> None:
    task = Task("t", setup=["a", "b"], run="c", envs={"LR": 0.1}, secrets={"S": "s"}, workdir=tmp_path, num_nodes=2)
    assert task.set_resources(Resources(accelerators={"A40": 2}, cpus=4)) is task
    task.update_envs([("LR", 1), ("MY_TOKEN", "t")]).update_secrets({"S": "z"})
    spec, secrets = task.job()
    assert (spec.setup, spec.run, spec.env, spec.num_accelerators) == ("a\nb", "c", {"LR": "1"}, 2)
    assert secrets == {"S": "z", "MY_TOKEN": "t"}
    assert task.workdir == str(tmp_path)
    assert repr(task) == (
        "Task(name='t', num_nodes=2, Resources(cpus='4', accelerators='A40:2'), envs=['LR'], secrets=['S', 'MY_TOKEN'])"
    )
    task.set_resources([Resources(accelerators="H100"), Resources(accelerators="A100")])
    assert [str(each.requested[0]) for each in task.resources.choices()] == ["H100:1", "A100:1"]


def test_a_task_from_a_file_and_from_a_mapping(tmp_path: Path) -> None:
    path = write(tmp_path, "envs: {A:}\nsecrets: [S]\nrun: echo\n")
    task = Task.from_yaml(path, env_overrides={"A": 1}, secrets_overrides=[("S", "s")])
    assert (task.envs, task.secrets, task.run) == ({"A": "1"}, {"S": "s"}, "echo")
    task.set_resources({"num_nodes": 3, "cpus": 2})
    assert (task.num_nodes, task.resources) == (3, Resources(cpus=2))
    with pytest.raises(ConfigError, match=r"none\.yaml cannot be read: No such file"):
        Task.from_yaml(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match="Task is a list: expected keys"):
        Task.from_yaml_config([])  # type: ignore[arg-type]


def test_python_mistakes() -> None:
    with pytest.raises(UsageError, match="did you mean 'num_nodes'"):
        Task(num_node=2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="Task: num_nodes is '2'"):
        Task(num_nodes="2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"Task: envs\.A: no value"):
        Task.from_yaml_config({"envs": {"A": None}})
    with pytest.raises(ConfigError, match="A: no value"):
        Task().update_envs({"A": None})
    assert Task.from_yaml_config({"envs": {"A": None}}, env_overrides={"A": "x"}).envs == {"A": "x"}


def test_references_are_replaced_where_they_count() -> None:
    task = Task(
        workdir="$HOME_OF/x",
        envs={"HOME_OF": "/srv", "B": "bucket"},
        secrets={"S": "sesame"},
        file_mounts={"/d/${B}": "s3://$B/$OTHER", "/e": {"source": "s3://${S}/x"}},
        run="echo $B",
    )
    assert task.resolved_workdir() == "/srv/x"
    assert task.resolved_mounts() == {"/d/bucket": "s3://bucket/$OTHER", "/e": {"source": "s3://sesame/x"}}
    assert task.run == "echo $B"
    assert "sesame" not in str(task.to_yaml_config())


@pytest.mark.parametrize(
    ("script", "ports"),
    [
        ("torchrun --master_port=8008 x", (8008,)),
        ("torchrun --master-port 8008 x", (8008,)),
        ("torchrun --master_port \\\n  8008 x", (8008,)),
        ("export MASTER_PORT=6000", (6000,)),
        ("MASTER_PORT=${MASTER_PORT:-29501} x", (29501,)),
        ('torchrun --rdzv-endpoint "$HEAD:29500"', (29500,)),
        ("torchrun --rdzv_endpoint=[::1]:29500", (29500,)),
        ("x --bind=$IP:29510 --port 80", (80, 29510)),
        ("PORT=7000\nx --port $PORT", (7000,)),
        ("x --port ${PORT_OF}", (4242,)),
        ("torchrun --master_port=0 --port-range 80 --rdzv-endpoint=$HEAD --export 90", ()),
        ("# torchrun --master_port=8008\necho", ()),
        ("x --port 70000", ()),
    ],
)
def test_ports_that_scripts_fix(script: str, ports: tuple[int, ...]) -> None:
    assert fixed_ports(script, {"PORT_OF": "4242"}) == ports


NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=20)


@settings(max_examples=25)
@given(st.dictionaries(NAMES, TEXTS, max_size=4), st.none() | TEXTS, st.integers(1, 99))
def test_a_task_survives_its_own_yaml(envs: dict[str, str], run: str | None, num_nodes: int) -> None:
    task = Task(envs=envs, run=run, num_nodes=num_nodes)
    text = yaml.safe_dump(task.to_yaml_config())
    again = Task.from_yaml_config(yaml.safe_load(text), secrets_overrides=task.secrets)
    assert again.job() == task.job()
    assert {**task.envs, **task.secrets} == envs


@pytest.mark.parametrize(
    ("given", "hint"),
    [
        ("echo hi", "write sky.launch(sky.Task(run='echo hi'))"),
        ("train.py", "write sky.launch(sky.Task(run='python train.py', workdir='.'))"),
        ("nothere.py", "write sky.launch(sky.Task(run='nothere.py'))"),
        (Path("a/task.yaml"), "write sky.launch(sky.Task.from_yaml('a/task.yaml'))"),
        ({"run": "echo hi"}, "write sky.launch(sky.Task.from_yaml_config(config))"),
        ([Task(run="echo hi")], "write sky.launch(task)"),
        (None, "write sky.launch(sky.Task(run=...)), or sky.Task.from_yaml(path)"),
    ],
)
def test_what_is_not_a_task_says_how_to_write_one(given, hint, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(UsageError, match=r"sky.launch\(\) takes a sky.Task, not ") as raised:
        launch(given)
    assert hint in str(raised.value)

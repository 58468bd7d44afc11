"""``Task``: what every node of a cluster runs, from a task file or written in Python."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, StrictBool, Tag

from atoll.core.errors import ConfigError, UsageError
from atoll.core.secrets import is_secret
from atoll.core.validation import MOST_NODES, checks_arguments, command_line, suggests_keywords, unsendable
from atoll.providers import registry
from atoll.providers.base import DEFAULT
from atoll.tasks import dag
from atoll.tasks.environment import OF_PLACE
from atoll.tasks.resources import Hook, Resources
from atoll.tasks.schema import (
    BY_KIND,
    Document,
    Expected,
    Keys,
    Refused,
    Section,
    Text,
    TextOrKeys,
    check,
    one_of,
    read_documents,
    refused,
    whole,
)
from atoll.tasks.spec import LONGEST_NAME, JobSpec, is_name
from atoll.tasks.variables import (
    NAME,
    NAME_RULE,
    Given,
    shutdown_s,
    substitute,
)

Values = Mapping[str, Any] | Iterable[tuple[str, Any]]  # of variables
_HERE = Document("Task")
_WORKDIR = "~/sky_workdir"

# Where scripts fix a port that every job of the same text would listen on.
_FIXED_PORTS = re.compile(
    r"""(?: --(?:master[_-])?port [=\s]\s* | \bMASTER_PORT= | (?: --rdzv[_-]endpoint | --bind ) [=\s]\s* \S*: )
        ["']? (?:\$\{\w+:-)? (\d{1,5})\b""",
    re.X,
)
_COMMENT = re.compile(r"^\s*#.*$", re.M)
_NUMBER_ASSIGNED = re.compile(r"^\s*(?:export\s+)?(\w+)=(\d+)\s*$", re.M)


# ------------------------------------------------------------------------------------------------------- file
def _name(value: str) -> str:
    if not is_name(value):
        raise Expected(f"letters, digits and single . _ - between them, at most {LONGEST_NAME} characters")
    return value


def _script(text: str) -> str:
    wrong = unsendable(text)
    if wrong is not None:
        raise Refused(f"the script contains {wrong}")
    return text


def _target(target: str) -> str:
    if target.endswith("/"):
        raise Refused("a target ends without /")
    return target


def _variable_name(name: Any) -> str:
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        raise Refused(f"expected {NAME_RULE}")
    return name


def _variable_text(value: Any) -> str | None:
    if value is not None and not isinstance(value, (str, bool, int, float)):
        raise Refused("expected text or a number; put anything else in quotes")
    if value is not None and (wrong := unsendable(str(value))) is not None:
        raise Refused(f"the value contains {wrong}")
    return None if value is None else str(value)


def _by_name(value: Any) -> Any:
    if not isinstance(value, (list, tuple)):
        return value
    if not all(isinstance(name, str) for name in value):
        raise Expected("a list of names, or a mapping of names to values")
    return dict.fromkeys(name.removeprefix("secrets:") for name in value)


# Names with their text, as SkyPilot renders it; None where the value must come from outside.
Variables = dict[Annotated[str, PlainValidator(_variable_name)], Annotated[str | None, PlainValidator(_variable_text)]]
# The same, or a list of names (also ``secrets:NAME``) whose values come from outside.
Secrets = Annotated[Variables, BeforeValidator(_by_name)]
Name = Annotated[Text, AfterValidator(_name)]
_Script = Annotated[Text, AfterValidator(_script)]
_JobsOnly = Annotated[
    None, refused("this version runs jobs only, no services and pools: take this key out to run the task as a job")
]


class _GitWorkdir(Section):
    url: Text | None = None
    ref: Text | None = None


class _Storage(Section):
    name: Text | None = None
    source: Annotated[Annotated[Text, Tag("<text>")] | Annotated[list[Text], Tag("<other>")], BY_KIND] | None = None
    store: Text | None = None
    persistent: StrictBool | None = None
    mode: Annotated[str | None, one_of("MOUNT", "COPY", "MOUNT_CACHED")] = None
    config: Keys | None = None


_Source = Annotated[Annotated[Text, Tag("<text>")] | Annotated[_Storage, Tag("<other>")], BY_KIND]


class _Config(Section):
    docker: Keys | None = None
    nvidia_gpus: Keys | None = None
    ssh: Keys | None = None
    kubernetes: Keys | None = None
    gcp: Keys | None = None
    azure: Keys | None = None
    vast: Keys | None = None
    slurm: Keys | None = None
    active_workspace: Text | None = None
    hooks: list[Hook] | None = None


class TaskSection(Section):
    """A task as its file says it."""

    name: Name | None = None
    workdir: Annotated[Annotated[Text, Tag("<text>")] | Annotated[_GitWorkdir, Tag("<other>")], BY_KIND] | None = None
    num_nodes: Annotated[int | None, whole(1, MOST_NODES)] = None
    resources: Resources | None = None
    envs: Variables | None = None
    secrets: Secrets | None = None
    file_mounts: dict[Annotated[Text, AfterValidator(_target)], _Source] | None = None
    volumes: dict[Text, TextOrKeys] | None = None
    setup: _Script | None = None
    run: _Script | None = None
    service: _JobsOnly = None
    pool: _JobsOnly = None
    # Only a cloud's side acts on these, and no job here needs them.
    config: _Config | None = None
    event_callback: Text | None = None
    inputs: Keys | None = None
    outputs: Keys | None = None
    managed_secrets: Any = None
    file_mounts_mapping: Keys | None = None
    volume_mounts: Any = None
    api_server_access: StrictBool | None = None
    metadata: Keys | None = Field(default=None, alias="_metadata")


_KEYS = [field.alias or name for name, field in TaskSection.model_fields.items()]
_ELSEWHERE = _KEYS[_KEYS.index("config") :]


def _moved_up(document: Document, config: Any) -> tuple[Any, list[str]]:
    """``num_nodes`` inside ``resources``, as some task files have it, moved to where it belongs."""
    resources = config.get("resources") if isinstance(config, Mapping) else None
    if not isinstance(resources, Mapping) or "num_nodes" not in resources:
        return config, []
    inside, num_nodes = document.at("resources", "num_nodes"), resources["num_nodes"]
    if config.get("num_nodes", num_nodes) != num_nodes:
        raise ConfigError(
            f"{inside} is {num_nodes}: expected the same as num_nodes, which is {config['num_nodes']!r}; "
            "keep one of the two"
        )
    kept = {key: value for key, value in resources.items() if key != "num_nodes"}
    note = f"{inside} belongs next to resources, not in it; it is used anyway"
    return {**config, "num_nodes": num_nodes, "resources": kept}, [note]


# -------------------------------------------------------------------------------------------------------- Task
class Task:
    """What every node of a cluster runs: ``setup`` on each of its nodes, then ``run`` on ``num_nodes`` of them.

    Attributes:
        name: of the task and its jobs, or None.
        num_nodes: nodes that ``run`` runs on.
        setup, run: text of a bash script, or None.
        envs: variables of both scripts.
        secrets: variables whose values are hidden in messages, lists and records; every name that ends in TOKEN, KEY,
            SECRET or PASSWORD is one.
        workdir: a folder, or a git repository as ``{"url": …, "ref": …}``, or None.
        file_mounts: target on the node to source. ``$NAME`` in it, and in ``workdir``, is kept as written:
            ``resolved_mounts`` and ``resolved_workdir`` replace it.
        volumes: mount point to a cloud's volume.
        resources: what each node should be.
        notes: one line for each value that was read differently from how it was written.

    Raises:
        ConfigError: an invalid value.
        UsageError: an unknown keyword.
    """

    @suggests_keywords
    def __init__(
        self,
        name: str | None = None,
        *,
        setup: str | Sequence[str] | None = None,
        run: str | Sequence[str] | None = None,
        envs: Mapping[str, Any] | None = None,
        secrets: Mapping[str, Any] | Sequence[str] | None = None,
        workdir: str | os.PathLike[str] | Mapping[str, str] | None = None,
        num_nodes: int | None = None,
        file_mounts: Mapping[str, Any] | None = None,
        storage_mounts: Mapping[str, Any] | None = None,
        volumes: Mapping[str, Any] | None = None,
        resources: Resources | Mapping[str, Any] | Iterable[Resources] | None = None,
        config: Mapping[str, Any] | None = None,
        event_callback: str | None = None,
        api_server_access: bool | None = None,
    ) -> None:
        given = {
            key: value for key, value in locals().items() if key in TaskSection.model_fields and key != "resources"
        }
        given |= {"setup": _lines(setup), "run": _lines(run), "file_mounts": _merged(file_mounts, storage_mounts)}
        given["workdir"] = os.fspath(workdir) if isinstance(workdir, os.PathLike) else workdir
        self._fill(check(TaskSection, given, _HERE), _HERE, Given())
        if resources is not None:
            self.set_resources(resources)

    def _fill(self, checked: Mapping[str, Any], document: Document, given: Given) -> None:
        """Take over what was checked, with the variables that were given from outside."""
        self.name: str | None = checked.get("name")
        self.num_nodes: int = checked.get("num_nodes", 1)
        self.setup: str | None = checked.get("setup") or None
        self.run: str | None = checked.get("run") or None
        self.workdir: str | dict[str, str] | None = checked.get("workdir")
        self.file_mounts: dict[str, Any] = checked.get("file_mounts", {})
        self.volumes: dict[str, Any] = checked.get("volumes", {})
        self.resources = Resources.from_config(checked.get("resources", {}))
        self.notes: list[str] = []
        self._elsewhere = {key: value for key, value in checked.items() if key in _ELSEWHERE}
        self.envs, self.secrets = _split_secrets(document, checked.get("envs", {}), checked.get("secrets", {}), given)
        self._declared = {*checked.get("secrets", ()), *given.secrets}  # else its name made it one
        for target in self.file_mounts if self.workdir is not None else ():
            if target.rstrip("/") == _WORKDIR:
                why = "that is where workdir goes: mount into a folder below it"
                raise document.error("file_mounts", target, why=why)
        if isinstance(self.workdir, dict) and "url" not in self.workdir:
            raise document.error("workdir", why="a git workdir needs its url")
        if (within := dag.current()) is not None:
            within.add(self)

    @classmethod
    @checks_arguments
    def from_yaml(
        cls,
        path: str | Path,
        env_overrides: Values | None = None,
        secrets_overrides: Values | None = None,
    ) -> Task:
        """The task of a file; ``env_overrides`` and ``secrets_overrides`` win over its variables.

        Raises:
            ConfigError: the file has an invalid value; the message names the line.
        """
        documents = read_documents(Path(path).expanduser(), str(path))
        if len(documents) != 1:
            count = f"{len(documents)} tasks, a pipeline" if documents else "no task"
            raise ConfigError(
                f"{path} holds {count}: expected one task, or use `{command_line('atoll', 'launch', path)}`"
            )
        return cls.from_document(*documents[0], _given(env_overrides, secrets_overrides))

    @classmethod
    def from_yaml_config(
        cls,
        config: Mapping[str, Any],
        env_overrides: Values | None = None,
        secrets_overrides: Values | None = None,
    ) -> Task:
        """The task of a mapping with the keys of a task file."""
        return cls.from_document(config, _HERE, _given(env_overrides, secrets_overrides))

    @classmethod
    def from_document(
        cls,
        config: Any,
        document: Document,
        given: Given,
        top: Mapping[str, Any] = MappingProxyType({}),
        node: Mapping[str, Any] = MappingProxyType({}),
    ) -> Task:
        """The task of one document; ``top`` and ``node`` change its keys and its resources'."""
        config, notes = _moved_up(document, config)
        checked = check(TaskSection, config, document)
        workdirs = checked.get("workdir"), top.get("workdir")
        checked |= top
        if isinstance(workdirs[0], dict) and isinstance(workdirs[1], dict):
            checked["workdir"] = workdirs[0] | workdirs[1]  # `--git-ref` alone keeps the url
        task = cls.__new__(cls)
        task._fill(checked, document, given)
        if node:
            task.resources = task.resources.changed(node)
        changed = [_changed_text(document, key, checked.get(key, {}), given.names) for key in ("envs", "secrets")]
        task.notes = [*notes, *(line for line in changed if line)]
        return task

    def __rshift__(self, after: Task) -> Task:
        """Has ``after`` run behind this one, inside of ``with sky.Dag()``; gives ``after``."""
        within = dag.current()
        if within is None:
            raise UsageError("task >> task: write it inside of `with sky.Dag() as dag:`")
        within.add_edge(self, after)
        return after

    @property
    def infra(self) -> str:
        """The infra it requests; ``local`` by default."""
        return self.resources.infra or self.resources.choices()[0].infra or DEFAULT

    @property
    def config(self) -> dict[str, Any]:
        """What is said to single infras, by their kind: ``{"slurm": {"sbatch_options": {"time": "1:00:00"}}}``."""
        return dict(self._elsewhere.get("config") or {})

    @property
    def variables(self) -> dict[str, str]:
        """Envs and secrets together."""
        return {**self.envs, **self.secrets}

    def update_envs(self, envs: Values) -> Task:
        """Set variables; returns the task."""
        return self._update(Given(envs=_complete("envs", envs)))

    def update_secrets(self, secrets: Values) -> Task:
        """Set secrets; returns the task."""
        return self._update(Given(secrets=_complete("secrets", secrets)))

    def _update(self, given: Given) -> Task:
        self.envs, self.secrets = _split_secrets(_HERE, self.envs, self.secrets, given)
        self._declared |= given.secrets.keys()
        return self

    def set_resources(self, resources: Resources | Mapping[str, Any] | Iterable[Resources]) -> Task:
        """Set the resources of each node; of a list the first available, of a set any. Returns the task."""
        if isinstance(resources, Resources):
            self.resources = resources
        elif isinstance(resources, Mapping):
            config, _ = _moved_up(_HERE, {"resources": resources})
            self.num_nodes = config.get("num_nodes", self.num_nodes)
            self.resources = Resources.from_config(config["resources"])
        else:
            given: object = resources  # whatever it is
            each_of = list(given) if isinstance(given, (list, tuple, set, frozenset)) else [given]
            if isinstance(given, (set, frozenset)):
                each_of.sort(key=repr)  # a set has no order that lasts
            configs = [each.config for each in each_of if isinstance(each, Resources)]
            if len(configs) < len(each_of):
                expected = "sky.Resources(...), a mapping, or a list or set of sky.Resources"
                raise ConfigError(f"Task: resources={given!r:.60}: expected {expected}")
            self.resources = Resources.from_config(
                {"ordered" if isinstance(given, (list, tuple)) else "any_of": configs}
            )
        return self

    def set_resources_override(self, override: Mapping[str, Any]) -> Task:
        """Change some keys of its resources, also in their alternatives. Returns the task."""
        self.resources = self.resources.copy(**override)
        return self

    def set_file_mounts(self, file_mounts: Mapping[str, Any] | None) -> Task:
        """Set what is copied to the nodes besides the workdir: targets and their sources. Returns the task."""
        checked = check(TaskSection, {"file_mounts": None if file_mounts is None else dict(file_mounts)}, _HERE)
        self.file_mounts = checked.get("file_mounts", {})
        return self

    def update_file_mounts(self, file_mounts: Mapping[str, Any]) -> Task:
        """Add to what is copied to the nodes, or replace parts of it. Returns the task."""
        return self.set_file_mounts({**self.file_mounts, **file_mounts})

    def resolved_workdir(self) -> str | dict[str, str] | None:
        """``workdir`` with its ``$NAME`` replaced."""
        resolved: str | dict[str, str] | None = substitute(self.workdir, self.variables)
        return resolved

    def resolved_mounts(self) -> dict[str, Any]:
        """``file_mounts`` with their ``$NAME`` replaced."""
        resolved: dict[str, Any] = substitute(self.file_mounts, self.variables)
        return resolved

    def notes_for(self, infra: str) -> list[str]:
        """``notes``, and one line for each thing that ``infra`` can't honour."""
        lines = [*self.notes, *self.resources.honours(infra)]
        if not registry.is_known(infra):
            return lines
        lines += [
            f"{name} can't be given on {infra}: it is the node's own"
            for name in OF_PLACE
            if name in self.envs or name in self.secrets
        ]
        lines += [f"volumes.{mount} has no effect on {infra}: only clouds have volumes" for mount in self.volumes]
        for target, source in self.file_mounts.items():
            mode = source.get("mode", "MOUNT") if isinstance(source, dict) else "COPY"
            if mode != "COPY":
                instead = "it is copied" if source.get("source") else "it is an empty folder of each node"
                lines.append(f"file_mounts.{target} can't be a {mode} on {infra}: {instead}, and not written back")
        # True is what api_server_access is without being said.
        others = [key for key, value in self._elsewhere.items() if (key, value) != ("api_server_access", True)]
        if self.config.keys() == {infra.partition("/")[0]}:  # its provider sees to it
            others.remove("config")
        return lines + [f"{key} has no effect on {infra}: only clouds' jobs know it" for key in others]

    def job(self, *, infra: str | None = None) -> tuple[JobSpec, dict[str, str]]:
        """The job that runs this task on ``infra``, and its secrets apart."""
        taken = self.resources.choice(infra or self.infra)
        kind = taken.requested[0] if taken.requested else None
        spec = JobSpec(
            name=self.name,
            num_nodes=self.num_nodes,
            setup=self.setup,
            run=self.run,
            env=dict(self.envs),
            secret_names=tuple(sorted(self._declared)),
            accelerator=kind.name if kind else None,
            num_accelerators=kind.num_accelerators if kind else 0,
            ports=fixed_ports(f"{self.setup or ''}\n{self.run or ''}", self.envs),
            restarts=taken.restarts,
            workdir=self.workdir is not None,
            grace_s=shutdown_s(self.envs),
        )
        return spec, dict(self.secrets)

    def to_yaml_config(self) -> dict[str, Any]:
        """The task as a task file; secrets without their values, so that they must be given again."""
        config = {
            "name": self.name,
            "workdir": self.workdir,
            "num_nodes": self.num_nodes if self.num_nodes > 1 else None,
            "resources": self.resources.to_yaml_config(),
            "envs": dict(self.envs),
            "file_mounts": dict(self.file_mounts),
            "volumes": dict(self.volumes),
            "setup": self.setup,
            "run": self.run,
            **self._elsewhere,
        }
        config = {key: value for key, value in config.items() if value is not None and value != {}}
        return {**config, "secrets": dict.fromkeys(self.secrets)} if self.secrets else config

    def __repr__(self) -> str:
        parts = [f"name={self.name!r}", f"num_nodes={self.num_nodes}", repr(self.resources)]
        parts += [f"{key}={list(names)}" for key, names in (("envs", self.envs), ("secrets", self.secrets)) if names]
        return f"Task({', '.join(parts)})"


def _changed_text(document: Document, key: str, values: Mapping[str, str | None], given: Collection[str]) -> str | None:
    """One line naming the variables of ``key`` whose text is not what the file shows, but for those given; or None."""
    changes = []
    for name, value in values.items():
        shown = document.shown(key, name)
        if name not in given and value is not None and shown not in (None, value):
            secret = is_secret(name) or key == "secrets"
            changes.append(name if secret else f"{name}: {shown} is {value}")
    if not changes:
        return None
    return f"{document.at(key)}: YAML changes the text of some values (quotes keep it): {', '.join(changes)}"


def _split_secrets(
    document: Document, envs: Mapping[str, str | None], secrets: Mapping[str, str | None], given: Given
) -> tuple[dict[str, str], dict[str, str]]:
    """What the scripts see: variables, and secrets apart.

    A name that is declared as a secret, given as one or looks like one is a secret.

    Raises:
        ConfigError: a declared name that nobody gave a value; it names the flag that does.
    """
    values: dict[str, str | None] = {**envs, **{name: value for name, value in secrets.items() if value is not None}}
    values = {**dict.fromkeys(secrets), **values, **given.envs, **given.secrets}
    hidden = {name for name in values if name in secrets or name in given.secrets or is_secret(name)}
    complete = {}
    for name, value in values.items():
        if value is None:
            key, flag = ("secrets", "--secret") if name in secrets else ("envs", "--env")
            why = f"no value: give one with {flag} {name}=…, or {flag} {name} for that of your shell"
            raise document.error(key, name, why=why)
        complete[name] = value
    shown = {name: value for name, value in complete.items() if name not in hidden}
    return shown, {name: value for name, value in complete.items() if name in hidden}


def _merged(mounts: Any, storage: Any) -> Any:
    """Both kinds of mounts together; what is no mapping stays as it is, to be refused."""
    given = [each for each in (mounts, storage) if each is not None]
    wrong = [each for each in given if not isinstance(each, Mapping)]
    return wrong[0] if wrong else {key: value for each in given for key, value in each.items()} or None


def _lines(script: str | Sequence[str] | None) -> Any:
    """A script that may have been given line by line."""
    if isinstance(script, (list, tuple)) and all(isinstance(line, str) for line in script):
        return "\n".join(script)
    return script


def _complete(key: str, values: Values) -> dict[str, str]:
    """Variables given in Python, as text; none may be without a value."""
    try:
        pairs = dict(values)
    except (TypeError, ValueError):
        raise ConfigError(f"Task: {key}: expected a mapping of names to text or numbers, or pairs of them") from None
    found: dict[str, str] = check(TaskSection, {key: pairs}, _HERE)[key]
    for name, value in found.items():
        if value is None:
            raise _HERE.error(key, name, why="no value: give text or a number")
    return found


def _given(envs: Any, secrets: Any) -> Given:
    return Given(_complete("envs", envs or {}), _complete("secrets", secrets or {}))


def fixed_ports(script: str, variables: Mapping[str, str]) -> tuple[int, ...]:
    """Ports that a script's text fixes for itself: ``--master_port=8008``, ``--rdzv_endpoint=$HEAD:29500``, …

    ``$NAME`` counts where ``variables`` or a line ``NAME=8008`` of the script say what it is.
    """
    script = f"{_COMMENT.sub('', script)}\nMASTER_PORT={variables.get('MASTER_PORT', '')}".replace("\\\n", " ")
    script = substitute(script, {**variables, **dict(_NUMBER_ASSIGNED.findall(script))})
    return tuple(sorted({int(port) for port in _FIXED_PORTS.findall(script) if 1 <= int(port) <= 65535}))

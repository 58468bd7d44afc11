"""The launch path of ``launch``, ``exec``, ``run`` and ``train``: decide, provision, sync, submit."""

from __future__ import annotations

import contextlib
import os
import secrets as random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from atoll.core.errors import AtollError, ConfigError, ProvisionError
from atoll.core.validation import command_line
from atoll.images.interpreters import user_path
from atoll.providers import registry
from atoll.providers.base import DEFAULT
from atoll.tasks import clusters, lifecycle, placing, reaper, record, supervisor
from atoll.tasks.jobs import Job
from atoll.tasks.placing import Decision, accelerators_text, decide_any
from atoll.tasks.requests import JobRequest, Options
from atoll.tasks.spec import ClusterSpec, ClusterStatus, JobSpec, JobStatus

# What an interpreter, a compiler or a network behind a proxy needs of the caller's environment to be the same there.
_INHERITED = (
    *("PATH", "VIRTUAL_ENV", "CONDA_PREFIX", "CONDA_DEFAULT_ENV", "LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_HOME"),
    *("CUDA_VISIBLE_DEVICES", "LANG", "LC_ALL", "TZ", "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"),
    *("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
)


def launch(
    requests: Sequence[JobRequest], name: str, options: Options, earlier: Sequence[Job] | None = None
) -> list[Job]:
    """Start one job per request, or one per variant of the only request, on a cluster that is made, reused or resized.

    Args:
        requests: of several, each starts when the one before has succeeded (see ``reason_not_together``).
        name: of the cluster.
        options: how.
        earlier: jobs of the pipeline that ``requests`` continue; None where there is none.

    Raises:
        UnknownCluster: there is no such cluster, and it is to be used as it is.
        ConfigError: a request, the name or the infra can't work, or the cluster is too small and busy.
        ProvisionError: a node can't be used or written to, or no supervisor could be started. Of a request that
            something else would do for as well, all that would do have failed.
    """
    refresh_record(name, options)
    jobs: list[Job] = []
    decisions: list[Decision] = []
    try:
        with clusters.locked(name, options.command, options.say), registry.kept():
            before = clusters.find(name)
            is_up = before is not None and before.status is ClusterStatus.UP and not before.is_awaited
            if before is not None and is_up and not options.as_it_is:  # all hosts at once
                any_gpus = replace(before.request(), accelerators=())
                registry.of(before.allocation).plan(any_gpus, before.allocation)
            decisions = decide_cluster(requests, name, options)
            _check_cost(decisions[-1], options)
            for line in announcement(requests, decisions) if options.announce else decisions[-1].lines:
                options.say(line)
            specs = make_jobs(requests, decisions)
            with rolled_back(name, before, jobs, options):
                cluster = provision(decisions[-1].cluster, before, requests, options)
                specs = install_packages(cluster, requests, specs, options)
                workdir, excluded, mounts = files_of(requests)
                if workdir is not None or mounts:
                    from atoll.tasks.sync.task_files import ship

                    ship(cluster, workdir, mounts, say=options.say, progress=options.progress, excluded=excluded)
                submit_jobs(cluster, specs, options, earlier, jobs)
    except ProvisionError as error:
        if (rest := _alternatives(requests, name, decisions)) is None:
            raise
        tried = decisions[-1].cluster.infra
        options.say(f"{tried} failed, trying {rest.resources.infra or DEFAULT}: {error}")
    else:
        return jobs
    return launch([rest], name, options, earlier)


def _alternatives(requests: Sequence[JobRequest], name: str, decisions: Sequence[Decision]) -> JobRequest | None:
    """The only request without the infra that has failed, for a cluster that there is not yet."""
    have = clusters.find(name)
    if len(requests) > 1 or not decisions or not (have is None or have.status is ClusterStatus.DOWN):
        return None
    tried = decisions[-1].cluster.infra
    wanted = requests[0].resources, *requests[0].others
    left = tuple(each for each in wanted if (each.infra or DEFAULT) != tried)
    return replace(requests[0], resources=left[0], others=left[1:]) if left else None


def plan(requests: Sequence[JobRequest], name: str, options: Options) -> list[Decision]:
    """What ``launch`` would use of a cluster, or make of it, for each request; changes nothing.

    Raises:
        UnknownCluster, ConfigError: as ``launch``.
    """
    from atoll.tasks.sync.task_files import check_sources

    refresh_record(name, options)
    decisions = decide_cluster(requests, name, options)
    _check_cost(decisions[-1], options)
    make_jobs(requests, decisions)
    for request in requests:
        if request.workdir is not None or request.mounts:
            check_sources(request.workdir, request.mounts)
    return decisions


def announcement(requests: Sequence[JobRequest], decisions: Sequence[Decision]) -> list[str]:
    """What the user is told before jobs start: where they run, and what differs from what they ask for."""
    lines = []
    for number, (request, decision) in enumerate(zip(requests, decisions, strict=True), 1):
        if len(requests) > 1:
            lines.append(f"Task {number} of {len(requests)}: {request.name or 'unnamed'}")
        lines += [_cluster_text(request, decision), *decision.lines, *request.notes(decision.cluster.infra)]
        lines += _offer_lines(decision)
    return lines


def _check_cost(decision: Decision, options: Options) -> None:
    """Refuse a limit of costs that nobody could keep."""
    is_known = decision.hourly_cost is not None or decision.cluster.allocation.hourly_cost is not None
    if options.max_cost is not None and not is_known:
        where = decision.cluster.infra
        raise ConfigError(
            f"--max-cost {options.max_cost:g}: what {where} costs is not known, or nothing is rented there"
        )


def _offer_lines(decision: Decision) -> list[str]:
    """What a new cluster costs, and what else would do."""
    lines = []
    for each in (decision, *decision.others):
        start = "" if each is decision else "or "
        if each.offer is None:
            lines += [] if each is decision else [f"{start}{each.cluster.infra}"]
            continue
        cost = "" if each.hourly_cost is None else f"; ${each.hourly_cost:.2f}/h in all"
        missing = f". It can't be started yet: {each.offer.missing}" if each.offer.missing else ""
        lines.append(f"{start}{each.offer}{cost}{missing}")
    return lines


def _cluster_text(request: JobRequest, decision: Decision) -> str:
    cluster = decision.cluster
    used = accelerators_text(decision.accelerator, decision.num_accelerators)
    what = accelerators_text(cluster.accelerator, cluster.num_accelerators)
    if cluster.num_accelerators:
        what += " per node" + (", simulated" if cluster.simulated else "")
    if cluster.num_accelerators > decision.num_accelerators:
        what += f"; the task uses {used}"
    num_nodes = request.resources.num_nodes
    nodes = f"{num_nodes} node" + ("s" if num_nodes > 1 else "")
    if num_nodes < cluster.num_nodes:
        nodes += f" of {cluster.num_nodes}"
    return f"Cluster {cluster.name} on {cluster.infra}: {nodes}, {what}"


# ------------------------------------------------------------------------------------------------------- the steps
def refresh_record(name: str, options: Options) -> None:
    """Bring the record of a cluster that exists in line with what is."""
    have = clusters.load(name, to_run=True) if options.as_it_is else clusters.find(name)
    if have is not None:
        lifecycle.refresh(have)


def decide_cluster(requests: Sequence[JobRequest], name: str, options: Options) -> list[Decision]:
    """For each request, what the cluster is for it and those before."""
    have = clusters.up_or_stopped(name) if options.as_it_is else clusters.find(name)
    if options.as_it_is and have is not None and have.status is ClusterStatus.STOPPED:
        raise clusters.ClusterNotUp(f"cluster {name} is stopped; `{command_line('atoll', 'start', name)}` restarts it")
    busy = [] if have is None or options.as_it_is else clusters.unfinished(have)
    decisions = []
    for request in requests:
        wanted = (request.resources, *request.others)
        decision = decide_any(name, have, wanted, busy, in_order=request.in_order)
        if options.as_it_is and decision.changed:
            missing = decision.lines[0].partition(": ")[2]
            raise ConfigError(
                f"cluster {name} has less than the task needs ({missing}): "
                f"`{command_line('atoll', 'launch', '-c', name, 'TASK')}` resizes it"
            )
        have = decision.cluster
        decisions.append(decision)
    return decisions


Specs = list[tuple[JobSpec, Mapping[str, str]]]  # of each job, its secrets apart


def make_jobs(requests: Sequence[JobRequest], decisions: Sequence[Decision]) -> Specs:
    """The jobs, with the accelerators that were decided on."""
    specs: Specs = []
    for request, decision in zip(requests, decisions, strict=True):
        spec, secrets = request.make(decision.cluster)
        if spec.managed is not None:  # it asks for them where it is launched
            specs.append((spec, secrets))
            continue
        spec = replace(
            spec,
            accelerator=decision.accelerator,
            num_accelerators=decision.num_accelerators,
            simulated=decisions[-1].cluster.simulated,  # seen as ATOLL_SIMULATED also by jobs that ask for no GPU
        )
        specs.append((spec, secrets))
    return specs


def provision(
    cluster: ClusterSpec, before: ClusterSpec | None, requests: Sequence[JobRequest], options: Options
) -> ClusterSpec:
    """Check the hosts, choose the supervisor's machine, and write the cluster's record."""
    if options.as_it_is:
        return cluster
    autostop = next((each.autostop for each in requests if each.autostop is not None), None)
    if options.idle_minutes is not None or options.down:
        autostop = options.idle_minutes or 0, options.down
    is_new = before is None or before.status is ClusterStatus.DOWN
    if autostop is not None and is_new:  # at once: whoever looks after this process was killed takes it down
        cluster = replace(cluster, **lifecycle.autostop_fields(autostop[0], down=autostop[1]))
    if options.max_cost is not None:
        cluster = replace(cluster, max_cost=options.max_cost)
    owner = reaper.owner_of(clusters.folder_of(cluster.name))
    recheck = before is None or before.status is not ClusterStatus.UP or _has_lost_nodes(before)
    cluster = placing.provision(
        cluster,
        before,
        owner,
        options.say,
        options.given_up,
        here=options.from_here,
        recheck=recheck,
        on_allocated=lambda made: clusters.save(made, before),
    )
    site = _site_text(cluster)
    if before is not None and is_new and _site_text(before) != site:
        at = _site_text(before)
        options.say(f"earlier jobs of cluster {cluster.name} and their logs stay on {at}; job numbers start again at 1")
    if not cluster.allocation.supervised_here:
        from atoll.tasks import remote_control

        as_there = replace(cluster, allocation=registry.of(cluster.allocation).at_site(cluster.allocation))
        if job_ids := remote_control.control(cluster).create(as_there, anew=is_new):
            which = f"job{'s' * (len(job_ids) > 1)} {', '.join(map(str, sorted(job_ids)))}"
            verb = "were" if len(job_ids) > 1 else "was"
            options.say(f"{which} of cluster {cluster.name} still ran on {site} and {verb} ended")
    if cluster != before or not cluster.allocation.shares_machine:  # a head whose home is this one's writes it, too
        clusters.save(cluster, before)
    # A process here whose job it is may be killed, and nobody look at what it held.
    if cluster.allocation.is_rented or (options.from_here and registry.of(cluster.allocation).ends_with_driver):
        supervisor.watch(clusters.folder_of(cluster.name), alone=True)
    if autostop is not None and not is_new:
        lifecycle.set_autostop(cluster, autostop[0], down=autostop[1])
    return cluster


def _has_lost_nodes(cluster: ClusterSpec) -> bool:
    """Did its newest job fail for another reason than its own?"""
    with contextlib.suppress(LookupError, ProvisionError):  # it has had none
        return clusters.control_of(cluster).job(None).status is JobStatus.FAILED_DRIVER
    return False


def _site_text(cluster: ClusterSpec) -> str:
    """The machine that its supervisor runs on; where nodes share their files, all of them have its jobs."""
    allocation = cluster.allocation
    if allocation.supervised_here:
        return "this machine"
    return cluster.infra if allocation.files == "shared" else allocation.head.name


def install_packages(cluster: ClusterSpec, requests: Sequence[JobRequest], specs: Specs, options: Options) -> Specs:
    """Install the requests' packages on hosts that lack them; the jobs with the Python and import path of the hosts.

    Raises:
        ImageError: a package can't be installed.
        ProvisionError: the hosts have their Python or the packages in different places.
    """
    packages = [each for request in requests for each in request.packages]
    if not packages or cluster.allocation.shares_machine:
        return specs
    from atoll.images.image import Image
    from atoll.images.remote_build import build
    from atoll.tasks.nodes import plan_of

    plans = build(registry.of(cluster.allocation), plan_of(cluster).nodes, Image(), packages, options.say)
    found = {(plan.python, ":".join(plan.import_path)) for plan in plans}
    if len(found) > 1:
        raise ProvisionError(f"hosts have Python and packages in different places: {sorted(found)}")
    ((python, path),) = found
    return [
        (replace(spec, command=(python, *(spec.command or ())[1:]), env={"PYTHONPATH": path, **spec.env}), secrets)
        for spec, secrets in specs
    ]


def files_of(requests: Sequence[JobRequest]) -> tuple[str | Mapping[str, str] | None, str | None, dict[str, Any]]:
    """The workdir of requests, the folder in it that is not copied, and their file_mounts."""
    first = next((each for each in requests if each.workdir is not None), None)
    mounts = {target: source for each in requests for target, source in each.mounts.items()}
    return (None, None, mounts) if first is None else (first.workdir, first.excluded, mounts)


def submit_jobs(
    cluster: ClusterSpec, specs: Specs, options: Options, earlier: Sequence[Job] | None, jobs: list[Job]
) -> None:
    """Add the jobs to the cluster, and to ``jobs``."""
    control = clusters.control_of(cluster)
    setup = options.setup and not options.as_it_is and not (options.fast and control.cluster().is_set_up)
    base_env = {name: os.environ[name] for name in _INHERITED if name in os.environ} | {"PATH": user_path()}
    group = f"sweep-{random.token_hex(2)}" if options.variants else None
    in_pipeline = len(specs) > 1 or earlier is not None
    task_ids = [job.row().task_id for job in earlier or ()]
    for number, (made, secrets) in enumerate(specs, 1):
        spec = replace(made, setup=made.setup if setup else None)
        if (
            cluster.allocation.shares_machine and not made.inherit_env and not made.base_env
        ):  # other machines have paths of their own
            spec = replace(spec, base_env=base_env)
        if in_pipeline:
            env = {**spec.env, "SKYPILOT_TASK_IDS": "\n".join(task_ids)}
            spec = replace(spec, env=env, after=jobs[-1].id if jobs else None)
        for rank, labels in enumerate(options.variants or [{}]):
            one = replace(spec, key=made.key or random.token_hex(8))  # a connection may be lost before the answer comes
            if group is not None:
                one = replace(
                    one,
                    env={**spec.env, **labels},
                    labels=labels,
                    group=group,
                    rank_in_group=rank,
                    num_in_group=len(options.variants),
                    parallel=options.parallel,
                )
            jobs.append(Job(cluster.name, control.submit(one, secrets)))
        if number < len(specs):
            task_ids.append(jobs[-1].row().task_id)


@contextlib.contextmanager
def rolled_back(name: str, before: ClusterSpec | None, jobs: Sequence[Job], options: Options) -> Iterator[None]:
    """When the launch fails, cancel its jobs and remove a cluster that it has made. The launch lock is held."""
    try:
        yield
    except BaseException:
        try:
            if jobs:  # not all that were asked for
                clusters.control_of(clusters.load(name)).cancel([job.id for job in jobs])
            elif before is None or before.status is ClusterStatus.DOWN or before.is_awaited:
                lifecycle.rollback_cluster(name, before)
        except (AtollError, OSError) as error:  # why the launch failed is what has to be seen
            options.say(f"cluster {name}: {error}; {record.removes(name)}")
        raise

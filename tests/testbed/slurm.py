"""A real Slurm on the hosts of a testbed: the controller and login node on h1, one ``slurmd`` on each other host."""

from __future__ import annotations

import shutil

from testbed.hosts import USER, Testbed, _until

_PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun")
_CONF = """ClusterName=testbed
SlurmctldHost=h1
SlurmUser=root
AuthType=auth/munge
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
SlurmdTimeout=15
KillWait=5
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmdSpoolDir=/var/spool/slurmd
StateSaveLocation=/var/spool/slurmctld
SlurmctldLogFile=/var/log/slurmctld.log
SlurmdLogFile=/var/log/slurmd.log
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=1000
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=h[2-{last}] CPUs=8 RealMemory=16000 Gres=gpu:L4:{num_gpus} State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
_START = """mkdir -p /etc/slurm /run/munge /run/gpus /var/spool/slurmd /var/spool/slurmctld
cat > /etc/slurm/slurm.conf <<'END'
{conf}END
echo 'NodeName=h[2-{last}] Name=gpu Type=L4 File=/run/gpus/nvidia[0-{last_gpu}]' > /etc/slurm/gres.conf
printf 'CgroupAutomount=no\\nCgroupPlugin=cgroup/v1\\n' > /etc/slurm/cgroup.conf
for number in $(seq 0 {last_gpu}); do mknod /run/gpus/nvidia$number c 195 $number; done
chown -R munge: /run/munge /etc/munge /var/lib/munge /var/log/munge; chmod 711 /run/munge
setpriv --reuid munge --regid munge --clear-groups munged"""


def slurm_missing() -> str | None:
    """Why there can be no Slurm here, or None."""
    lacking = [program for program in _PROGRAMS if shutil.which(program) is None]
    return f"the testbed's Slurm needs {', '.join(lacking)}: apt-get install slurm-wlm munge" if lacking else None


def start_slurm(bed: Testbed, num_gpus: int = 2) -> None:
    """Start its daemons, and wait until every node, with so many GPUs, is idle."""
    last = len(bed.hosts)
    for host in bed.hosts:
        host.run(_START.format(conf=_CONF.format(last=last, num_gpus=num_gpus), last=last, last_gpu=num_gpus - 1))
    bed.hosts[0].run("slurmctld")
    for host in bed.hosts[1:]:
        host.run("slurmd")
        host.give_gpus(num_gpus)
    idle = f"debug*|{last - 1}|idle"
    _until(lambda: idle in bed.hosts[0].run("sinfo -h -o '%P|%D|%T'", user=USER), "every node of Slurm is idle")

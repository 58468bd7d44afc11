"""However the driver ends, nothing of its pools is left: no process, no file, no shared memory."""

from __future__ import annotations

import contextlib
import gc
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.pools import (
    NAMESPACE,
    SOURCE_ROOT,
    agent_pid,
    assert_usable,
    command,
    eventually,
    of_pool,
    rank_pid,
    ranks_answer,
    read_terminal,
    script,
    start_script,
    up_with_ttl,
    with_marker,
)

import atoll as sky
import leaks

BUSY = """
import os, subprocess, sys, threading, time
import atoll as sky

MARKER = {marker!r}

@sky.compute
def busy():
    import os, subprocess, sys, tempfile, time
    sleeper = [sys.executable, "-S", "-c", "import time; time.sleep(300)", MARKER]
    subprocess.Popen(sleeper)
    subprocess.Popen(sleeper, env={{}})
    subprocess.Popen(["setsid", *sleeper])
    subprocess.Popen(["setsid", *sleeper], env={{"PATH": os.environ["PATH"]}})
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execve(sleeper[0], sleeper, {{}})
        os._exit(0)
    tempfile.mkstemp()
    open({ready!r} + str(sky.instance_info().rank), "w").close()
    time.sleep(300)

{before}
with sky.ComputePool(nodes=2) as pool:
    open({ready!r} + "id", "w").write(pool.id)
    {during}
"""


class Driver:
    """A script with a busy pool."""

    def __init__(self, tmp_path: Path, before: str = "", during: str = "busy() @ pool", **options: Any) -> None:
        self.marker = f"marker-{os.getpid()}-{time.monotonic_ns()}"
        self.tmp = Path(tempfile.mkdtemp())  # short: DataLoader workers put sockets there
        ready = tmp_path / "ready-"
        text = BUSY.format(marker=self.marker, ready=str(ready), before=before, during=during)
        self.process = start_script(script(tmp_path, text), self.tmp, **options)
        try:
            eventually(lambda: all((tmp_path / f"ready-{n}").exists() for n in ("0", "1")), "busy ranks", 60)
            # Each rank starts five sleepers; one of them forks twice.
            eventually(lambda: len(with_marker(self.marker)) >= 10, "all sleepers", 60)
        except BaseException:
            self.process.kill()
            raise
        self.pool_id = (tmp_path / "ready-id").read_text()
        assert of_pool(self.pool_id)

    def gone(self) -> bool:
        return not of_pool(self.pool_id) and not with_marker(self.marker) and not os.listdir(self.tmp)

    def assert_nothing_left(self) -> None:
        eventually(
            self.gone,
            f"nothing left; still there: {of_pool(self.pool_id)} {with_marker(self.marker)} {os.listdir(self.tmp)}",
        )

    def close(self) -> str:
        out, err = self.process.communicate(timeout=30) if self.process.stderr else ("", "")
        shutil.rmtree(self.tmp)  # empty, unless the agents were killed too
        return str(out) + str(err)


def test_a_killed_driver(mode: str, tmp_path: Path) -> None:
    driver = Driver(tmp_path)
    driver.process.kill()
    driver.process.wait(30)
    driver.assert_nothing_left()
    driver.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_ends_the_driver(tmp_path: Path, number: signal.Signals) -> None:
    driver = Driver(tmp_path)
    driver.process.send_signal(number)
    driver.process.wait(30)
    driver.assert_nothing_left()
    text = driver.close()
    if number == signal.SIGINT:
        assert "KeyboardInterrupt" in text
        assert "WorkerDied" not in text


def test_the_drivers_agent_is_killed_with_it(mode: str, tmp_path: Path) -> None:
    """Both at once, as a memory-hungry machine or `kill -9 -1` would."""
    if mode == "subreaper":
        pytest.skip("without a namespace nobody is left to find sleepers that dropped their environment")
    driver = Driver(tmp_path)
    agents = [pid for pid in leaks.descendants(driver.process.pid) if pid in set(with_marker("atoll.agent.node"))]
    for pid in [driver.process.pid, *agents]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    driver.process.wait(30)
    eventually(lambda: not of_pool(driver.pool_id) and not with_marker(driver.marker), "no process")
    driver.close()


@pytest.mark.parametrize("presses", [1, 3])
def test_ctrl_c_on_a_terminal(tmp_path: Path, presses: int) -> None:
    """The terminal signals the whole foreground group: ranks and agents must not be in it."""
    ours, theirs = pty.openpty()

    def own_terminal() -> None:
        import fcntl
        import termios

        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    try:
        driver = Driver(tmp_path, preexec_fn=own_terminal, stdout=theirs, stderr=theirs)
        for _ in range(presses):
            os.write(ours, b"\x03")
            time.sleep(0.2)
        driver.process.wait(30)
        driver.assert_nothing_left()
        driver.close()
    finally:
        os.close(theirs)
        text = read_terminal(ours)
    assert "KeyboardInterrupt" in text
    assert "WorkerDied" not in text


def test_a_driver_with_threads_and_a_fork_that_holds_the_sockets(tmp_path: Path) -> None:
    before = """
threading.Thread(target=time.sleep, args=(300,), daemon=True).start()
"""
    during = """
    call = pool.submit(busy, everywhere=True)
    if os.fork() == 0:
        open(sys.argv[0] + ".child", "w").write(str(os.getpid()))
        time.sleep(300)
    time.sleep(300)
"""
    driver = Driver(tmp_path, before=before, during=during.strip())
    child = int(eventually(lambda: _read(tmp_path / "driver.py.child"), "the forked child", 60))
    try:
        driver.process.kill()
        driver.process.wait(30)
        driver.assert_nothing_left()
        assert leaks.is_running(child)
    finally:
        os.kill(child, signal.SIGKILL)
    driver.close()


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


LOADERS = """
import torch

class Numbers(torch.utils.data.Dataset):
    def __len__(self): return 10**6  # hours
    def __getitem__(self, i):
        time.sleep(0.01)
        return torch.full((50_000,), float(i))

@sky.compute
def busy():
    loader = torch.utils.data.DataLoader(Numbers(), batch_size=2, num_workers=2)
    for number, batch in enumerate(loader):
        if number == 1:
            import subprocess, sys
            for _ in range(5):
                subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)", MARKER])
            open({ready!r} + str(sky.instance_info().rank), "w").close()
"""


@pytest.mark.long
def test_dataloader_children_of_a_killed_driver(tmp_path: Path) -> None:
    driver = Driver(tmp_path, before=LOADERS.format(ready=str(tmp_path / "ready-")), env={"OMP_NUM_THREADS": "1"})
    assert sum("worker.call_loop" in " ".join(command(pid)) for pid in of_pool(driver.pool_id)) >= 6
    driver.process.kill()
    driver.process.wait(30)
    driver.assert_nothing_left()
    driver.close()


# ----------------------------------------------------------------------------------------------- endings of a script
POOL = "pool = sky.ComputePool(nodes=2).up()\nprint(pool.id, list(f() @ pool), flush=True)\n"
BLOCK = "with sky.ComputePool(nodes=2) as pool:\n    print(pool.id, list(f() @ pool))\n    "
ENDS = {
    # how: program, exit code, may print a traceback
    "without down": (POOL, 0, False),
    "sys.exit in the block": (BLOCK + "sys.exit(5)", 5, False),
    "os._exit": (POOL + "os._exit(5)", 5, False),
    "exception in the block": (BLOCK + "1 / 0", 1, True),
    "a call still runs": (POOL + "pool.submit(time.sleep, 60)\ntime.sleep(0.2)", 0, False),
    "a stream is open": (POOL + "s = pool.run_one(lambda: (i for i in range(10**9)))\nnext(s)", 0, False),
    "a thread makes calls": (
        POOL + "def loop():\n    while True: f() @ pool\n"
        "threading.Thread(target=loop, daemon=True).start()\ntime.sleep(0.2)",
        0,
        True,  # the thread's own: its pool went away
    ),
}


@pytest.mark.parametrize("how", list(ENDS))
def test_the_script_ends(tmp_path: Path, how: str) -> None:
    program, code, traceback = ENDS[how]
    head = "import os, sys, threading, time\nimport atoll as sky\n@sky.compute\ndef f(): return 1\n"
    process = start_script(script(tmp_path, head + program), tmp_path / "tmp")
    out, err = process.communicate(timeout=60)
    pool_id, _, result = out.strip().partition(" ")
    assert result == "[1, 1]", err
    assert process.returncode == code
    assert traceback or "Traceback" not in err
    eventually(lambda: not of_pool(pool_id) and not os.listdir(tmp_path / "tmp"), "nothing left")


# ------------------------------------------------------------------------------------------ the pool object's own end
def test_down_while_calls_run(pool: sky.ComputePool) -> None:
    with ThreadPoolExecutor(3) as threads:
        waiting = [threads.submit(pool.run, time.sleep, 60) for _ in range(3)]
        eventually(lambda: pool._backend.state.running, "a running call")  # type: ignore[union-attr]
        pool.down()
        for future in waiting:
            assert isinstance(future.exception(30), sky.PoolClosed)
    with pytest.raises(sky.PoolClosed):
        ranks_answer() @ pool


def test_down_during_a_stream(pool: sky.ComputePool) -> None:
    def endless() -> Any:
        import itertools

        yield from itertools.count()

    stream = pool.run_one(endless)
    assert [next(stream) for _ in range(30)] == list(range(30))
    pool.down()
    with pytest.raises(sky.PoolClosed):
        for _ in stream:
            pass


def test_down_twice_and_up_again(pool: sky.ComputePool) -> None:
    first = pool.id
    pool.down()
    pool.down()
    pool.up()
    assert pool.id != first
    assert_usable(pool)


def test_down_from_many_threads() -> None:
    pool = sky.ComputePool(nodes=2).up()
    threads = [threading.Thread(target=pool.down) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()
    assert not of_pool(pool.id)


def test_down_from_its_own_callback() -> None:
    holder: list[sky.ComputePool] = []

    def on_event(event: Any) -> None:
        if type(event).__name__ == "CallFinished":
            holder[0].down()

    holder.append(sky.ComputePool(nodes=1, on_event=on_event))
    pool = holder[0].up()
    pool_id = pool.id
    with contextlib.suppress(sky.PoolClosed):
        pool.run(lambda: 1)
    eventually(lambda: not of_pool(pool_id), "a pool that ended")


@pytest.mark.long
def test_a_forgotten_pool_ends() -> None:
    pool = sky.ComputePool(nodes=1).up()
    pool_id = pool.id
    assert_usable(pool)
    del pool
    gc.collect()
    eventually(lambda: not of_pool(pool_id), "a pool that nobody holds ended")


def test_an_exception_in_the_block() -> None:
    pool = sky.ComputePool(nodes=2)

    def block() -> None:
        with pool:
            _ = 1 / 0

    with pytest.raises(ZeroDivisionError):
        block()
    assert not pool.is_up
    assert not of_pool(pool.id)


@pytest.mark.parametrize("busy", [False, True])
def test_ttl(busy: bool) -> None:
    def use_for_ever() -> None:
        while True:
            pool.run(time.sleep, 60 if busy else 0.01)

    with up_with_ttl(nodes=2) as pool:
        pool_id = pool.id
        with pytest.raises(sky.PoolClosed, match="ttl"):
            use_for_ever()
        eventually(lambda: not of_pool(pool_id), "ranks past their ttl")
        with pytest.raises(sky.PoolClosed, match="ttl"):
            ranks_answer() >> pool


@pytest.mark.long
def test_an_agent_that_does_not_answer_is_ended_by_force(mode: str) -> None:
    with sky.ComputePool(nodes=2) as pool:
        os.kill(agent_pid(pool, 1), signal.SIGSTOP)
        pool_id = pool.id
    eventually(lambda: not of_pool(pool_id), "nothing left")


def test_a_stopped_rank_is_ended_by_force(mode: str) -> None:
    with sky.ComputePool(nodes=1) as pool:
        os.kill(rank_pid(pool, 0), signal.SIGSTOP)
        pool_id = pool.id
    eventually(lambda: not of_pool(pool_id), "nothing left")


def test_exit_handlers_of_ranks_run(tmp_path: Path) -> None:
    def register(path: str) -> None:
        import atexit
        import pathlib

        atexit.register(lambda: pathlib.Path(path).write_text("ran"))

    with sky.ComputePool(nodes=1) as pool:
        pool.run(register, str(tmp_path / "f"))
    assert (tmp_path / "f").read_text() == "ran"


def _interpreter_for_others() -> tuple[str, str]:
    """A Python of this version that every user may run, and the path that gives it what Atoll imports."""
    import cloudpickle

    path = os.pathsep.join((SOURCE_ROOT, str(Path(cloudpickle.__file__).parents[1])))
    version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
    for python in (os.path.realpath(sys.executable), f"/usr/bin/{version}", f"/usr/local/bin/{version}"):
        probe = ["setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups", "--bounding-set", "-all"]
        command = [*probe, "/bin/sh", "-c", f"exec {python} -c 'import atoll, cloudpickle'"]
        try:
            found = subprocess.run(command, env={"PYTHONPATH": path}, cwd="/", capture_output=True)
        except FileNotFoundError:
            pytest.skip("needs setpriv to become another user")
        if found.returncode == 0:
            return python, path
    pytest.skip(f"user nobody can run no {version} here that reads this checkout")


@pytest.mark.long
def test_as_an_ordinary_user(mode: str) -> None:
    """Root's namespaces need no user namespace; everybody else's do, or fall back to the subreaper."""
    if os.geteuid() != 0:
        pytest.skip("the whole suite runs as an ordinary user here already")
    python, path = _interpreter_for_others()
    text = (
        "import os, atoll as sky\n"
        "with sky.ComputePool(nodes=2) as pool:\n"
        "    print(pool.id, os.geteuid(), *sorted(pool.run(os.geteuid)), *pool.run(os.getpid))\n"
    )
    # pytest's own folders are root's alone.
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    try:
        script(folder, text)
        for name in ("home", "tmp"):
            (folder / name).mkdir()
            os.chmod(folder / name, 0o777)
        os.chmod(folder, 0o755)
        os.chmod(folder / "driver.py", 0o644)
        process = subprocess.run(
            ["setpriv", "--reuid", "nobody", "--regid", "nogroup", "--clear-groups", python, str(folder / "driver.py")],
            env={
                **os.environ,
                "PYTHONPATH": path,
                "TMPDIR": str(folder / "tmp"),
                "ATOLL_HOME": str(folder / "home"),
                "HOME": str(folder / "home"),
            },
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert process.returncode == 0, process.stderr
        pool_id, uid, *ranks = process.stdout.split()
        assert uid != "0"
        assert ranks[:2] == [uid, uid]
        if mode == NAMESPACE and all(int(pid) > 100 for pid in ranks[2:]):
            pytest.skip("this kernel lets no ordinary user make namespaces: the subreaper was used, and works")
        eventually(lambda: not of_pool(pool_id) and not os.listdir(folder / "tmp"), "nothing left")
    finally:
        shutil.rmtree(folder)

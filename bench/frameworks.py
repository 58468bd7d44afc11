"""What the framework decorators give and cost: two ranks against one, and each beside the framework's own launcher.

    python bench/frameworks.py [--gpus] [--only torch,jax,keras-jax,keras-torch] [--steps 40] [--rounds 3]

The work is the same throughout: an MLP with 784, 1024, 1024 and 10 units, a global batch of 1,024 images. Every rank
computes on one thread; with --gpus each has one of two GPUs, joined by NCCL, and the work is 4096 units and a batch of
16,384, in the framework's own default precision. "two ranks" is Atoll's decorator over two local nodes; "by hand" is
the same function in two processes that torchrun starts, or two plain ones that call jax.distributed.initialize or have
TF_CONFIG. For TensorFlow: .venv-tensorflow/bin/python bench/frameworks.py --only tensorflow,keras-tensorflow.
"ready" is from the dispatch, or the start of the processes, to the function's first line after set-up. Of several
rounds, which take turns, the best counts.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import re
import socket
import subprocess
import sys
import time
from typing import Any

import atoll as sky
from atoll.providers.gpus import local_gpus

ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false --xla_force_host_platform_device_count=1",
    "NPROC": "1",
    "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1",
}
ON_GPUS = "BENCH_ON_GPUS"  # set in every rank where they have GPUs


def sizes() -> tuple[int, tuple[int, ...]]:
    """The global batch, and units of each layer."""
    return (16384, (784, 4096, 4096, 10)) if ON_GPUS in os.environ else (1024, (784, 1024, 1024, 10))


def torch_steps(rank: int, world_size: int, steps: int) -> float:
    """Seconds that the steps take with DDP."""
    import torch

    device = "cuda" if ON_GPUS in os.environ else "cpu"
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    batch, units = sizes()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(a, b) for a, b in itertools.pairwise(units)]
    model: Any = torch.nn.Sequential(layers[0], torch.nn.ReLU(), layers[1], torch.nn.ReLU(), layers[2]).to(device)
    if world_size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(batch // world_size, 784).to(device), torch.randint(10, (batch // world_size,)).to(device)

    def step() -> None:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    step()
    synchronize()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    synchronize()
    return time.perf_counter() - begun


def jax_steps(rank: int, world_size: int, steps: int) -> float:
    """Seconds that the steps take with pmap."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    def loss(params: Any, x: Any, y: Any) -> Any:
        for weight in params[:-1]:
            x = jax.nn.relu(x @ weight)
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ params[-1]), y[:, None], axis=1).mean()

    def step(params: Any, x: Any, y: Any) -> Any:
        gradients = jax.lax.pmean(jax.grad(loss)(params, x, y), "devices")
        return [p - 0.01 * g for p, g in zip(params, gradients, strict=True)]

    batch, units = sizes()
    random = np.random.default_rng(0)
    shapes = list(itertools.pairwise(units))
    params = [random.normal(0, 0.03, (1, *shape)).astype(np.float32) for shape in shapes]
    x = random.normal(size=(1, batch // world_size, 784)).astype(np.float32)
    y = random.integers(0, 10, (1, batch // world_size))
    x, y = jax.pmap(lambda *arrays: arrays)(x, y)  # to the device, once
    mapped = jax.pmap(step, axis_name="devices")
    params = jax.block_until_ready(mapped(params, x, y))
    begun = time.perf_counter()
    for _ in range(steps):
        params = mapped(params, x, y)
    jax.block_until_ready(params)
    return time.perf_counter() - begun


def tensorflow_steps(rank: int, world_size: int, steps: int) -> float:
    """Seconds that the steps take under the strategy."""
    import tensorflow as tf

    batch, units = sizes()
    strategy = sky.strategy()
    with strategy.scope():
        weights = [
            tf.Variable(tf.random.stateless_normal(shape, (0, at)) * 0.03)
            for at, shape in enumerate(itertools.pairwise(units))
        ]
    x = tf.random.stateless_normal((batch // world_size, 784), (rank, 1))
    y = tf.random.stateless_uniform((batch // world_size,), (rank, 2), maxval=10, dtype=tf.int32)

    def of_replica() -> None:
        with tf.GradientTape() as tape:
            hidden = x
            for weight in weights[:-1]:
                hidden = tf.nn.relu(hidden @ weight)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(y, hidden @ weights[-1])
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, weights)
        means = tf.distribute.get_replica_context().all_reduce("MEAN", gradients)
        for weight, gradient in zip(weights, means, strict=True):
            weight.assign_sub(0.01 * gradient)

    step = tf.function(lambda: strategy.run(of_replica))
    step()
    begun = time.perf_counter()
    for _ in range(steps):
        step()
    weights[0].numpy()
    return time.perf_counter() - begun


def keras_steps(rank: int, world_size: int, steps: int) -> float:
    """Seconds that ``fit`` takes."""
    import keras
    import numpy as np

    batch, units = sizes()
    model = keras.Sequential([keras.layers.Dense(n, "relu") for n in units[1:-1]] + [keras.layers.Dense(units[-1])])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    size = batch // world_size
    x, y = np.ones((size * steps, 784), np.float32), np.zeros(size * steps, np.int32)
    model.fit(x[:size], y[:size], batch_size=size, verbose=0)
    begun = time.perf_counter()
    model.fit(x, y, batch_size=size, verbose=0)
    return time.perf_counter() - begun


WORK = {
    "torch": torch_steps,
    "jax": jax_steps,
    "keras-jax": keras_steps,
    "keras-torch": keras_steps,
    "tensorflow": tensorflow_steps,
    "keras-tensorflow": keras_steps,
}


def measured(name: str, steps: int) -> tuple[float, float]:
    """On a rank: when it was ready, and seconds for the steps."""
    ready, info = time.time(), sky.instance_info()
    return ready, WORK[name](info.rank, info.world_size, steps)


def by_hand(name: str, steps: int) -> None:
    """One of two processes without Atoll's launcher: prints the same."""
    on_gpus = ON_GPUS in os.environ
    if name == "torch":
        import torch
        import torch.distributed as dist

        if on_gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group("nccl" if on_gpus else "gloo")
        rank = dist.get_rank()
    elif name == "tensorflow":
        import tensorflow as tf

        rank = int(os.environ["BENCH_RANK"])
        tf.distribute.MultiWorkerMirroredStrategy().scope().__enter__()  # to the end of the process
    else:
        import jax

        rank = int(os.environ["BENCH_RANK"])
        if not on_gpus:
            jax.config.update("jax_cpu_collectives_implementation", "gloo")
        devices = [rank] if on_gpus else None
        jax.distributed.initialize(os.environ["BENCH_ADDRESS"], 2, rank, local_device_ids=devices)
        if name == "keras-jax":
            import keras

            keras.utils.set_random_seed(0)
            devices = keras.distribution.list_devices()
            keras.distribution.set_distribution(
                keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False)
            )
    print(json.dumps([time.time(), WORK[name](rank, 2, steps)]), flush=True)


def run_by_hand(name: str, steps: int, env: dict[str, str]) -> tuple[float, float] | None:
    """Two processes with the framework's own launcher; None for what has none."""
    if name in ("keras-torch", "keras-tensorflow"):
        return None
    me = [os.path.abspath(__file__), "--by-hand", name, "--steps", str(steps)]
    env = os.environ | env
    if name != "torch":
        env |= {"KERAS_BACKEND": "jax"} | ({} if ON_GPUS in env else {"JAX_PLATFORMS": "cpu"})
    begun = time.time()
    if name == "torch":
        commands = [(["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *me], env)]
    else:
        with socket.socket() as first, socket.socket() as second:
            addresses = []
            for probe in (first, second):
                probe.bind(("127.0.0.1", 0))
                addresses.append(f"127.0.0.1:{probe.getsockname()[1]}")
        cluster = {"worker": addresses}
        commands = [
            (
                me,
                env
                | {"BENCH_RANK": str(rank), "BENCH_ADDRESS": addresses[0]}
                | {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": rank}})},
            )
            for rank in range(2)
        ]
    running = [
        subprocess.Popen([sys.executable, *command], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        for command, env in commands
    ]
    printed = "".join(process.communicate()[0].decode() for process in running)
    found = [json.loads(each) for each in re.findall(r"\[\d[\d.]*, [\d.]+\]", printed)]
    if len(found) != 2:
        raise SystemExit(f"{name} by hand gave {len(found)} results of 2:\n{printed[-4000:]}")
    return max(ready for ready, _ in found) - begun, max(took for _, took in found)


def run_pool(pool: sky.ComputePool, name: str, steps: int, *, everywhere: bool) -> tuple[float, float]:
    """A decorated call, over all ranks or over one."""
    framework, _, backend = name.partition("-")
    options = {"backend": backend} if backend else {}
    function = getattr(sky.integrations, framework)(**options)(measured)
    begun = time.time()
    found = pool.run(function, name, steps) if everywhere else [pool.run_one(function, name, steps)]
    return max(ready for ready, _ in found) - begun, max(took for _, took in found)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", action="store_true", help="on two GPUs, joined by NCCL")
    parser.add_argument("--only", default="torch,jax,keras-jax,keras-torch", help="frameworks, separated by commas")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--by-hand", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.by_hand:
        by_hand(options.by_hand, options.steps)
        return
    gpus = local_gpus()[:2] if options.gpus else ()
    if options.gpus and len(gpus) < 2:
        print(f"skipped: --gpus needs 2 GPUs, and this machine has {len(gpus)}")
        return
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpu.uuid for gpu in gpus)  # none without --gpus
    env = {ON_GPUS: "1"} if gpus else ONE_THREAD
    load, version = os.getloadavg()[0], platform.python_version()
    machine = f"2 × {gpus[0].name}" if gpus else f"{platform.machine()}, {os.cpu_count()} cores"
    print(f"{machine}, load {load:.1f}, Python {version}")
    print("| framework | one rank, steps/s | two ranks | ratio | two by hand | ready, decorator | ready, by hand |")
    print("|---|---|---|---|---|---|---|")
    for name in options.only.split(","):
        with sky.ComputePool(nodes=2, logs="quiet", env=env) as pool:
            pooled, hand = [], []
            for _ in range(options.rounds):
                one_and_two = (run_pool(pool, name, options.steps, everywhere=each) for each in (False, True))
                pooled.append(tuple(one_and_two))
                if (found := run_by_hand(name, options.steps, env)) is not None:
                    hand.append(found)
        one, two = (options.steps / min(each[at][1] for each in pooled) for at in (0, 1))
        ready = min(each[1][0] for each in pooled)
        rate = f"{options.steps / min(took for _, took in hand):.1f}" if hand else "—"
        hand_ready = f"{min(ready for ready, _ in hand):.1f} s" if hand else "—"
        print(
            f"| {name} | {one:.1f} | {two:.1f} | {two / one:.2f} | {rate} | {ready:.1f} s | {hand_ready} |", flush=True
        )


if __name__ == "__main__":
    main()

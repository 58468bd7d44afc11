"""JAX: `jax.distributed` is there from the function's first line, and one `pmap` steps over the devices of all ranks."""

from functools import partial

from stand_ins import digits
from where import accelerator, provider

(images, labels), _ = digits()


def one_step(params, batch):
    """A step of a linear classifier on this device's batch, along the gradient averaged over all devices."""
    import jax
    import jax.numpy as jnp

    def loss_of(params):
        x, y = batch
        log_probabilities = jax.nn.log_softmax(x @ params["w"] + params["b"])
        return -jnp.take_along_axis(log_probabilities, y[:, None], axis=1).mean()

    loss, gradients = jax.value_and_grad(loss_of)(params)
    loss, gradients = jax.lax.pmean((loss, gradients), "devices")
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, gradients), loss


def run(train_step, num_steps=40):
    """Steps over this rank's part of the digits; the first and the last loss, and the weights."""
    import jax
    import numpy as np

    x, y = sky.shard(images.reshape(-1, 784) / np.float32(255), labels, drop_last=True)
    num_local = jax.local_device_count()
    params = {"w": np.zeros((num_local, 784, 10), np.float32), "b": np.zeros((num_local, 10), np.float32)}
    losses = []
    for step in range(num_steps):
        rows = np.arange(step * 64 * num_local, (step + 1) * 64 * num_local) % len(x)
        batch = [part[rows].reshape(num_local, 64, *part.shape[1:]) for part in (x, y)]
        params, loss = train_step(params, batch)
        losses.append(float(loss[0]))
    return {"devices": jax.device_count(), "losses": (losses[0], losses[-1]), "w": np.asarray(params["w"][0])}


# >>> the guide
import atoll as sky  # changed: the name of the package

@sky.integrations.jax()
@sky.compute
def train():
    import jax
    import jax.numpy as jnp

    # JAX distributed already initialized
    # Use pmap or jax.experimental.pjit for parallelism

    @partial(jax.pmap, axis_name="devices")  # changed: a name for the average over devices
    def train_step(params, batch):
        return one_step(params, batch)  # changed: something in place of the dots

    results = run(train_step)  # changed: which the guide leaves out
    return results


with sky.ComputePool(
    provider=provider,  # changed: from where.py
    nodes=2,  # changed: four ranks are many for two cores
    accelerator=accelerator,  # changed: from where.py
    pip=["jax[cuda12]"],
) as pool:
    results = train() @ pool
# <<<

for rank, result in enumerate(results):
    first, last = result["losses"]
    print(f"rank {rank}: {result['devices']} devices, loss {first:.4f} → {last:.4f}, weight {abs(result['w']).sum():.4f}")

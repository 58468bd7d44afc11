"""TensorFlow over every rank: the strategy is there before the function starts."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

import atoll as sky

pytestmark = [pytest.mark.leaks_per_module, pytest.mark.long, pytest.mark.timeout(400)]


@sky.integrations.tensorflow
@sky.compute
def train(steps: int) -> dict[str, Any]:
    import tensorflow as tf

    rank = sky.instance_info().rank
    strategy = sky.strategy()
    with strategy.scope():
        weight = tf.Variable(tf.zeros(3))

    def of_replica() -> Any:
        gradient = tf.ones(3) * float(rank + 1)
        total = tf.distribute.get_replica_context().all_reduce("MEAN", gradient)
        weight.assign_sub(total)
        return total

    @tf.function
    def step() -> Any:
        return strategy.run(of_replica)

    for _ in range(steps):
        step()
    return {
        "weight": weight.numpy().tolist(),
        "replicas": strategy.num_replicas_in_sync,
        "config": json.loads(os.environ["TF_CONFIG"]),
        "peers": [peer.addr for peer in sky.instance_info().peers],
    }


def test_a_loop_under_the_strategy_and_a_call_after_it() -> None:
    with sky.ComputePool(nodes=2, logs="quiet", pip=["tensorflow-cpu==2.21.0"]) as pool:
        for _ in range(2):
            ranks = train(2) @ pool
            for rank, result in enumerate(ranks):
                assert result["weight"] == [-3.0] * 3
                assert result["replicas"] == 2
                assert result["config"]["task"] == {"type": "worker", "index": rank}
                addresses = [worker.rpartition(":")[0] for worker in result["config"]["cluster"]["worker"]]
                assert addresses == result["peers"]
            assert ranks[0]["config"]["cluster"] == ranks[1]["config"]["cluster"]
            assert pool.run(os.getenv, "TF_CONFIG") == [None, None]
        alone = train(1) >> pool
        assert (alone["weight"], alone["replicas"]) == ([-1.0] * 3, 1)

        with pytest.raises(sky.UsageError, match=r"put @sky.integrations.tensorflow\(\) above it"):
            pool.run(sky.strategy)


def test_an_error_on_one_rank_comes_while_the_other_waits() -> None:
    @sky.integrations.tensorflow()
    @sky.compute
    def uneven() -> None:
        import tensorflow as tf

        if sky.instance_info().rank == 0:
            raise LookupError("mine")
        sky.strategy().run(lambda: tf.distribute.get_replica_context().all_reduce("SUM", tf.ones(1)))

    with sky.ComputePool(nodes=2, logs="quiet", pip=["tensorflow-cpu==2.21.0"]) as pool:
        with pytest.raises(LookupError, match="mine"):
            uneven() @ pool
        assert (train(1) @ pool)[0]["weight"] == [-1.5] * 3


def test_tf_keras_trains_one_model_under_the_strategy() -> None:
    @sky.integrations.tensorflow
    @sky.compute
    def fit() -> tuple[list[Any], list[float]]:
        import numpy as np
        import tensorflow as tf
        import tf_keras

        with sky.strategy().scope():
            model = tf_keras.Sequential([tf_keras.layers.Dense(8, "relu"), tf_keras.layers.Dense(1)])
            model.compile("sgd", "mse")
        x = np.random.default_rng(0).normal(size=(64, 3)).astype("float32")
        data = tf.data.Dataset.from_tensor_slices((x, x.sum(1, keepdims=True))).batch(16).repeat()
        options = tf.data.Options()
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        history = model.fit(data.with_options(options), steps_per_epoch=4, epochs=3, verbose=0)
        return [weight.tolist() for weight in model.get_weights()], history.history["loss"]

    packages = ["tensorflow-cpu==2.21.0", "tf_keras==2.21.0"]
    with sky.ComputePool(nodes=2, logs="quiet", pip=packages, env={"TF_USE_LEGACY_KERAS": "1"}) as pool:
        (weights, losses), second = fit() @ pool
        assert (weights, losses) == second
        assert losses[-1] < losses[0]

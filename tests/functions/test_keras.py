"""Keras over every rank: one model, whatever the backend and however unevenly the data was cut."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import atoll as sky

pytestmark = [pytest.mark.leaks_per_module, pytest.mark.long, pytest.mark.timeout(400)]

# TensorFlow is not in the environment of the tests: every process that imports Keras would load it, for seconds.
TENSORFLOW = ["tensorflow-cpu==2.21.0"]
BACKENDS = ("jax", "torch", "tensorflow")


def digits() -> tuple[Any, Any]:
    """1,797 digits: images (N, 64) and labels."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    return (x / 16.0).astype("float32"), y.astype("int32")


def pool_for(backend: str) -> sky.ComputePool:
    return sky.ComputePool(nodes=2, logs="quiet", pip=TENSORFLOW if backend == "tensorflow" else None)


def digest(weights: list[Any]) -> str:
    return hashlib.sha256(b"".join(np.ascontiguousarray(weight).tobytes() for weight in weights)).hexdigest()


def train(x: Any, y: Any) -> dict[str, Any]:
    """Statistics of batches, dropout, a callback that may stop, validation: whatever could differ between ranks."""
    import keras

    x_local, y_local = sky.shard(x, y, shuffle=True, seed=42)
    model = keras.Sequential(
        [
            keras.layers.Dense(64),
            keras.layers.BatchNormalization(),
            keras.layers.Activation("relu"),
            keras.layers.Dropout(0.1),
            keras.layers.Dense(10, activation="softmax"),
        ]
    )
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(
        x_local, y_local, epochs=12, batch_size=64, verbose=0, validation_data=(x_local, y_local),
        callbacks=keras.callbacks.EarlyStopping("loss", patience=0, min_delta=0.05),
    )  # fmt: skip
    accuracy = float(model.evaluate(x_local, y_local, verbose=0)[1])
    return {
        "backend": keras.backend.backend(),
        "samples": len(x_local),
        "weights": digest(model.get_weights()),
        "history": {name: [float(value) for value in values] for name, values in history.history.items()},
        "accuracy": accuracy,
    }


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_odd_number_of_digits_over_two_nodes_ends_with_equal_weights(backend: str) -> None:
    with pool_for(backend) as pool:
        first, second = pool.run(sky.integrations.keras(backend=backend)(train), *digits())
        assert (first["samples"], second["samples"]) == (899, 898)
        assert first["backend"] == second["backend"] == backend
        assert first["weights"] == second["weights"]
        assert first["history"] == second["history"], "what callbacks decide by"
        assert 1 < len(first["history"]["loss"]) < 12, "both stopped, at the same epoch"
        assert first["accuracy"] > 0.85
        assert second["accuracy"] > 0.85
        said = "".join(path.read_text() for path in sorted(pool.log_dir.glob("rank*.err")))
        assert said.count("atoll: fit: ranks have 898 to 899 samples; each uses its first 898") == 1
        assert "1 of 1797 dropped" in said


def one_step(x: Any, y: Any, seed_by_rank: bool) -> list[Any]:
    import keras

    if seed_by_rank:
        keras.utils.set_random_seed(1 + sky.instance_info().rank)
    x, y = sky.shard(x, y)
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, kernel_initializer="glorot_uniform")])
    if not seed_by_rank:
        model.set_weights([np.full((64, 10), 0.01), np.zeros(10)])
    model.compile(optimizer=keras.optimizers.SGD(0.1), loss=keras.losses.SparseCategoricalCrossentropy(True))
    model.fit(x, y, batch_size=len(x), epochs=2, verbose=0)
    return list(model.get_weights())


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_step_of_all_ranks_is_that_of_one_with_the_whole_batch(backend: str) -> None:
    x, y = digits()
    function = sky.integrations.keras(backend=backend)(one_step)
    with pool_for(backend) as pool:
        first, second = pool.run(function, x[:256], y[:256], False)
        alone = pool.run_one(function, x[:256], y[:256], False)
        for one, other, expected in zip(first, second, alone, strict=True):
            assert (one == other).all()
            np.testing.assert_allclose(one, expected, atol=1e-6)
        if backend != "jax":  # where ranks have their own weights, they start from rank 0's
            first, second = pool.run(function, x[:256], y[:256], True)
            assert digest(first) == digest(second)


@pytest.mark.parametrize("backend", ["torch", "tensorflow"])
def test_loops_of_the_callers_own_and_scaled_losses_step_together(backend: str) -> None:
    @sky.integrations.keras(backend=backend)
    @sky.compute
    def steps() -> list[Any]:
        import keras

        rank = sky.instance_info().rank
        results = []
        for optimizer in (keras.optimizers.SGD(1.0), keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), 1)):
            weight = keras.Variable(np.zeros(3, "float32"))
            optimizer.build([weight])
            optimizer.apply([keras.ops.ones(3) * float(rank + 1)], [weight])
            results.append(keras.ops.convert_to_numpy(weight).tolist())
        # One rank's overflow has every rank skip the step.
        optimizer.apply([keras.ops.ones(3) * (float("inf") if rank == 1 else 1.0)], [weight])
        return [*results, keras.ops.convert_to_numpy(weight).tolist()]

    with pool_for(backend) as pool:
        assert steps() @ pool == [[[-1.5] * 3] * 3] * 2


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_rank_0_alone_writes_files(backend: str, tmp_path: Path) -> None:
    """Saving makes variables, which on JAX all ranks had to make: one that saved alone waited for ever."""

    def save(folder: Path) -> list[Any]:
        import keras

        model = keras.Sequential([keras.layers.Dropout(0.5), keras.layers.Dense(1)])
        model.compile(optimizer="adam", loss="mse", metrics=["mae"])
        x, y = np.random.default_rng(0).random((8, 2)), np.ones((8, 1))
        rank = sky.instance_info().rank
        checkpoint = keras.callbacks.ModelCheckpoint(folder / f"{rank}.keras")
        log = keras.callbacks.CSVLogger(folder / f"{rank}.csv")
        model.fit(x, y, epochs=2, verbose=0, callbacks=[checkpoint, log])
        if rank == 0:
            model.save(folder / "saved.keras")
            model.save_weights(folder / "saved.weights.h5")
        return [float(np.abs(weight).sum()) for weight in model.get_weights()]

    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        one, two = pool.run(sky.integrations.keras(backend=backend)(save), tmp_path)
    assert one == two
    assert {each.name for each in tmp_path.iterdir()} == {"0.keras", "0.csv", "saved.keras", "saved.weights.h5"}


def test_what_differs_between_ranks_is_named() -> None:
    def uneven(how: str) -> None:
        import keras

        rank = sky.instance_info().rank
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile(optimizer="sgd", loss="mse")
        x, y = np.ones((8, 2)), np.ones((8, 1))
        if how == "batches":

            class Batches(keras.utils.PyDataset):  # type: ignore[misc]
                def __len__(self) -> int:
                    return 2 + rank

                def __getitem__(self, index: int) -> Any:
                    return x, y

            model.fit(Batches(), verbose=0)
        elif how == "generator":
            model.fit(((x, y) for _ in range(2 + rank)), verbose=0)
        elif how == "nothing":
            model.fit(x[: 8 * rank], y[: 8 * rank], verbose=0)
        elif how == "restored":
            model.fit(x, y, verbose=0, callbacks=keras.callbacks.BackupAndRestore("backup"))
        elif how == "batch_size":
            model.fit(x, y, batch_size=2 + rank, verbose=0)
        elif rank == 0:
            model.fit(x, y, verbose=0)

    function = sky.integrations.keras(backend="torch")(uneven)
    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        with pytest.raises(sky.ConfigError, match=r"were given 2, 3 batches: .* drop_last=True"):
            pool.run(function, "batches")
        with pytest.raises(sky.ConfigError, match=r"data without a length may end sooner on one: give steps_per_epoch"):
            pool.run(function, "generator")
        with pytest.raises(sky.ConfigError, match=r"were given 0, 8 samples: give each some"):
            pool.run(function, "nothing")
        with pytest.raises(sky.ConfigError, match="BackupAndRestore restores each rank by itself: use Model"):
            pool.run(function, "restored")
        with pytest.raises(sky.ConfigError, match="batch_size differs between them"):
            pool.run(function, "batch_size")
        with pytest.raises(sky.ConfigError, match="all have to call fit"):
            pool.run(function, "one rank")


def test_the_backend_is_the_decorators_whatever_was_loaded_before(tmp_path: Path) -> None:
    """The script imports Keras itself, as people do, so that its functions hold the module."""
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent("""
            import keras
            import atoll as sky

            def backend():
                return keras.backend.backend()

            with sky.ComputePool(nodes=2) as pool:
                assert keras.backend.backend() == "jax"
                assert pool.run(sky.integrations.keras(backend="torch")(backend)) == ["torch"] * 2
                assert pool.run(backend) == ["jax"] * 2
                assert pool.run(sky.integrations.keras(backend="torch")(backend)) == ["torch"] * 2
                assert pool.run(sky.integrations.keras(backend)) == ["jax"] * 2, "KERAS_BACKEND's"
                assert pool.run_one(sky.integrations.keras(backend)) == "jax"
            with sky.ComputePool(nodes=2, env={"KERAS_BACKEND": "torch"}) as pool:
                assert pool.run(sky.integrations.keras()(backend)) == ["torch"] * 2
            print("as it should be")
        """)
    )
    import os

    ended = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env=os.environ | {"KERAS_BACKEND": "jax"}
    )
    assert ended.returncode == 0, ended.stderr
    assert "as it should be" in ended.stdout


def test_another_backend_that_the_process_has_loaded_is_an_error() -> None:
    def late() -> None:
        import keras

        assert keras.backend.backend() == "jax"
        sky.integrations.keras(backend="torch")(abs)(1)

    with (
        sky.ComputePool(nodes=1, logs="quiet", env={"KERAS_BACKEND": "jax"}) as pool,
        pytest.raises(sky.ConfigError, match=r"loaded with backend 'jax' on rank 0, .* wants 'torch': dispatch"),
    ):
        pool.run(late)


def test_prediction_over_several_processes_says_what_to_do_on_jax() -> None:
    def predict(weights: Any = None) -> Any:
        import keras

        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        if weights is None:
            model.compile(optimizer="sgd", loss="mse")
            model.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)
            with pytest.raises(sky.ConfigError, match=r"predict\(weights\) >> pool"):
                model.predict(np.ones((4, 2)), verbose=0)
            return model.get_weights()
        model.set_weights(weights)
        return model.predict(np.ones((4, 2)), verbose=0)

    function = sky.integrations.keras(backend="jax")(predict)
    with sky.ComputePool(nodes=2, logs="quiet") as pool:
        weights = pool.run(function)[0]
        assert pool.run_one(function, weights).shape == (4, 1)

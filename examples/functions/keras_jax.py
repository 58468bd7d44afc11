"""Keras 3 on JAX: `fit` on each rank's part of the digits trains one model."""

from stand_ins import digits
from where import accelerator, provider

mnist = digits()

# >>> the guide
import atoll as sky  # changed: the name of the package

@sky.integrations.keras(backend="jax")
@sky.compute
def train_model(epochs: int) -> dict:
    import keras
    import numpy as np

    pool = sky.instance_info()

    # Load data
    (x_train, y_train), (x_test, y_test) = mnist  # changed: digits that are here already
    x_train = x_train.astype(np.float32) / 255.0

    # Shard data across nodes
    x_local, y_local = sky.shard(x_train, y_train, shuffle=True, seed=42)

    # Build model
    model = keras.Sequential([
        keras.layers.Flatten(input_shape=(28, 28)),
        keras.layers.Dense(128, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ])

    model.compile(
        optimizer="adam",
        loss="sparse_categorical_crossentropy",
        metrics=["accuracy"],
    )

    # Train
    history = model.fit(x_local, y_local, epochs=epochs, batch_size=64)

    return {
        "node": pool.node,
        "accuracy": history.history["accuracy"][-1],
        "weights": model.get_weights(),  # changed: to be compared
    }


with sky.ComputePool(
    provider=provider,  # changed: from where.py
    nodes=2,
    accelerator=accelerator,  # changed: from where.py
    image=sky.Image(
        pip=["keras>=3.2", "jax[cuda12]"],
        env={"KERAS_BACKEND": "jax"},
    ),
) as pool:
    results = train_model(epochs=10) @ pool
# <<<

for result in results:
    total = sum(abs(weight).sum() for weight in result["weights"])
    print(f"node {result['node']}: accuracy {result['accuracy']:.3f}, weights {total:.4f}")

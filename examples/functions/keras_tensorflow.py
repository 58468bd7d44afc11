"""Keras 3 on TensorFlow: the same model on every rank. The first run installs TensorFlow for the ranks (about 1 GB)."""

from stand_ins import digits
from where import provider

mnist = digits()


def fit(keras):
    """Train a small model on this rank's part; its accuracy over all ranks, and its weights."""
    import numpy as np

    (x, y), _ = mnist
    x_local, y_local = sky.shard(x.astype(np.float32) / 255.0, y, shuffle=True, seed=42)
    model = keras.Sequential([keras.Input((28, 28)), keras.layers.Flatten(), keras.layers.Dense(10, "softmax")])
    model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    history = model.fit(x_local, y_local, epochs=10, batch_size=32, verbose=2)
    return {"accuracy": history.history["accuracy"][-1], "weights": model.get_weights()}


# >>> the guide
import atoll as sky  # changed: the name of the package

@sky.integrations.keras(backend="tensorflow")
@sky.compute
def train():
    import keras
    # Uses TF distributed strategy
    return fit(keras)  # changed: something in place of the dots

with sky.ComputePool(
    provider=provider,  # changed: from where.py
    nodes=2,  # changed: one model over two of them
    image=sky.Image(
        pip=["keras>=3.2", "tensorflow-cpu"],  # changed: without what only GPUs need
        env={"KERAS_BACKEND": "tensorflow"},
    ),
) as pool:
    results = train() @ pool
# <<<

for rank, result in enumerate(results):
    total = sum(abs(weight).sum() for weight in result["weights"])
    print(f"rank {rank}: accuracy {result['accuracy']:.3f}, weights {total:.4f}")

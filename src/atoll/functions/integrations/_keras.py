"""Keras over every rank of a call: one model, trained on each rank's part of the data.

On JAX, Keras' own ``DataParallel`` makes each step one computation over all devices. On torch and TensorFlow each rank
steps by itself, with gradients averaged in the optimizer's ``apply``: Keras' ``fit`` does not train under TensorFlow's
own strategy for several workers (keras-team/keras issue 20585), and has nothing for torch. Ranks step together either
way, so ``fit`` sees to it that they take equally many steps. The process ends with the call, and with it what is
replaced here.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from atoll.core.context import CallContext
from atoll.core.errors import ConfigError
from atoll.functions.integrations._jax import join as join_jax
from atoll.functions.integrations._tensorflow import join as join_tensorflow
from atoll.wire import frames
from atoll.worker.channel import DriverChannel
from atoll.worker.process_group import explicit

_GROUP_KEY = 1701  # of TensorFlow's collectives over all ranks; its own count from 1
_COUNTED_FROM = 100_000  # so do its instances within a group

Mean = Callable[[Sequence[Any]], list[Any]]  # of arrays of the backend, over all ranks


def set_up(backend: str, ctx: CallContext, worker: DriverChannel) -> None:
    """Join the ranks by the backend, then load Keras with it.

    Raises:
        ConfigError: Keras is loaded already, with another backend.
    """
    os.environ["KERAS_BACKEND"] = backend
    mean = _JOIN[backend](ctx, worker)
    keras: Any = importlib.import_module("keras")
    if keras.backend.backend() != backend:
        raise ConfigError(
            f"Keras is loaded with backend {keras.backend.backend()!r} on rank {ctx.rank}, and the decorator of this "
            f"call wants {backend!r}: dispatch the decorated function itself, f(...) @ pool, which gets fresh processes"
        )
    keras.utils.set_random_seed(ctx.seed % 2**32)  # every rank starts with the same weights
    if backend == "jax":
        devices = keras.distribution.list_devices()
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices, auto_shard_dataset=False))
    if ctx.world_size > 1:
        _replace_methods(keras, worker, ctx.rank, mean)


def _join_jax(ctx: CallContext, worker: DriverChannel) -> Mean | None:
    join_jax(ctx, worker)
    return None


def _join_torch(ctx: CallContext, worker: DriverChannel) -> Mean:
    explicit(None, None)
    torch: Any = importlib.import_module("torch")

    def mean(arrays: Sequence[Any]) -> list[Any]:
        flat = torch.cat([array.detach().reshape(-1) for array in arrays])
        torch.distributed.all_reduce(flat)
        parts = torch.split(flat / ctx.world_size, [array.numel() for array in arrays])
        return [part.reshape(array.shape) for part, array in zip(parts, arrays, strict=True)]

    return mean


def _join_tensorflow(ctx: CallContext, worker: DriverChannel) -> Mean:
    join_tensorflow(ctx, worker)
    tf: Any = importlib.import_module("tensorflow")
    keys = itertools.count(_COUNTED_FROM)  # one for each place in a graph; ranks come to them in the same order
    eager_keys: dict[tuple[int, ...], int] = {}

    def mean(arrays: Sequence[Any]) -> list[Any]:
        sizes = tuple(array.shape.num_elements() for array in arrays)
        total = tf.raw_ops.CollectiveReduceV2(
            input=tf.concat([tf.reshape(array, [-1]) for array in arrays], 0),
            group_size=ctx.world_size,
            group_key=_GROUP_KEY,
            instance_key=eager_keys.setdefault(sizes, next(keys)) if tf.executing_eagerly() else next(keys),
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
        )
        parts = tf.split(total / ctx.world_size, sizes)
        return [tf.reshape(part, array.shape) for part, array in zip(parts, arrays, strict=True)]

    return mean


_JOIN: dict[str, Callable[[CallContext, DriverChannel], Mean | None]] = {
    "jax": _join_jax,
    "torch": _join_torch,
    "tensorflow": _join_tensorflow,
}


class _Ranks:
    """What the ranks of a call tell each other, through the driver."""

    def __init__(self, worker: DriverChannel, rank: int) -> None:
        self._worker = worker
        self.is_head = rank == 0
        self.world_size: int = worker.setup["world_size"]

    def gather(self, value: object) -> list[Any]:
        """The value of each rank, by rank.

        Raises:
            ConfigError: a rank ended.
        """
        offers = self._worker.agree(json.dumps(value))
        if offers is None or frames.RETURNED in offers:
            raise ConfigError("another rank returned from the function while this one trains: all have to call fit")
        return [json.loads(offer) for offer in offers]

    def check_equal(self, what: str, **values: object) -> None:
        """Raise ConfigError where ranks were given different values of what has to be the same."""
        every = self.gather({name: repr(value) for name, value in values.items()})
        for name in values:
            if len(found := {each[name] for each in every}) > 1:
                raise ConfigError(f"{what}: ranks step together, and {name} differs between them: {', '.join(found)}")

    def equalize(self, what: str, tree: Any, given: dict[str, Any], limit: str, steps: int | None) -> None:
        """Cut data to the fewest samples that a rank has, and say so. ``limit`` is the argument of ``steps``."""
        count, unit = _count(tree, given.get("x"))
        counts = self.gather(count)
        fewest = min((each for each in counts if each is not None), default=None)
        if fewest is None and steps is None:
            raise ConfigError(
                f"{what}: ranks step together, and data without a length may end sooner on one: give {limit}, no more "
                f"than each has"
            )
        if fewest is None or all(each == fewest for each in counts):
            return
        if fewest == 0:
            raise ConfigError(
                f"{what}: ranks step together, and were given {', '.join(map(str, counts))} {unit}: give each some"
            )
        if unit != "samples" or None in counts:
            raise ConfigError(
                f"{what}: ranks step together, and were given {', '.join(map(str, counts))} {unit}: give each as many, "
                f"for example with sky.shard(data, drop_last=True) before it is cut into batches"
            )
        for name in _DATA:
            if given.get(name) is not None:
                given[name] = tree.map_structure(lambda array: array[:fewest], given[name])
        if self.is_head:
            print(
                f"atoll: {what}: ranks have {fewest} to {max(counts)} samples; each uses its first {fewest}, so that "
                f"all take as many steps ({sum(counts) - fewest * len(counts)} of {sum(counts)} dropped)",
                file=sys.stderr,
            )


_DATA = ("x", "y", "sample_weight")


def _count(tree: Any, x: Any) -> tuple[int | None, str]:
    """How many samples or batches there are, where that can be told."""
    leaves = [leaf for leaf in tree.flatten(x) if getattr(leaf, "shape", None)]
    if leaves:
        return int(leaves[0].shape[0]), "samples"
    try:
        return len(x), "batches"
    except TypeError:  # a generator, or a dataset that does not know it
        return None, "batches"


def _replace_methods(keras: Any, worker: DriverChannel, rank: int, mean: Mean | None) -> None:
    """Have ``fit`` take as many steps on every rank, and ``apply`` average gradients where ranks step by themselves.

    ``mean`` is None where Keras itself makes one computation of a step of all ranks.
    """
    fit, evaluate = keras.Model.fit, keras.Model.evaluate
    ranks = _Ranks(worker, rank)

    @functools.wraps(fit)
    def equal_fit(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(fit).bind(*args, **kwargs).arguments
        ranks.check_equal("fit", **{name: given.get(name) for name in _STEPS})
        ranks.equalize("fit", keras.tree, given, "steps_per_epoch", given.get("steps_per_epoch"))
        of_validation = ("validation_steps", given.get("validation_steps"))
        first = [] if mean is None else [_synchronizer(keras, ranks, mean)]
        given["callbacks"] = _callbacks(keras, first, given.get("callbacks"), ranks)
        if mean is not None:
            return fit(**given)
        if isinstance(given.get("validation_data"), (tuple, list)):  # all ranks evaluate it together
            validation = dict(zip(_DATA, given["validation_data"], strict=False))
            ranks.equalize("fit(validation_data=...)", keras.tree, validation, *of_validation)
            given["validation_data"] = tuple(validation.values())
        elif given.get("validation_data") is not None:
            ranks.equalize("fit(validation_data=...)", keras.tree, {"x": given["validation_data"]}, *of_validation)
        return fit(**given)

    @functools.wraps(evaluate)
    def equal_evaluate(*args: Any, **kwargs: Any) -> Any:
        given = inspect.signature(evaluate).bind(*args, **kwargs).arguments
        given |= given.pop("kwargs", {})
        if "_use_cached_eval_dataset" not in given:  # that is fit's own
            ranks.equalize("evaluate", keras.tree, given, "steps", given.get("steps"))
        return evaluate(**given)

    def predict(*args: Any, **kwargs: Any) -> Any:
        raise ConfigError(
            "Keras on JAX predicts in one process only: return model.get_weights() from this call, and predict in one "
            "that runs on one rank, predict(weights) >> pool; model.evaluate works over all ranks"
        )

    keras.Model.fit = equal_fit
    if mean is None:
        keras.Model.evaluate, keras.Model.predict = equal_evaluate, predict
        for name in ("save", "save_weights"):
            setattr(keras.Model, name, _by_one_rank(keras.distribution, getattr(keras.Model, name)))
    else:
        _average_gradients(keras, mean)


def _by_one_rank(distribution: Any, save: Any) -> Any:
    """Have one rank save alone: Keras makes variables meanwhile, which all ranks would have to make together."""

    @functools.wraps(save)
    def save_alone(*args: Any, **kwargs: Any) -> Any:
        over_all = distribution.distribution()
        distribution.set_distribution(None)
        try:
            return save(*args, **kwargs)
        finally:
            distribution.set_distribution(over_all)

    return save_alone


_STEPS = (
    "epochs",
    "initial_epoch",
    "batch_size",
    "steps_per_epoch",
    "validation_split",
    "validation_steps",
    "validation_batch_size",
    "validation_freq",
)


def _average_gradients(keras: Any, mean: Mean) -> None:
    """Replace ``apply`` of every optimizer, also of that which scales the loss: it skips steps by what it finds."""
    averaging = False

    def averaged(apply: Any) -> Any:
        @functools.wraps(apply)
        def apply_averaged(self: Any, grads: Any, trainable_variables: Any = None) -> Any:
            nonlocal averaging
            if averaging:  # of the optimizer inside
                return apply(self, grads, trainable_variables)
            averaging = True
            try:
                grads = [None if grad is None else keras.ops.convert_to_tensor(grad, sparse=False) for grad in grads]
                return apply(self, _mean_of(mean, grads), trainable_variables)
            finally:
                averaging = False

        return apply_averaged

    for kind in (keras.optimizers.Optimizer, keras.optimizers.LossScaleOptimizer):
        kind.apply = averaged(kind.apply)


def _mean_of(mean: Mean, arrays: Sequence[Any]) -> list[Any]:
    """The mean over ranks of each array; one exchange for each type of number."""
    means = list(arrays)
    kinds = [str(getattr(array, "dtype", "")) for array in arrays]
    for kind in sorted({kind for kind in kinds if "float" in kind}):
        at = [index for index, each in enumerate(kinds) if each == kind]
        for index, value in zip(at, mean([arrays[index] for index in at]), strict=True):
            means[index] = value
    return means


def _synchronizer(keras: Any, ranks: _Ranks, mean: Mean) -> Any:
    """A callback that gives all ranks rank 0's weights at the start, and one set of statistics and logs later on."""

    class Synchronizer(keras.callbacks.Callback):  # type: ignore[misc]
        def on_train_begin(self, logs: Any = None) -> None:
            self._exchange(self.model.weights, lambda array: array * ranks.world_size if ranks.is_head else array * 0)

        def on_test_begin(self, logs: Any = None) -> None:
            self._exchange(self.model.non_trainable_weights, lambda array: array)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self._exchange(self.model.non_trainable_weights, lambda array: array)
            if logs:  # callbacks that stop or change something decide the same everywhere
                every = ranks.gather({name: float(value) for name, value in logs.items()})
                logs.update({name: sum(each[name] for each in every) / len(every) for name in logs})

        @staticmethod
        def _exchange(variables: Any, offer: Callable[[Any], Any]) -> None:
            arrays = [offer(keras.ops.convert_to_tensor(variable)) for variable in variables]
            for variable, value in zip(variables, _mean_of(mean, arrays), strict=True):
                if "float" in str(value.dtype):
                    variable.assign(value)

    return Synchronizer()


def _callbacks(keras: Any, first: list[Any], others: Any, ranks: _Ranks) -> Any:
    """``first`` and the caller's callbacks, without those that would write rank 0's files a second time.

    Raises:
        ConfigError: one that makes ranks go on from different epochs.
    """
    known = keras.callbacks
    in_list = isinstance(others, known.CallbackList)
    given = others.callbacks if in_list else keras.tree.flatten(others) if others is not None else []
    if any(isinstance(each, known.BackupAndRestore) for each in given):
        raise ConfigError(
            "BackupAndRestore restores each rank by itself: use ModelCheckpoint(path), which rank 0 alone writes, and "
            "to go on keras.models.load_model(path) on every rank and fit(initial_epoch=...)"
        )
    writers = () if ranks.is_head else (known.ModelCheckpoint, known.CSVLogger, known.TensorBoard)
    kept = [*first, *(each for each in given if not isinstance(each, writers))]
    if not in_list:
        return kept
    others.callbacks[:] = kept
    for each in first:
        each.set_model(others.model)
    return others

"""What people type by mistake where a pool expects a call or a function, and what to write instead."""

from __future__ import annotations

from atoll.functions.serialize import name_of


def not_a_call(other: object, operator: str) -> str:
    """What to say of ``other @ pool``."""
    if isinstance(other, (list, tuple)) and other and all(hasattr(item, "__atoll_pending__") for item in other):
        return (
            f"several calls run side by side as `sky.gather(*calls) {operator} pool`, not as a {type(other).__name__}"
        )
    if callable(other):
        name = name_of(other)
        decorated = hasattr(other, "__atoll_function__")
        step = "" if decorated else "decorate it with @sky.compute, and "
        right = f"`{name}(...) {operator} pool`"
        return f"`{name} {operator} pool` names the function without calling it: {step}write {right}"
    return (
        f"{type(other).__name__} on the left of `{operator} pool` is a value, not a pending call: the function ran "
        f"here. Did you forget @sky.compute? Or write pool.run(function, ...)"
    )


def no_function(value: object) -> str:
    """What to say of ``pool.submit(value, ...)``."""
    if hasattr(value, "__atoll_pending__"):
        value._used = True  # type: ignore[attr-defined]  # refused, so no warning on top that it was never dispatched
        name = str(value).removesuffix("(...)")
        return (
            f"{value} is a pending call: write `{value} >> pool`, or give function and arguments apart, as in "
            f"pool.submit({name}, ...)"
        )
    return f"expected a function and its arguments, not {type(value).__name__}: pool.submit(function, ...)"

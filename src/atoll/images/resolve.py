"""Makes an ``Image`` true on this machine: an interpreter, extra import paths and variables for the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.metadata import version

from atoll.images.image import Image, check_env, check_pip
from atoll.images.installer import Progress
from atoll.images.interpreters import running_interpreter
from atoll.images.local_files import include_paths
from atoll.images.overlay import Environment, Request, ensure_overlay
from atoll.images.requirements import constraint_lines, location_stamp, merge, without_cuda


def resolve(
    image: Image,
    *,
    pip: str | Sequence[str] | None = (),
    env: Mapping[str, object] | None = None,
    has_gpu: bool,
    progress: Progress | None = None,
) -> Environment:
    """The environment of ranks on this machine, with what is missing built first.

    Args:
        pip: requirements of the pool: one of a project that the image names too replaces the image's.
        env: variables of the pool, which win over the image's.
        has_gpu: whether the node has a GPU; without one, CUDA extras become the CPU package.
        progress: called with a line for each step that takes time. A build is interrupted by raising from it.

    Raises:
        ConfigError: a requirement, variable, constraint or include that cannot work.
        ImageError: a package cannot be installed, a Debian package or the Python version is missing.
    """
    base = []
    if image.python not in (None, running_interpreter().minor):
        base = [f"cloudpickle=={version('cloudpickle')}"]  # as here, so that both ends speak one dialect
    request, lines = request_of(image, check_pip("pip=", pip), base=base, has_gpu=has_gpu)
    variables = {**check_env("Image(env=)", image.env), **check_env("env=", env)}
    overlay = ensure_overlay(request, progress or (lambda line: None))
    paths = tuple(dict.fromkeys([*include_paths(image.includes), *overlay.paths]))
    return Environment(overlay.python, paths, variables, (*lines, *overlay.lines))


def request_of(
    image: Image, pip: Sequence[str], *, base: Sequence[str] = (), has_gpu: bool
) -> tuple[Request, list[str]]:
    """What an image and a pool ask for of a machine, and one line for each requirement that lost its CUDA extra.

    Requirements win over those of the same project further left: ``base``, the image's, ``pip``.
    """
    requirements = merge(merge(base, image.pip), pip)
    lines: list[str] = []
    if not has_gpu:
        requirements, lines = without_cuda(requirements)
    stamps = {text: location_stamp(text) for text in requirements}
    request = Request(
        python=image.python,
        requirements=sorted(requirements),
        constraints=constraint_lines(image.constraints),
        apt=list(image.apt),
        stamps={text: stamp for text, stamp in stamps.items() if stamp},
    )
    return request, lines

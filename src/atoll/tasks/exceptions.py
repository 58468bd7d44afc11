"""SkyPilot's names of errors that the Python SDK raises."""

from __future__ import annotations

from atoll.core.errors import ProvisionError
from atoll.tasks.clusters import ClusterNotUp, UnknownCluster

ClusterDoesNotExist = UnknownCluster
ClusterNotUpError = ClusterNotUp
ResourcesUnavailableError = ProvisionError

__all__ = ["ClusterDoesNotExist", "ClusterNotUpError", "ResourcesUnavailableError"]

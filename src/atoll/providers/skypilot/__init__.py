"""Rented machines: every cloud, Kubernetes and Slurm that SkyPilot knows, through its Python SDK.

SkyPilot lives in an environment of its own (``environment``), and its SDK in a process of its own (``helper``), which
``client`` asks. Standard library only on our side: a supervisor uses this, too.
"""

from __future__ import annotations

# What its infras begin with beside `skypilot`. SkyPilot's own Slurm and ssh pools are `skypilot/slurm/NAME` and
# `skypilot/ssh/NAME`: `slurm/NAME` and `ssh/NAME` are providers beside this one.
KINDS = (
    *("aws", "gcp", "azure", "k8s", "kubernetes", "nebius", "lambda", "runpod", "oci", "ibm", "cudo", "do"),
    *("fluidstack", "hyperbolic", "mithril", "paperspace", "primeintellect", "scp", "seeweb", "shadeform", "vast"),
    *("verda", "vsphere", "yotta"),
)

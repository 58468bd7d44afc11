"""Local nodes of a provider that misbehaves as ``fake.json`` beside it says, which a test may change at any time.

``state``, ``reason``: of the allocation, as ``poll`` tells it; ``addresses``: of its nodes; ``broken``: a node whose
agent does not start; ``preempted``: why nodes go away, once they do; ``notice``: why they are about to.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

from atoll.core.errors import ProvisionError
from atoll.providers.base import Allocation, AllocationState, Boot, Node, NodePlan, NodeRequest, Notice, Plan, Report
from atoll.providers.local import Local


def script() -> dict[str, Any]:
    path = Path(__file__).with_name("fake.json")
    return dict(json.loads(path.read_text())) if path.exists() else {}


class FakeNode:
    """A local node that knows why it was taken away."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self.channel = node.channel

    def listen(self, on_silence: Callable[[float, str], object]) -> None:
        self._node.listen(on_silence)

    @property
    def reason(self) -> str | None:
        return script().get("preempted") or self._node.reason

    def stop(self) -> None:
        self._node.stop()


class Fake(Local):
    """This machine, behind a queue that is late, lies or takes nodes back."""

    kind: ClassVar[str] = "fake"
    form: ClassVar[str] = "fake"

    def provision(self, request: NodeRequest, report: Report, have: Allocation | None = None) -> Allocation:
        return self.poll(super().provision(request, report, have))

    def plan(self, request: NodeRequest, allocation: Allocation | None = None) -> Plan:
        plan = super().plan(request, allocation)
        given = allocation or plan.allocation
        nodes = [dataclasses.replace(node, addr=at.address) for node, at in zip(plan.nodes, given.nodes, strict=False)]
        return dataclasses.replace(plan, nodes=tuple(nodes), allocation=given)

    def poll(self, allocation: Allocation, *, max_age_s: float = 0.0) -> Allocation:
        said = script()
        addresses = said.get("addresses") or [node.address for node in allocation.nodes]
        return dataclasses.replace(
            allocation,
            state=AllocationState(said.get("state", "READY")),
            reason=said.get("reason", ""),
            nodes=tuple(
                dataclasses.replace(node, address=address)
                for node, address in zip(allocation.nodes, addresses, strict=True)
            ),
        )

    def notice(self, allocation: Allocation) -> Notice | None:
        return Notice(script()["notice"], 10.0) if "notice" in script() else None

    def launch_agents(self, allocation: Allocation, nodes: Sequence[NodePlan], boot: Boot) -> Iterator[FakeNode]:  # type: ignore[override]
        for node in nodes:
            if node.node == script().get("broken"):
                raise ProvisionError("no machine left")
            yield from map(FakeNode, super().launch_agents(allocation, [node], boot))


PROVIDER = Fake

"""Decides which collectives share a bucket and where the bucket stands: one linear walk for each kind.

A bucket of all-gathers stands at its first member: what later members read is moved up. A bucket of reduce-scatters
stands at its last member: what reads earlier members is moved down. Only light nodes are moved (see `Effect`), never
past a write to what they read and never past a barrier. Since gathers are only moved up and reductions only down, and
each kind is planned and applied before the other is looked at, no two buckets can come to wait for each other.

What is a bucket already ends the one before it and takes nobody in: else bytes would be copied twice, and a collective
that fits nowhere would travel across whole layers to meet another such.

Every decision is a function of the graph's order, operators and sizes. How much light work lies between two collectives
never counts, so that ranks whose uneven shards differ in padding still decide alike.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import fx

from fusewright.passes.base import PassContext
from fusewright.passes.comm.collectives import Collective, Kind, MergeKey, is_wait, kind_of, mergeable
from fusewright.passes.comm.dependencies import Effect, StorageClasses, effect_of, written_arguments


@dataclass
class Bucket:
    """Members of one merged collective, and the places of its two halves.

    Attributes:
        start: index in the graph at which the merged collective starts.
        finish: index of the node before which its results must stand.
        lifted: nodes that move up to `start`.
    """

    members: list[Collective]
    start: int
    finish: int
    lifted: set[fx.Node] = field(default_factory=set)

    @property
    def whole_bytes(self) -> int:
        return sum(member.whole_bytes for member in self.members)


class GraphFacts:
    """The graph's order, effects and aliases, computed once per plan."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes: list[fx.Node] = list(graph.nodes)
        self.index = {node: i for i, node in enumerate(self.nodes)}
        self.effects = {node: effect_of(node) for node in self.nodes}
        # Without a write nobody needs to know who shares memory.
        writes = Effect.WRITES in self.effects.values()
        self.storage: Mapping[fx.Node, object] = (
            StorageClasses(graph) if writes else {node: node for node in self.nodes}
        )
        self._fixed = [i for n, i in self.index.items() if self.effects[n] in (Effect.WRITES, Effect.BARRIER)]

    def written(self, node: fx.Node) -> set[object]:
        """Storage classes that `node` writes; empty unless its effect is WRITES."""
        return {self.storage[n] for n in written_arguments(node)} if self.effects[node] is Effect.WRITES else set()

    def next_write_or_barrier(self, index: int) -> int:
        """Index of the first such node after `index`; the output's where there is none."""
        at = bisect.bisect_right(self._fixed, index)
        return self._fixed[at] if at < len(self._fixed) else len(self.nodes) - 1


def plan(graph: fx.Graph, kind: Kind, cap_bytes: int, any_order: bool, ctx: PassContext) -> list[Bucket]:
    """Return the buckets of two or more members of `kind`, in order; reasons for what stays apart go to `ctx`.

    Unless `any_order`, reductions whose bits depend on the order in which a backend adds stay apart.
    """
    found: dict[fx.Node, Collective] = {}
    for node in graph.nodes:
        if kind_of(node) is kind:
            seen = mergeable(node)
            if isinstance(seen, str):
                ctx.declined(node, seen)
            elif not (any_order or seen.key.order_free):
                ctx.declined(node, "with more than two ranks the backend may add a merged message in another order")
            else:
                found[node] = seen
    if len(found) < 2:
        return []
    facts = GraphFacts(graph)
    walk = _plan_gathers if kind is Kind.ALL_GATHER else _plan_reductions
    return [bucket for bucket in walk(facts, found, cap_bytes, ctx) if len(bucket.members) > 1]


# ------------------------------------------------------------------------------------------------ all-gathers, upwards


def _plan_gathers(
    facts: GraphFacts, found: dict[fx.Node, Collective], cap_bytes: int, ctx: PassContext
) -> list[Bucket]:
    # earliest[n]: index of the last node that n cannot be moved above, and that node. Placeholders can stand anywhere.
    earliest: dict[fx.Node, tuple[int, fx.Node]] = {}
    last_write: dict[object, tuple[int, fx.Node]] = {}
    barrier: tuple[int, fx.Node] | None = None
    current: dict[MergeKey, Bucket] = {}
    buckets: list[Bucket] = []
    nothing = (-1, facts.nodes[0])
    for i, node in enumerate(facts.nodes):
        inputs = node.all_input_nodes
        blocks = [b for n in inputs for b in (earliest[n], last_write.get(facts.storage[n], nothing))]
        block = max(blocks, key=lambda b: b[0], default=nothing)
        light = facts.effects[node] is Effect.LIGHT
        earliest[node] = nothing if node.op in ("placeholder", "get_attr") else block if light else (i, node)
        for storage in facts.written(node):
            last_write[storage] = (i, node)
        if facts.effects[node] is Effect.BARRIER:
            barrier = (i, node)
        member = found.get(node)
        if member is None:
            continue
        if member.merged:
            current.pop(member.key, None)
            continue
        bucket = current.get(member.key)
        if bucket is not None and bucket.whole_bytes + member.whole_bytes <= cap_bytes:
            reason = _why_not_lifted(bucket, block, barrier, facts)
            if reason is None:
                bucket.members.append(member)
                bucket.finish = min(bucket.finish, *(facts.index[wait] for wait in member.waits))
                _lift(member.source, bucket, facts)
                continue
            ctx.declined(node, reason)
        current[member.key] = Bucket([member], i, min(facts.index[wait] for wait in member.waits))
        buckets.append(current[member.key])
    return buckets


def _why_not_lifted(
    bucket: Bucket, block: tuple[int, fx.Node], barrier: tuple[int, fx.Node] | None, facts: GraphFacts
) -> str | None:
    first = bucket.members[0].node.name
    if barrier is not None and barrier[0] > bucket.start:
        return f"{barrier[1].name}, whose effects are unknown, stands between it and {first}"
    if block[0] <= bucket.start:
        return None
    if facts.effects[block[1]] is Effect.WRITES:
        return f"its input is written by {block[1].name}, after {first}"
    if any(block[1] in member.waits for member in bucket.members):
        return f"its input depends on {block[1].name}, a member of the same bucket"
    return f"its input depends on {block[1].name}, which comes after {first}"


def _lift(source: fx.Node, bucket: Bucket, facts: GraphFacts) -> None:
    todo = [source]
    while todo:
        node = todo.pop()
        if facts.index[node] > bucket.start and node not in bucket.lifted:
            assert facts.effects[node] is Effect.LIGHT, node
            bucket.lifted.add(node)
            todo.extend(node.all_input_nodes)


# ------------------------------------------------------------------------------------------- reduce-scatters, downwards


@dataclass
class _Open:
    """A bucket of reduce-scatters that may still grow.

    Attributes:
        followers: members, their waits, and the light nodes that read them; those above `finish` move down.
        read: storage classes that must not be written while followers wait to run.
        closed: why nothing may join any more.
    """

    bucket: Bucket
    followers: set[fx.Node] = field(default_factory=set)
    read: set[object] = field(default_factory=set)
    closed: str | None = None

    def add(self, member: Collective, facts: GraphFacts) -> None:
        self.bucket.members.append(member)
        self.bucket.start = facts.index[member.node]
        self.followers.add(member.node)
        self.read |= {facts.storage[member.source], facts.storage[member.node]}

    def meet(self, node: fx.Node, facts: GraphFacts) -> None:
        """Take note of the next node of the graph: it may follow, or close the bucket."""
        effect = facts.effects[node]
        followed = next((n for n in node.all_input_nodes if n in self.followers), None)
        first = self.bucket.members[0].node.name
        if effect is Effect.BARRIER:
            self.closed = f"{node.name}, whose effects are unknown, stands between it and {first}"
        elif effect is Effect.WRITES and facts.written(node) & self.read:
            self.closed = f"{node.name} writes what the bucket of {first} still reads"
        elif followed is not None:
            if effect is Effect.LIGHT or (is_wait(node) and kind_of(followed) is not None):
                self.followers.add(node)
                self.read |= {facts.storage[n] for n in (node, *node.all_input_nodes)}
            else:
                self.closed = f"{node.name} depends on {followed.name}, a result of the bucket of {first}"

    def settle(self, facts: GraphFacts) -> Bucket:
        """Fix the place of the results: above the first reader, write or barrier below `start`."""
        readers = (facts.index[user] for node in self.followers for user in node.users)
        below = [i for i in readers if i > self.bucket.start]
        self.bucket.finish = min([*below, facts.next_write_or_barrier(self.bucket.start)])
        return self.bucket


def _plan_reductions(
    facts: GraphFacts, found: dict[fx.Node, Collective], cap_bytes: int, ctx: PassContext
) -> list[Bucket]:
    current: dict[MergeKey, _Open] = {}
    every: list[_Open] = []
    for i, node in enumerate(facts.nodes):
        for bucket in current.values():
            if bucket.closed is None:
                bucket.meet(node, facts)
        member = found.get(node)
        if member is None:
            continue
        if member.merged:
            current.pop(member.key, None)
            continue
        old = current.get(member.key)
        fits = old is not None and old.bucket.whole_bytes + member.whole_bytes <= cap_bytes
        if old is not None and fits and old.closed is not None:
            ctx.declined(node, old.closed)
        if old is None or not fits or old.closed is not None:
            every.append(_Open(Bucket([], i, i)))
            current[member.key] = every[-1]
        current[member.key].add(member, facts)
    return [bucket.settle(facts) for bucket in every]

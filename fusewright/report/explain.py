"""Says what happened to an optimized model: captured, rewritten, declined, verified, fallen back."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from fusewright.capture.record import Record
from fusewright.runtime.fragment import Fragment


@dataclass(frozen=True)
class Explanation:
    """A snapshot of one optimized model's record; print it, or take `to_dict()`."""

    data: dict[str, Any]

    def to_dict(self) -> dict[str, Any]:
        """Plain data: graphs, breaks, recompiles, dynamo_frames, lowerings, calls, dispatched, fallbacks, rewrites,
        recognised, declines, buckets, regions (of CUDA graphs), verified, seconds."""
        return self.data

    def __str__(self) -> str:
        console = Console(width=120, color_system=None)
        with console.capture() as capture:
            console.print(self.__rich__())
        return capture.get().rstrip()

    def __rich__(self) -> Group:
        d = self.data
        head = (
            f"{d['calls']} calls, {d['dispatched']} graph dispatches, {d['graphs']} graphs, "
            f"{d['lowerings']} lowerings, {len(d['breaks'])} graph breaks, {d['recompiles']} recompiles"
        )
        if not d["calls"] and not d["disabled_calls"]:
            head += (
                "\nnot called yet; or only by way of an outer torch.compile, which traces through it, so that "
                "nothing of ours runs: call the model itself, without torch.compile around it"
            )
        rewrites = ", ".join(f"{name} {count}" for name, count in d["rewrites"].items()) or "none"
        seen = ", ".join(f"{count} {kind}" for kind, count in d["recognised"].items()) or "nothing"
        parts: list[Any] = [Text(head), Text(f"rewrites: {rewrites}"), Text(f"recognised: {seen}")]
        parts.append(_table("buckets", ("graph", "range", "variant", "hits"), d["buckets"]))
        parts.append(_table("verified against eager", ("graph", "what", "ok", "detail"), d["verified"]))
        if d["regions"]:
            columns = ("graph", "range", "region", "calls", "warmups", "captures", "replays", "plain")
            parts.append(_table("regions launched by CUDA graphs", columns, d["regions"]))
        if d["fallbacks"]:
            parts.append(_table("fallbacks", ("kind", "where", "reason", "count"), d["fallbacks"]))
        else:
            parts.append(Text("fallbacks: none"))
        if d["declines"]:
            parts.append(_table("left alone", ("pass", "node", "reason", "count"), d["declines"]))
        return Group(*parts)


def _table(title: str, columns: tuple[str, ...], rows: list[dict[str, Any]]) -> Table:
    table = Table(title=title, title_justify="left", show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_cell(row[c]) for c in columns))
    return table


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "NO"
    return "-" if value is None else str(value)


def explain_record(record: Record) -> Explanation:
    """Snapshot `record`; later calls do not change it."""
    fragments: list[Fragment] = list(record.fragments)
    buckets = [
        {"graph": f.label, "range": str(s.bucket), "variant": e.variant.label(), "hits": s.hits.value}
        for f in fragments
        for s in f.slots
        for e in s.entries
    ]
    regions = [
        {"graph": f.label, "range": str(s.bucket), "region": number, **asdict(r.stats), "plain": dict(r.stats.plain)}
        for f in fragments
        for s in f.slots
        for e in s.entries
        for number, r in enumerate(e.regions)
    ]
    declines: Counter[tuple[str, str]] = Counter()
    nodes: dict[tuple[str, str], str] = {}
    for (name, node, reason), count in record.declines.items():
        declines[name, reason] += count
        nodes.setdefault((name, reason), node)
    data = {
        "graphs": len(fragments),
        "breaks": [{"where": w, "reason": r, "count": c} for (w, r), c in record.breaks.items()],
        "recompiles": sum(record.recompiles.values()),
        "dynamo_frames": sum(record.frames.values()),
        "lowerings": len(buckets),
        "calls": record.calls.value,
        "disabled_calls": record.disabled_calls.value,
        "dispatched": sum(f.dispatched for f in fragments),
        "fallbacks": [
            {"kind": f.kind, "where": f.where, "reason": f.reason, "count": c} for f, c in record.fallbacks.items()
        ],
        "rewrites": dict(record.rewrites),
        "recognised": dict(record.recognised),
        "declines": [
            {"pass": name, "node": nodes[name, reason], "reason": reason, "count": count}
            for (name, reason), count in declines.items()
        ],
        "buckets": buckets,
        "regions": regions,
        "verified": [{"graph": v.graph, "what": v.what, "ok": v.ok, "detail": v.detail} for v in record.verdicts],
        "seconds": {k: round(v, 3) for k, v in record.seconds.items()},
    }
    return Explanation(data)

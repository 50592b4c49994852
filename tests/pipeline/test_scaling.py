"""The pipeline's time grows no worse than n log n; benchmarks/pipeline_scaling.py measures the large sizes."""

from __future__ import annotations

from benchmarks.pipeline_scaling import captured_block, chain, measure


def test_a_chain_has_the_size_that_was_asked_for() -> None:
    one = captured_block()
    for nodes in (100, 1000):
        gm, blocks = chain(one, nodes)
        gm.graph.lint()
        assert abs(len(gm.graph.nodes) - nodes) <= len(one.graph.nodes)
        assert blocks > 1


def test_four_times_the_nodes_take_about_four_times_as_long() -> None:
    """CPU time, so that neighbours on the machine matter little; quadratic growth would give 3.3."""
    small, large = measure([1000, 4000], rounds=3)
    for row in (small, large):
        assert row.rewrites == {
            "canonicalize": 3 * row.blocks,
            "fuse_rms_norm": 2 * row.blocks,
            "fuse_attention": row.blocks,
        }
    assert large.relative_to_n_log_n < 1.7
    assert large.cpu_seconds < 5

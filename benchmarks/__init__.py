"""The benchmark suite: fixed workloads, peers, results. Not part of the wheel."""

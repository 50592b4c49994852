"""When the fused attention operator is worth putting in place of written-out attention.

On the CPU the written-out form is compiled by Inductor into matrix products and one pass over the scores, and those
are as fast as torch's fused kernel while the scores fit where memory is reused. From 32 MiB on glibc takes each
allocation from the system anew and gives it back (M_MMAP_THRESHOLD never grows beyond that), so that every page of the
scores is faulted in again at each step; there the fused form wins by 1.5 to 4 times. Figures: `python -m
benchmarks.attention_crossover`, rows in `benchmarks/results/*/attention_crossover.jsonl`.
"""

from __future__ import annotations

_MIB = 1 << 20
_ALWAYS = 32 * _MIB  # bytes of one score tensor
_INFERENCE = {False: 8 * _MIB, True: 16 * _MIB}  # by whether a mask is read: 1.1 to 1.5 times from there on,
_INFERENCE_KEYS = 128  # with at least as many keys


def why_not(device: str, *, scores: int, keys: int, itemsize: int, masked: bool, training: bool) -> str | None:
    """Why fusing does not pay, or None where it does, or where nothing is known to speak against it.

    Args:
        device: device type; only "cpu" is priced.
        scores: batch * heads * queries * keys.
        keys: number of keys.
        itemsize: bytes of one score.
        masked: whether a mask tensor is read (a causal mask that the kernel knows is none).
        training: whether gradients are computed.
    """
    if device != "cpu" or scores * itemsize >= _ALWAYS:
        return None
    if not training and scores * itemsize >= _INFERENCE[masked] and keys >= _INFERENCE_KEYS:
        return None
    return f"does not pay: the scores take {scores * itemsize / _MIB:.3g} MiB (FUSEWRIGHT_COST=off fuses all the same)"

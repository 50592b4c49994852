"""Triton kernels of `fusewright::attention`: tiled softmax forward, and a backward in two kernels without atomics.

Every kernel works on one tile of one head and never writes scores to memory. References: Dao, "FlashAttention-2",
arXiv:2307.08691 (the tiling); Milakov and Gimelshein, arXiv:1805.02867 (the running maximum and sum).
"""
# B batch, N query heads, K key/value heads, GROUP = N / K, T query tokens, S key tokens, H head size (HEAD; BLOCK_H
# is the next power of two). st_: stride in elements, then tensor (q k v m o l do dq dk dv), then dim (b h t).
# mypy: disable-error-code="untyped-decorator, no-untyped-def, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

NO_MASK = tl.constexpr(0)
ADDITIVE = tl.constexpr(1)
BOOLEAN = tl.constexpr(2)
_LOG2E = tl.constexpr(1.4426950408889634)
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _exp(x, MASK: tl.constexpr):
    """e^x for the units of `_scores`: base 2 is folded into the scale except under an additive mask."""
    # Folding it into an additive mask would overflow finfo.min to -inf and lose "all keys equally masked".
    if MASK == ADDITIVE:
        x = x * _LOG2E
    return tl.math.exp2(x)


@triton.jit
def _units(lse, MASK: tl.constexpr):
    """A stored natural log-sum-exp in the units of `_scores`."""
    if MASK != ADDITIVE:
        lse = lse * _LOG2E
    return lse


@triton.jit
def _scores(
    a, b, mask_tile, mask_offsets, row, col, T, S, scale,
    MASK: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Masked scores of a tile in float32, in either orientation: row and col are its query and key indices, 2-D.

    EDGE: the tile may hold keys that are not visible (past S, or past the diagonal); they become -inf.
    """
    s = tl.dot(a, b, input_precision=PRECISION) * scale
    if MASK == ADDITIVE:
        s += tl.load(mask_tile + mask_offsets, mask=(row < T) & (col < S), other=0.0).to(tl.float32)
    if MASK == BOOLEAN:
        keep = tl.load(mask_tile + mask_offsets, mask=(row < T) & (col < S), other=1)
        s = tl.where(keep != 0, s, float("-inf"))
    if EDGE:
        visible = col < S
        if CAUSAL:
            visible = visible & (col <= row)
        s = tl.where(visible, s, float("-inf"))
    return s


@triton.jit
def _load_tile(tile_ptr, offsets, index, limit, h, HEAD: tl.constexpr, BLOCK_H: tl.constexpr):
    """A tile of tokens x head values, zero outside; `index` and `h` are 2-D, in the orientation of `offsets`.

    One 64-bit pointer moves from tile to tile and the offsets inside are 32-bit and the same for all tiles: a tensor of
    64-bit pointers for each operand doubled what the backward spills at H = 128.
    """
    if HEAD == BLOCK_H:
        return tl.load(tile_ptr + offsets, mask=index < limit, other=0.0)
    return tl.load(tile_ptr + offsets, mask=(index < limit) & (h < HEAD), other=0.0)


@triton.jit
def _forward_span(
    acc, total, peak, q, k_base, v_base, mask_base, st_ks, st_vs, st_mt, st_ms, row, lo, hi, T, S, scale,
    HEAD: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Attend to keys lo .. hi: the running sum of p @ v, of p, and the running maximum of the scores."""
    h = tl.arange(0, BLOCK_H)
    key = tl.arange(0, BLOCK_S)
    k_offsets = key[None, :] * st_ks + h[:, None]
    v_offsets = key[:, None] * st_vs + h[None, :]
    k_tile = k_base + tl.cast(lo, tl.int64) * st_ks
    v_tile = v_base + tl.cast(lo, tl.int64) * st_vs
    mask_tile = mask_base
    mask_offsets = key
    if MASK != NO_MASK:
        mask_tile = mask_base + tl.cast(lo, tl.int64) * st_ms
        mask_offsets = tl.arange(0, BLOCK_T)[:, None] * st_mt + key[None, :] * st_ms
    for start in range(lo, hi, BLOCK_S):
        col = start + key
        k = _load_tile(k_tile, k_offsets, col[None, :], S, h[:, None], HEAD, BLOCK_H)
        s = _scores(
            q, k, mask_tile, mask_offsets, row[:, None], col[None, :], T, S, scale, MASK, CAUSAL, EDGE, PRECISION
        )
        new_peak = tl.maximum(peak, tl.max(s, 1))
        shift = new_peak
        if MASK != NO_MASK:  # a row may have met no visible key yet: -inf - -inf would be NaN for good
            shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        p = _exp(s - shift[:, None], MASK)
        decay = _exp(peak - shift, MASK)
        total = total * decay + tl.sum(p, 1)
        v = _load_tile(v_tile, v_offsets, col[:, None], S, h[None, :], HEAD, BLOCK_H)
        acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
        peak = new_peak
        k_tile += BLOCK_S * st_ks
        v_tile += BLOCK_S * st_vs
        if MASK != NO_MASK:
            mask_tile += BLOCK_S * st_ms
    return acc, total, peak


@triton.jit
def attention_forward(
    q_ptr, k_ptr, v_ptr, mask_ptr, o_ptr, lse_ptr,
    st_qb, st_qh, st_qt, st_kb, st_kh, st_kt, st_vb, st_vh, st_vt, st_mb, st_mh, st_mt, st_ms,
    st_ob, st_oh, st_ot, st_lb, st_lh, st_lt, N, GROUP, T, S, scale,
    HEAD: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """out = softmax(scale * q @ k^T + mask) @ v and the natural log-sum-exp of the scores.

    q, out (B, N, T, H), k, v (B, K, S, H), mask broadcast to (B, N, T, S) by strides of 0, lse (B, N, T) float32. A row
    with no visible key gives NaN. `scale` comes multiplied by log2(e) unless the mask is additive.
    Grid: (cdiv(T, BLOCK_T) * B * N,), the tiles of a head side by side so that its k and v stay in L2.
    Traffic: 2 * B * N * T * H * itemsize + 2 * B * K * S * H * itemsize (from memory, once per L2 residency) + the mask
    + 4 * B * N * T bytes. Work: 4 * B * N * T * S * H flop, half when causal.
    """
    tiles = tl.cdiv(T, BLOCK_T)
    tile = tiles - 1 - tl.program_id(0) % tiles  # the longest rows of a causal head first
    head = tl.program_id(0) // tiles
    b = tl.cast(head // N, tl.int64)
    n = tl.cast(head % N, tl.int64)
    row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    wide_row = tl.cast(row, tl.int64)
    h = tl.arange(0, BLOCK_H)
    q_offsets = wide_row[:, None] * st_qt + h[None, :]
    q = _load_tile(q_ptr + b * st_qb + n * st_qh, q_offsets, row[:, None], T, h[None, :], HEAD, BLOCK_H)
    k_base = k_ptr + b * st_kb + (n // GROUP) * st_kh
    v_base = v_ptr + b * st_vb + (n // GROUP) * st_vh
    mask_base = mask_ptr
    if MASK != NO_MASK:
        mask_base = mask_ptr + b * st_mb + n * st_mh + tl.cast(tile * BLOCK_T, tl.int64) * st_mt
    acc = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    total = tl.zeros((BLOCK_T,), tl.float32)
    peak = tl.full((BLOCK_T,), float("-inf"), tl.float32)
    end = S
    full = S // BLOCK_S * BLOCK_S  # keys before it are visible to every row of the tile: no comparisons needed
    if CAUSAL:
        end = tl.minimum(S, (tile + 1) * BLOCK_T)
        full = tl.minimum(full, (tile * BLOCK_T + 1) // BLOCK_S * BLOCK_S)
    acc, total, peak = _forward_span(
        acc, total, peak, q, k_base, v_base, mask_base, st_kt, st_vt, st_mt, st_ms, row, 0, full, T, S, scale,
        HEAD, MASK, CAUSAL, False, PRECISION, BLOCK_T, BLOCK_S, BLOCK_H,
    )  # fmt: skip
    acc, total, peak = _forward_span(
        acc, total, peak, q, k_base, v_base, mask_base, st_kt, st_vt, st_mt, st_ms, row, full, end, T, S, scale,
        HEAD, MASK, CAUSAL, True, PRECISION, BLOCK_T, BLOCK_S, BLOCK_H,
    )  # fmt: skip
    lse = peak + tl.math.log2(total) * _LN2
    if MASK != ADDITIVE:
        lse = (peak + tl.math.log2(total)) * _LN2
    tl.store(lse_ptr + b * st_lb + n * st_lh + wide_row * st_lt, lse, mask=row < T)
    o_ptrs = o_ptr + b * st_ob + n * st_oh + wide_row[:, None] * st_ot + h[None, :]
    inside = (row[:, None] < T) & (h[None, :] < HEAD)
    tl.store(o_ptrs, (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dq_span(
    dq, mass, q, do, lse, delta, k_base, v_base, mask_base, st_ks, st_vs, st_mt, st_ms, row, lo, hi, T, S, scale,
    HEAD: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Add the share of keys lo .. hi to dq and, under an additive mask, to the mass of the recomputed probabilities."""
    h = tl.arange(0, BLOCK_H)
    key = tl.arange(0, BLOCK_S)
    k_offsets = key[:, None] * st_ks + h[None, :]
    v_offsets = key[None, :] * st_vs + h[:, None]
    k_tile = k_base + tl.cast(lo, tl.int64) * st_ks
    v_tile = v_base + tl.cast(lo, tl.int64) * st_vs
    mask_tile = mask_base
    mask_offsets = key
    if MASK != NO_MASK:
        mask_tile = mask_base + tl.cast(lo, tl.int64) * st_ms
        mask_offsets = tl.arange(0, BLOCK_T)[:, None] * st_mt + key[None, :] * st_ms
    for start in range(lo, hi, BLOCK_S):
        col = start + key
        k = _load_tile(k_tile, k_offsets, col[:, None], S, h[None, :], HEAD, BLOCK_H)
        s = _scores(
            q, tl.trans(k), mask_tile, mask_offsets, row[:, None], col[None, :], T, S, scale,
            MASK, CAUSAL, EDGE, PRECISION,
        )  # fmt: skip
        p = _exp(s - lse[:, None], MASK)
        v = _load_tile(v_tile, v_offsets, col[None, :], S, h[:, None], HEAD, BLOCK_H)
        ds = p * (tl.dot(do, v, input_precision=PRECISION) - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)
        if MASK == ADDITIVE:
            mass += tl.sum(p, 1)
        k_tile += BLOCK_S * st_ks
        v_tile += BLOCK_S * st_vs
        if MASK != NO_MASK:
            mask_tile += BLOCK_S * st_ms
    return dq, mass


@triton.jit
def attention_backward_dq(
    q_ptr, k_ptr, v_ptr, mask_ptr, o_ptr, do_ptr, lse_ptr, dq_ptr, delta_ptr, mass_ptr,
    st_qb, st_qh, st_qt, st_kb, st_kh, st_kt, st_vb, st_vh, st_vt, st_mb, st_mh, st_mt, st_ms,
    st_ob, st_oh, st_ot, st_dob, st_doh, st_dot, st_lb, st_lh, st_lt, st_dqb, st_dqh, st_dqt,
    N, GROUP, T, S, scale, grad_scale,
    HEAD: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dq = grad_scale * (p * (do @ v^T - delta)) @ k, delta = sum(do * out, -1), p = exp(scores - lse).

    Shapes as in `attention_forward`; do as out, dq as q; delta and mass (B, N, T) float32 contiguous are written for
    `attention_backward_dkdv`. Under an additive mask, mass = sum of p: with |lse| large, rounding of lse scales a whole
    row of p, up to a factor S at finfo.min; dividing by the mass removes it. Elsewhere mass is not touched.
    Grid: (cdiv(T, BLOCK_T) * B * N,). Traffic: 4 * B * N * T * H + 2 * B * K * S * H values, the mask, 8 * B * N * T
    bytes. Work: 6 * B * N * T * S * H flop, half when causal.
    """
    tiles = tl.cdiv(T, BLOCK_T)
    tile = tiles - 1 - tl.program_id(0) % tiles
    head = tl.program_id(0) // tiles
    b = tl.cast(head // N, tl.int64)
    n = tl.cast(head % N, tl.int64)
    row = tile * BLOCK_T + tl.arange(0, BLOCK_T)
    wide_row = tl.cast(row, tl.int64)
    h = tl.arange(0, BLOCK_H)
    q_offsets = wide_row[:, None] * st_qt + h[None, :]
    o_offsets = wide_row[:, None] * st_ot + h[None, :]
    do_offsets = wide_row[:, None] * st_dot + h[None, :]
    q = _load_tile(q_ptr + b * st_qb + n * st_qh, q_offsets, row[:, None], T, h[None, :], HEAD, BLOCK_H)
    o = _load_tile(o_ptr + b * st_ob + n * st_oh, o_offsets, row[:, None], T, h[None, :], HEAD, BLOCK_H)
    do = _load_tile(do_ptr + b * st_dob + n * st_doh, do_offsets, row[:, None], T, h[None, :], HEAD, BLOCK_H)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    wide_head = tl.cast(head, tl.int64)
    tl.store(delta_ptr + wide_head * T + row, delta, mask=row < T)
    lse = tl.load(lse_ptr + b * st_lb + n * st_lh + wide_row * st_lt, mask=row < T, other=0.0)
    lse = _units(lse, MASK)
    k_base = k_ptr + b * st_kb + (n // GROUP) * st_kh
    v_base = v_ptr + b * st_vb + (n // GROUP) * st_vh
    mask_base = mask_ptr
    if MASK != NO_MASK:
        mask_base = mask_ptr + b * st_mb + n * st_mh + tl.cast(tile * BLOCK_T, tl.int64) * st_mt
    dq = tl.zeros((BLOCK_T, BLOCK_H), tl.float32)
    mass = tl.zeros((BLOCK_T,), tl.float32)
    end = S
    full = S // BLOCK_S * BLOCK_S
    if CAUSAL:
        end = tl.minimum(S, (tile + 1) * BLOCK_T)
        full = tl.minimum(full, (tile * BLOCK_T + 1) // BLOCK_S * BLOCK_S)
    dq, mass = _dq_span(
        dq, mass, q, do, lse, delta, k_base, v_base, mask_base, st_kt, st_vt, st_mt, st_ms, row, 0, full, T, S, scale,
        HEAD, MASK, CAUSAL, False, PRECISION, BLOCK_T, BLOCK_S, BLOCK_H,
    )  # fmt: skip
    dq, mass = _dq_span(
        dq, mass, q, do, lse, delta, k_base, v_base, mask_base, st_kt, st_vt, st_mt, st_ms, row, full, end, T, S, scale,
        HEAD, MASK, CAUSAL, True, PRECISION, BLOCK_T, BLOCK_S, BLOCK_H,
    )  # fmt: skip
    if MASK == ADDITIVE:
        tl.store(mass_ptr + wide_head * T + row, mass, mask=row < T)
        dq = dq / mass[:, None]
    dq_ptrs = dq_ptr + b * st_dqb + n * st_dqh + wide_row[:, None] * st_dqt + h[None, :]
    inside = (row[:, None] < T) & (h[None, :] < HEAD)
    tl.store(dq_ptrs, (dq * grad_scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dkdv_span(
    dk, dv, k, v, q_base, do_base, mask_base, lse_base, delta_base, mass_base,
    st_qt, st_dot, st_lt, st_mt, st_ms, col, lo, hi, T, S, scale,
    HEAD: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, EDGE: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """Add the share of query rows lo .. hi of one query head; scores stand transposed, keys x queries."""
    h = tl.arange(0, BLOCK_H)
    query = tl.arange(0, BLOCK_T)
    wide_lo = tl.cast(lo, tl.int64)
    q_offsets = query[:, None] * st_qt + h[None, :]
    do_offsets = query[:, None] * st_dot + h[None, :]
    q_tile = q_base + wide_lo * st_qt
    do_tile = do_base + wide_lo * st_dot
    lse_tile = lse_base + wide_lo * st_lt
    mask_tile = mask_base
    mask_offsets = query
    if MASK != NO_MASK:
        mask_tile = mask_base + wide_lo * st_mt
        mask_offsets = query[None, :] * st_mt + tl.arange(0, BLOCK_S)[:, None] * st_ms
    for start in range(lo, hi, BLOCK_T):
        row = start + query
        q = _load_tile(q_tile, q_offsets, row[:, None], T, h[None, :], HEAD, BLOCK_H)
        # Past T the log-sum-exp is +inf: no probability.
        lse = _units(tl.load(lse_tile + query * st_lt, mask=row < T, other=float("inf")), MASK)
        s = _scores(
            k, tl.trans(q), mask_tile, mask_offsets, row[None, :], col[:, None], T, S, scale,
            MASK, CAUSAL, EDGE, PRECISION,
        )  # fmt: skip
        p = _exp(s - lse[None, :], MASK)
        if MASK == ADDITIVE:
            p = p / tl.load(mass_base + row, mask=row < T, other=1.0)[None, :]
        do = _load_tile(do_tile, do_offsets, row[:, None], T, h[None, :], HEAD, BLOCK_H)
        dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        delta = tl.load(delta_base + row, mask=row < T, other=0.0)
        ds = p * (tl.dot(v, tl.trans(do), input_precision=PRECISION) - delta[None, :])
        dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
        q_tile += BLOCK_T * st_qt
        do_tile += BLOCK_T * st_dot
        lse_tile += BLOCK_T * st_lt
        if MASK != NO_MASK:
            mask_tile += BLOCK_T * st_mt
    return dk, dv


@triton.jit
def attention_backward_dkdv(
    q_ptr, k_ptr, v_ptr, mask_ptr, do_ptr, lse_ptr, delta_ptr, mass_ptr, dk_ptr, dv_ptr,
    st_qb, st_qh, st_qt, st_kb, st_kh, st_kt, st_vb, st_vh, st_vt, st_mb, st_mh, st_mt, st_ms,
    st_dob, st_doh, st_dot, st_lb, st_lh, st_lt, st_dkb, st_dkh, st_dkt, st_dvb, st_dvh, st_dvt,
    N, GROUP, T, S, scale, grad_scale,
    HEAD: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """dv = p^T @ do and dk = grad_scale * (p * (do @ v^T - delta))^T @ q, summed over a key head's GROUP query heads.

    One program owns a tile of keys and adds all queries in order: no atomics, bitwise repeatable. Shapes as in
    `attention_backward_dq`, which must have run (delta, mass).
    Grid: (cdiv(S, BLOCK_S) * B * K,). Traffic: 4 * B * K * S * H values + per tile of keys 2 * GROUP * T * H values
    from L2. Work: 8 * B * N * T * S * H flop, half when causal.
    """
    tiles = tl.cdiv(S, BLOCK_S)
    tile = tl.program_id(0) % tiles  # a causal head's first keys are seen by most queries: longest first already
    head = tl.program_id(0) // tiles
    kv_heads = N // GROUP
    b = tl.cast(head // kv_heads, tl.int64)
    kv = tl.cast(head % kv_heads, tl.int64)
    col = tile * BLOCK_S + tl.arange(0, BLOCK_S)
    wide_col = tl.cast(col, tl.int64)
    h = tl.arange(0, BLOCK_H)
    k_offsets = wide_col[:, None] * st_kt + h[None, :]
    v_offsets = wide_col[:, None] * st_vt + h[None, :]
    k = _load_tile(k_ptr + b * st_kb + kv * st_kh, k_offsets, col[:, None], S, h[None, :], HEAD, BLOCK_H)
    v = _load_tile(v_ptr + b * st_vb + kv * st_vh, v_offsets, col[:, None], S, h[None, :], HEAD, BLOCK_H)
    dk = tl.zeros((BLOCK_S, BLOCK_H), tl.float32)
    dv = tl.zeros((BLOCK_S, BLOCK_H), tl.float32)
    first = 0
    diagonal = 0  # rows first .. diagonal cross it, rows from there on see every key of the tile
    if CAUSAL and MASK == NO_MASK:
        first = tile * BLOCK_S // BLOCK_T * BLOCK_T
        diagonal = tl.cdiv((tile + 1) * BLOCK_S, BLOCK_T) * BLOCK_T
    # With a mask no tile is skipped: a row of NaN reaches every key, as in the formula. One span then compares
    # throughout; two would spill.
    COMPARE: tl.constexpr = CAUSAL and MASK != NO_MASK
    for g in range(0, GROUP):
        n = kv * GROUP + g
        q_base = q_ptr + b * st_qb + n * st_qh
        do_base = do_ptr + b * st_dob + n * st_doh
        lse_base = lse_ptr + b * st_lb + n * st_lh
        delta_base = delta_ptr + (b * N + n) * T
        mass_base = mass_ptr
        if MASK == ADDITIVE:
            mass_base = mass_ptr + (b * N + n) * T
        mask_base = mask_ptr
        if MASK != NO_MASK:
            mask_base = mask_ptr + b * st_mb + n * st_mh + tl.cast(tile * BLOCK_S, tl.int64) * st_ms
        if CAUSAL and MASK == NO_MASK:
            dk, dv = _dkdv_span(
                dk, dv, k, v, q_base, do_base, mask_base, lse_base, delta_base, mass_base, st_qt, st_dot, st_lt,
                st_mt, st_ms, col, first, tl.minimum(diagonal, T), T, S, scale,
                HEAD, MASK, CAUSAL, True, PRECISION, BLOCK_T, BLOCK_S, BLOCK_H,
            )  # fmt: skip
        dk, dv = _dkdv_span(
            dk, dv, k, v, q_base, do_base, mask_base, lse_base, delta_base, mass_base, st_qt, st_dot, st_lt,
            st_mt, st_ms, col, diagonal, T, T, S, scale,
            HEAD, MASK, CAUSAL, COMPARE, PRECISION, BLOCK_T, BLOCK_S, BLOCK_H,
        )  # fmt: skip
    inside = (col[:, None] < S) & (h[None, :] < HEAD)
    dk_ptrs = dk_ptr + b * st_dkb + kv * st_dkh + wide_col[:, None] * st_dkt + h[None, :]
    dv_ptrs = dv_ptr + b * st_dvb + kv * st_dvh + wide_col[:, None] * st_dvt + h[None, :]
    tl.store(dk_ptrs, (dk * grad_scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_ptrs, dv.to(dv_ptr.dtype.element_ty), mask=inside)

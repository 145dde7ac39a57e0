"""The last token an expert takes, without a sort: device functions for Triton kernels.

Keys are int32 that order like float32 values: zeros are equal, NaN comes before -inf. The class of a token (2: it chose
the expert, 1: it may, 0: the rest) is folded in where it matters: only one class is divided, those above it are taken
whole and those below it not at all. Then the threshold is bisected, by counting the row's keys again and again from L1.

Legend: T tokens; a row is one expert's, of `words` * 32 keys, OUT beyond T.
"""

import triton
import triton.language as tl

from sonic_ep.kernels.cuda.bits import load_bits, row_count

# Keys beyond those of all floats, whose magnitudes end at 0x7F800000 (inf).
OUT = tl.constexpr(-(2**31))
NAN = tl.constexpr(-(2**31) + 1)
IN = tl.constexpr(2**31 - 1)


@triton.jit
def keys_of(scores):
    """Keys of floats."""
    bits = scores.to(tl.float32).to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    return tl.where(magnitudes > 0x7F800000, NAN, tl.where(bits < 0, -magnitudes, magnitudes))


@triton.jit
def load_keys(keys_ptr, columns, words):
    """(columns, 32) keys of a row."""
    tokens = columns[:, None] * 32 + tl.arange(0, 32)[None, :]
    return tl.load(keys_ptr + tokens, mask=(columns < words)[:, None], other=OUT)


@triton.jit
def _fold_classes(keys_ptr, chosen_ptr, open_ptr, divided, words, HAS_ALLOWED: tl.constexpr, WORDS: tl.constexpr):
    """Rewrite one expert's keys so that they alone decide: those of classes above `divided` become IN, those below
    OUT. Returns the least and the greatest key left."""
    least = tl.full([WORDS], IN, tl.int32)
    greatest = tl.full([WORDS], OUT, tl.int32)
    for first in range(0, words, WORDS):
        columns = first + tl.arange(0, WORDS)
        keys = load_keys(keys_ptr, columns, words)
        chosen = load_bits(chosen_ptr, columns, words)
        rank = 2 * chosen + (load_bits(open_ptr, columns, words) if HAS_ALLOWED else 1 - chosen)
        # Beyond T keys are OUT already, and no class lifts them.
        keys = tl.where(rank < divided, OUT, tl.where(rank > divided, IN, keys))
        tokens = columns[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(keys_ptr + tokens, keys, mask=(columns < words)[:, None])
        least = tl.minimum(least, tl.min(tl.where(keys == OUT, IN, keys), axis=1))
        greatest = tl.maximum(greatest, tl.max(tl.where(keys == IN, OUT, keys), axis=1))
    return tl.min(least, axis=0), tl.max(greatest, axis=0)


@triton.jit
def _bisect(keys_ptr, wanted, words, least, greatest, above, up_to, WORDS: tl.constexpr):
    """What `threshold` returns. Ends as soon as a bound leaves exactly `wanted` keys; at most 32 rounds."""
    low = least.to(tl.int64)
    high = greatest.to(tl.int64) + 1
    taken = above  # keys >= high
    if wanted == above:
        low = high
    elif wanted == up_to:
        high = low
        taken = wanted
    while high - low > 1:
        middle = low + (high - low) // 2
        level = middle.to(tl.int32)
        count = 0
        for first in range(0, words, WORDS):
            tokens = first * 32 + tl.arange(0, WORDS * 32)
            keys = tl.load(keys_ptr + tokens, mask=tokens < words * 32, other=OUT)
            count += tl.sum((keys >= level).to(tl.int32), axis=0)
        if count >= wanted:
            low = middle
        if count <= wanted:
            high = middle
            taken = count
    return low.to(tl.int32), high.to(tl.int32), wanted - taken


@triton.jit
def threshold(
    keys_ptr,
    chosen_ptr,
    open_ptr,
    wanted,
    T,
    words,
    HAS_ALLOWED: tl.constexpr,
    COUNT_WORDS: tl.constexpr,
    STEP_WORDS: tl.constexpr,
):
    """Which keys of a row are its `wanted` best (at most T). Overwrites the keys.

    Returns low, high and a quota: to be taken are the keys from `high` on, and of those in low..high-1, which are all
    equal, the first `quota`. open_ptr: bits of allowed tokens that did not choose the expert.
    """
    up_to_2 = row_count(chosen_ptr, words, COUNT_WORDS)
    up_to_1 = up_to_2 + row_count(open_ptr, words, COUNT_WORDS) if HAS_ALLOWED else T
    divided = tl.where(wanted <= up_to_2, 2, tl.where(wanted <= up_to_1, 1, 0))
    above = tl.where(divided == 2, 0, tl.where(divided == 1, up_to_2, up_to_1))
    up_to = tl.where(divided == 2, up_to_2, tl.where(divided == 1, up_to_1, T))
    least, greatest = _fold_classes(keys_ptr, chosen_ptr, open_ptr, divided, words, HAS_ALLOWED, STEP_WORDS)
    tl.debug_barrier()  # what one thread has written others read
    return _bisect(keys_ptr, wanted, words, least, greatest, above, up_to, COUNT_WORDS)

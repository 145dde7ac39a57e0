"""Selects the best tokens of an expert as a bit set, without a sort: device functions for Triton kernels.

A *key* is an int32 that orders like the float32 score; zeros are equal, and NaN is below -inf. Classes rank before
keys. Class 2: the token has the expert in its top-K. Class 1: the token is eligible, that is, the expert is allowed but
not in its top-K. Class 0: the rest. One class is *divided*: all tokens of the classes above it are selected, and no
token of the classes below it.

Rounding changes few pairs, so mostly a few or almost all tokens of the divided class are selected. We search the
smaller part: the k best keys (to select) or the k worst (to leave out), in two steps.

1. Find the words of 32 tokens that can hold one of the k keys. Take the best key of each word. If k of these reach a
   level, every one of the k best keys reaches it too, so words whose best key does not are skipped.
2. Gather the keys of the remaining words, and find the last of the k keys by bisection.

Example: 5 tokens with the scores 5, 9, 3, 4, 4. Tokens 0 and 2 have the expert in their top-K, the others are eligible,
and 4 tokens are wanted. So 0 and 2 are selected, and class 1 is divided: two of the keys 9, 4, 4. Fewer are left out
than selected, so the k = 1 worst is searched, and two tokens tie for it. The selected bits are tokens 0, 1 and 2, the
tied bits tokens 3 and 4, and the caller adds 1 of these, token 3.

Legend: T tokens on this rank. A row is one expert's, of `words` * 32 keys.
"""

import triton
import triton.language as tl

from sonic_ep.kernels.common.bitset import load_words, pack_bits, row_count

# Below all keys: the magnitude of a float as bits is at most 0x7F800000 (inf).
OUT = tl.constexpr(-(2**31))
NAN = tl.constexpr(-(2**31) + 1)
IN = tl.constexpr(2**31 - 1)  # above all keys
# Bisection rounds in step 1. An exact level would take up to 32 rounds and leave hardly fewer words.
_ROUNDS = tl.constexpr(12)


@triton.jit
def keys_of(scores):
    """Returns the int32 keys of float scores."""
    bits = scores.to(tl.float32).to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    return tl.where(magnitudes > 0x7F800000, NAN, tl.where(bits < 0, -magnitudes, magnitudes))


@triton.jit
def _classes(chosen_ptr, eligible_ptr, columns, words, T, divided, HAS_ALLOWED: tl.constexpr):
    """Returns two bit sets for the words at `columns`: tokens of the divided class, and tokens of the classes above."""
    chosen = load_words(chosen_ptr, columns, words)
    left = tl.minimum(tl.maximum(T - columns * 32, 0), 32)
    all_bits = tl.full(chosen.shape, 0xFFFFFFFF, tl.uint32)
    # Shift in two steps, because a shift by 32 bits is undefined.
    beyond = (all_bits << (left // 2).to(tl.uint32)) << (left - left // 2).to(tl.uint32)
    existing = all_bits ^ beyond
    second, first_two = existing ^ chosen, existing
    if HAS_ALLOWED:
        second = load_words(eligible_ptr, columns, words)
        first_two = chosen | second
    own = tl.where(divided == 2, chosen, tl.where(divided == 1, second, existing ^ first_two))
    above = tl.where(divided == 2, chosen ^ chosen, tl.where(divided == 1, chosen, first_two))
    return own, above


@triton.jit
def _keys_of_words(keys_ptr, chosen_ptr, eligible_ptr, columns, words, T, divided, end, HAS_ALLOWED: tl.constexpr):
    """Returns (columns, 32) keys of the divided class, and OUT for all other tokens.

    end: 0 to search the best keys. -1 to search the worst: all bits are inverted, which reverses the order.
    """
    own, _above = _classes(chosen_ptr, eligible_ptr, columns, words, T, divided, HAS_ALLOWED)
    lanes = tl.arange(0, 32)[None, :]
    keys = tl.load(keys_ptr + columns[:, None] * 32 + lanes, mask=(columns < words)[:, None], other=0)
    return tl.where(((own[:, None] >> lanes) & 1) != 0, keys ^ end, OUT)


@triton.jit
def _best_of_words(
    best_ptr,
    keys_ptr,
    chosen_ptr,
    eligible_ptr,
    words,
    T,
    divided,
    end,
    HAS_ALLOWED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Writes the best key of each word. Returns the least and the greatest of those that are not OUT."""
    least = tl.full([WORDS], IN, tl.int32)
    greatest = tl.full([WORDS], NAN, tl.int32)
    for first in range(0, words, WORDS):
        columns = first + tl.arange(0, WORDS)
        keys = _keys_of_words(keys_ptr, chosen_ptr, eligible_ptr, columns, words, T, divided, end, HAS_ALLOWED)
        best = tl.max(keys, axis=1)
        tl.store(best_ptr + columns, best, mask=columns < words)
        least = tl.minimum(least, tl.where(best == OUT, IN, best))
        greatest = tl.maximum(greatest, best)
    return tl.min(least, axis=0), tl.max(greatest, axis=0)


@triton.jit
def _count(values_ptr, size, level, BLOCK: tl.constexpr):
    """Returns the number of values >= level."""
    count = 0
    for first in range(0, size, BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + places, mask=places < size, other=OUT)
        count += tl.sum((values >= level).to(tl.int32), axis=0)
    return count


@triton.jit
def _level_of_words(best_ptr, words, k, least, greatest, BLOCK: tl.constexpr):
    """Returns a level that each of the k best keys reaches, but the best keys of few other words."""
    level = least
    if _count(best_ptr, words, least, BLOCK) < k:
        level = tl.zeros_like(least) + NAN  # fewer than k words have a key, so no word can be skipped
    else:
        low, high = least.to(tl.int64), greatest.to(tl.int64) + 1
        rounds = 0
        while (high - low > 1) & (rounds < _ROUNDS):
            middle = low + (high - low) // 2
            if _count(best_ptr, words, middle.to(tl.int32), BLOCK) >= k:
                low = middle
            else:
                high = middle
            rounds += 1
        level = low.to(tl.int32)
    return level


@triton.jit
def _list_words(listed_ptr, best_ptr, words, level, BLOCK: tl.constexpr):
    """Writes the indices of the words whose best key reaches the level. Returns their number."""
    listed = 0
    for first in range(0, words, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        reaches = tl.load(best_ptr + columns, mask=columns < words, other=OUT) >= level
        places = listed + tl.cumsum(reaches.to(tl.int32), axis=0) - 1
        tl.store(listed_ptr + places, columns, mask=reaches)
        listed += tl.sum(reaches.to(tl.int32), axis=0)
    return listed


@triton.jit
def _gather_words(
    keys_ptr,
    listed_ptr,
    listed,
    chosen_ptr,
    eligible_ptr,
    words,
    T,
    divided,
    end,
    HAS_ALLOWED: tl.constexpr,
    WORDS: tl.constexpr,
):
    """Moves the keys of the listed words, as _keys_of_words returns them, to the front of the row."""
    for first in range(0, listed, WORDS):
        places = first + tl.arange(0, WORDS)
        columns = tl.load(listed_ptr + places, mask=places < listed, other=words)
        keys = _keys_of_words(keys_ptr, chosen_ptr, eligible_ptr, columns, words, T, divided, end, HAS_ALLOWED)
        # Listed words are in ascending order, so no word moves to a later position. But another thread may still read
        # from the position that this one writes to.
        tl.debug_barrier()
        to = places[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(keys_ptr + to, keys, mask=(places < listed)[:, None])


@triton.jit
def _gathered(keys_ptr, first, listed, WORDS: tl.constexpr):
    """Returns (WORDS, 32) gathered keys, from listed word number `first` on; OUT beyond the last."""
    places = first + tl.arange(0, WORDS)
    keys_ptr += places[:, None] * 32 + tl.arange(0, 32)[None, :]
    return tl.load(keys_ptr, mask=(places < listed)[:, None], other=OUT)


@triton.jit
def _count_gathered(keys, level, keys_ptr, listed, WORDS: tl.constexpr):
    """Returns the number of gathered keys >= level.

    keys: of the first WORDS listed words, usually of all. The keys of further words are loaded.
    """
    count = tl.sum((keys >= level).to(tl.int32), axis=1)
    for first in range(WORDS, listed, WORDS):
        others = _gathered(keys_ptr, first, listed, WORDS)
        count += tl.sum((others >= level).to(tl.int32), axis=1)
    return tl.sum(count, axis=0)


@triton.jit
def select(
    selected_ptr,
    tied_ptr,
    scratch_ptr,
    keys_ptr,
    chosen_ptr,
    eligible_ptr,
    wanted,
    T,
    words,
    HAS_ALLOWED: tl.constexpr,
    COUNT_WORDS: tl.constexpr,
    STEP_WORDS: tl.constexpr,
):
    """Writes the `wanted` best tokens of a row as bits. Returns how many tied tokens the caller must add.

    If not all tokens with the last selected key are wanted, none of them is in the selected bits. They are in the tied
    bits instead, and the caller adds the returned number of them, smallest token ids first.

    selected_ptr, tied_ptr: `words` int32 each, written. scratch_ptr: 2 * words int32. keys_ptr: overwritten.
    chosen_ptr: bits of class 2. eligible_ptr: bits of class 1, read only if HAS_ALLOWED; without it class 1 is all
    other tokens. wanted: at most T.
    """
    up_to_2 = row_count(chosen_ptr, words, COUNT_WORDS)
    up_to_1 = up_to_2 + row_count(eligible_ptr, words, COUNT_WORDS) if HAS_ALLOWED else T
    divided = tl.where(wanted <= up_to_2, 2, tl.where(wanted <= up_to_1, 1, 0))
    above_it = tl.where(divided == 2, 0, tl.where(divided == 1, up_to_2, up_to_1))
    size = tl.where(divided == 2, up_to_2, tl.where(divided == 1, up_to_1, T)) - above_it
    taken = wanted - above_it
    end = tl.where(taken > size - taken, -1, 0)
    k = tl.where(end == 0, taken, size - taken)
    best_ptr, listed_ptr = scratch_ptr, scratch_ptr + words
    listed = 0
    level = k * 0 + IN
    low, high = k.to(tl.int64) * 0, k.to(tl.int64) * 0
    at_low = 0  # number of keys >= low: at least k
    at_high = 0  # number of keys >= high: fewer than k
    if k > 0:
        least, greatest = _best_of_words(
            best_ptr, keys_ptr, chosen_ptr, eligible_ptr, words, T, divided, end, HAS_ALLOWED, STEP_WORDS
        )
        tl.debug_barrier()  # other threads read what one thread has written
        level = _level_of_words(best_ptr, words, k, least, greatest, COUNT_WORDS)
        listed = _list_words(listed_ptr, best_ptr, words, level, COUNT_WORDS)
        tl.debug_barrier()
        _gather_words(
            keys_ptr, listed_ptr, listed, chosen_ptr, eligible_ptr, words, T, divided, end, HAS_ALLOWED, STEP_WORDS
        )
        tl.debug_barrier()
        keys = _gathered(keys_ptr, 0, listed, STEP_WORDS)
        low, high = level.to(tl.int64), greatest.to(tl.int64) + 1
        # Not `middle = low`: Triton 3.6 would then assume that the loop does not change `low`.
        middle = level.to(tl.int64)
        while middle < high:
            count = _count_gathered(keys, middle.to(tl.int32), keys_ptr, listed, STEP_WORDS)
            if count >= k:
                low = middle
                at_low = count
            else:
                high = middle
                at_high = count
            # Stop when low and high are adjacent, or when exactly k keys reach low.
            middle = tl.where((high - low > 1) & (at_low > k), low + (high - low) // 2, high)
    # If exactly k keys reach low, they are the part that we search. Else the last one is among several that equal low.
    exact = at_low <= k
    last = low.to(tl.int32)
    sure = last + tl.where(exact, 0, 1)
    for first in range(0, words, COUNT_WORDS):
        columns = first + tl.arange(0, COUNT_WORDS)
        inside = columns < words
        own, above = _classes(chosen_ptr, eligible_ptr, columns, words, T, divided, HAS_ALLOWED)
        unlisted = inside & (tl.load(best_ptr + columns, mask=inside & (k > 0), other=OUT) < level)
        bits = above | tl.where(end == 0, 0, own)
        tl.store(selected_ptr + columns, bits.to(tl.int32, bitcast=True), mask=unlisted)
        tl.store(tied_ptr + columns, tl.zeros_like(columns), mask=unlisted)
    for first in range(0, listed, STEP_WORDS):
        places = first + tl.arange(0, STEP_WORDS)
        columns = tl.load(listed_ptr + places, mask=places < listed, other=words)
        _own, above = _classes(chosen_ptr, eligible_ptr, columns, words, T, divided, HAS_ALLOWED)
        keys = _gathered(keys_ptr, first, listed, STEP_WORDS)
        taken_whole = tl.where(end == 0, keys >= sure, (keys < last) & (keys != OUT))
        bits = above | pack_bits(taken_whole).to(tl.uint32, bitcast=True)
        tl.store(selected_ptr + columns, bits.to(tl.int32, bitcast=True), mask=columns < words)
        tl.store(tied_ptr + columns, pack_bits((keys >= last) & (keys < sure)), mask=columns < words)
    return tl.where(exact, 0, tl.where(end == 0, k - at_high, at_low - k))

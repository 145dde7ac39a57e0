"""The best tokens of an expert as bits, without a sort: device functions for Triton kernels.

Keys are int32 that order like float32 values: zeros are equal, NaN comes before -inf. The class of a token (2: it chose
the expert, 1: it may, 0: the rest) matters first: only one class is *divided*, those above it are taken whole and those
below it not at all. Rounding moves few tokens, so the divided class's shorter part is looked for, from its end: the k
best keys, or the k worst. First come the words of 32 tokens that can have any of them: no key below the k best words'
worst is among the k best. Among the keys of those words the last one is found by bisection.

Legend: T tokens on this rank. A row is one expert's, of `words` * 32 keys.
"""

import triton
import triton.language as tl

from sonic_ep.kernels.common.bitset import load_words, pack_bits, row_count

# Below all keys; floats' magnitudes end at 0x7F800000 (inf).
OUT = tl.constexpr(-(2**31))
NAN = tl.constexpr(-(2**31) + 1)
IN = tl.constexpr(2**31 - 1)  # above all keys
# Bisections of the words' keys: exact ones would take up to 32 and leave hardly fewer words.
_ROUNDS = tl.constexpr(12)


@triton.jit
def keys_of(scores):
    """Keys of floats."""
    bits = scores.to(tl.float32).to(tl.int32, bitcast=True)
    magnitudes = bits & 0x7FFFFFFF
    return tl.where(magnitudes > 0x7F800000, NAN, tl.where(bits < 0, -magnitudes, magnitudes))


@triton.jit
def _classes(chosen_ptr, eligible_ptr, columns, words, T, divided, HAS_ALLOWED: tl.constexpr):
    """The words at `columns` of the divided class, and of the classes above it."""
    chosen = load_words(chosen_ptr, columns, words)
    left = tl.minimum(tl.maximum(T - columns * 32, 0), 32)
    all_bits = tl.full(chosen.shape, 0xFFFFFFFF, tl.uint32)
    # In two steps: a shift by all 32 bits is undefined.
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
    """(columns, 32) keys of the divided class, from the end that is searched (0: the best, -1: the worst); else OUT."""
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
    """Write each word's best key; the least and the greatest of those that are not OUT."""
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
    """How many values are `level` or more."""
    count = 0
    for first in range(0, size, BLOCK):
        places = first + tl.arange(0, BLOCK)
        values = tl.load(values_ptr + places, mask=places < size, other=OUT)
        count += tl.sum((values >= level).to(tl.int32), axis=0)
    return count


@triton.jit
def _level_of_words(best_ptr, words, k, least, greatest, BLOCK: tl.constexpr):
    """A level that the k best keys reach, and few words' best ones besides."""
    level = least
    if _count(best_ptr, words, least, BLOCK) < k:
        level = tl.zeros_like(least) + NAN  # several keys of a word are among the k best for sure
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
    """Write which words reach the level; how many do."""
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
    """Move the keys of the listed words, as _keys_of_words gives them, to the front of the row."""
    for first in range(0, listed, WORDS):
        places = first + tl.arange(0, WORDS)
        columns = tl.load(listed_ptr + places, mask=places < listed, other=words)
        keys = _keys_of_words(keys_ptr, chosen_ptr, eligible_ptr, columns, words, T, divided, end, HAS_ALLOWED)
        # Words are listed in order, so none moves behind its place; but another thread may still be reading there.
        tl.debug_barrier()
        to = places[:, None] * 32 + tl.arange(0, 32)[None, :]
        tl.store(keys_ptr + to, keys, mask=(places < listed)[:, None])


@triton.jit
def _gathered(keys_ptr, first, listed, WORDS: tl.constexpr):
    """(words, 32) keys of the listed words from number `first` on; OUT beyond them."""
    places = first + tl.arange(0, WORDS)
    keys_ptr += places[:, None] * 32 + tl.arange(0, 32)[None, :]
    return tl.load(keys_ptr, mask=(places < listed)[:, None], other=OUT)


@triton.jit
def _count_gathered(keys, level, keys_ptr, listed, WORDS: tl.constexpr):
    """How many keys of the listed words are `level` or more; `keys` are those of the first ones, as a rule of all."""
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
    """Write a row's `wanted` best (at most T) as bits, but for those that are equal to its last one, which become
    `tied`; how many of these are to be taken.

    open_ptr: bits of allowed tokens that did not choose the expert. scratch_ptr: 2 `words` integers. The keys are
    overwritten.
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
    at_low = 0  # keys from `low` on: k at least
    at_high = 0  # keys from `high` on: fewer
    if k > 0:
        least, greatest = _best_of_words(
            best_ptr, keys_ptr, chosen_ptr, eligible_ptr, words, T, divided, end, HAS_ALLOWED, STEP_WORDS
        )
        tl.debug_barrier()  # what one thread has written others read
        level = _level_of_words(best_ptr, words, k, least, greatest, COUNT_WORDS)
        listed = _list_words(listed_ptr, best_ptr, words, level, COUNT_WORDS)
        tl.debug_barrier()
        _gather_words(
            keys_ptr, listed_ptr, listed, chosen_ptr, eligible_ptr, words, T, divided, end, HAS_ALLOWED, STEP_WORDS
        )
        tl.debug_barrier()
        keys = _gathered(keys_ptr, 0, listed, STEP_WORDS)
        low, high = level.to(tl.int64), greatest.to(tl.int64) + 1
        middle = level.to(tl.int64)  # not `middle = low`: Triton 3.6 then thinks that the loop leaves `low` as it is
        while middle < high:
            count = _count_gathered(keys, middle.to(tl.int32), keys_ptr, listed, STEP_WORDS)
            if count >= k:
                low = middle
                at_low = count
            else:
                high = middle
                at_high = count
            # Until the two are neighbours, or exactly k reach `low`.
            middle = tl.where((high - low > 1) & (at_low > k), low + (high - low) // 2, high)
    # If exactly k reach `low`, they are the shorter part. Else the last of them is one of several that equal `low`.
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

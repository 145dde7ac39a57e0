"""Sets of tokens as bit sets, 32 tokens per int32 word: device functions for Triton kernels.

Token t is bit t % 32 of word t // 32. A row of `words` words belongs to one expert. Loads beyond its end return zeros.
"""

import triton
import triton.language as tl


@triton.jit
def bit_count(words):
    """Returns the number of set bits of each uint32 word, int32."""
    words -= (words >> 1) & 0x55555555
    words = (words & 0x33333333) + ((words >> 2) & 0x33333333)
    return ((((words + (words >> 4)) & 0x0F0F0F0F) * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def load_words(words_ptr, columns, words):
    """Returns the words of a row at `columns`, uint32."""
    return tl.load(words_ptr + columns, mask=columns < words, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def row_count(words_ptr, words, WORDS: tl.constexpr):
    """Returns the number of set bits of a row."""
    count = tl.zeros([WORDS], tl.int32)
    for first in range(0, words, WORDS):
        columns = first + tl.arange(0, WORDS)
        count += bit_count(load_words(words_ptr, columns, words))
    return tl.sum(count, axis=0)


@triton.jit
def position_of_bit(words, index):
    """Returns the position of set bit number `index` of each uint32 word, counted from the lowest, from 0.

    The word must have more than `index` set bits. Example: word 0b10110, index 1 -> 2.
    """
    position = tl.zeros_like(index)
    for step in tl.static_range(5):
        below = bit_count((words >> position.to(tl.uint32)) & ((1 << (16 >> step)) - 1))
        is_above = index >= below
        index -= tl.where(is_above, below, 0)
        position += tl.where(is_above, 16 >> step, 0)
    return position


@triton.jit
def first_bits(words, count):
    """Returns uint32 words reduced to their lowest `count` set bits; a word must have that many."""
    last = position_of_bit(words, tl.maximum(count - 1, 0)).to(tl.uint32)
    up_to_last = (tl.full(words.shape, 2, tl.uint32) << last) - 1
    return tl.where(count > 0, words & up_to_last, 0)


@triton.jit
def pack_bits(bits):
    """Packs (columns, 32) bits into (columns,) int32 words."""
    return tl.sum(bits.to(tl.int32) << tl.arange(0, 32)[None, :], axis=1)


@triton.jit
def store_columns(out_ptr, bits, tokens, first_expert, E, words, WORDS: tl.constexpr):
    """Packs (WORDS * 32 tokens, 32 experts) bits into rows of out (E, words), one row per expert.

    The program writes WORDS words of each row, at column program_id(0) * WORDS.
    """
    packed = tl.sum(tl.reshape(bits << (tokens & 31)[:, None], (WORDS, 32, 32)), axis=1)
    experts = first_expert + tl.arange(0, 32)
    columns = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    offsets = experts.to(tl.int64)[None, :] * words + columns[:, None]
    tl.store(out_ptr + offsets, packed, mask=(experts < E)[None, :])

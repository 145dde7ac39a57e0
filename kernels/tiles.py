"""The tile that everything is aligned to."""

# M: rows of one grouped-GEMM tile on Hopper (design.md, section 2).
TILE_ROWS = 128

"""The kernels every model is built from, as plain functions. Backends: `gpu/` (Triton), `cpu/` (C++), `reference.py`.

Shapes: T tokens, R requests, H query heads, KH key/value heads, D head dimension, V vocabulary.
The KV cache of a layer is a pair of tensors, each a view [num_blocks, block_size, KH, D] with explicit strides
(storage order is num_blocks, KH, block_size, D; see `allocate_kv_cache`).
"""

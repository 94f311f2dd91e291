"""The KV cache: one slot for each running sample, its memory, and leases on it for transfer threads.

Lives here: the pool, the pages behind it on CPU and CUDA, what may read a slot while it is written.
Must not live here: which sample gets a slot (`engine.admission`), what is written into it (`engine.model`).
"""

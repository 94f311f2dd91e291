"""What `bench exactness` compares with plain decoding.

Lives here: the ways to decode. Must not live here: comparisons and figures (`benchmarks.exactness`).
"""

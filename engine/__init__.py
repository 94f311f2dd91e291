"""Tree speculative decoding on torch: runner, KV cache, drafters, verification."""

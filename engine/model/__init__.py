"""Forward passes of a causal LM over the KV pool: prefill, decode steps, draft trees.

Lives here: the runner, the forward of Llama and its kin, stock Hugging Face modules, plans of a forward, CUDA graphs.
Must not live here: loading and checking of weights (`engine.weights`), sampling (`engine.decoding`).
"""

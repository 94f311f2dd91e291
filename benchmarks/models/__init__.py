"""Every causal family of the installed transformers, tried from a small config."""

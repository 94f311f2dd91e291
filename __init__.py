"""RLHF on Ray with lossless tree speculative decoding: the package `rlhfspec`, whose rooms lie beside this file."""

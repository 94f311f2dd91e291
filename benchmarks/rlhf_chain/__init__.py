"""The chain from supervised fine-tuning over a reward model to PPO: its files, its commands, its measure.

Lives here: what `benchmarks.chain` writes, runs and reads.
Must not live here: anything that another benchmark needs (`benchmarks.support`).
"""

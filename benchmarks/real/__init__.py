"""The benchmarks `engine`, `drafting`, `rollout` and `exactness` on a real chat model: `rlhfspec bench NAME --real`."""

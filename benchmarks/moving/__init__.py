"""What moving samples between instances costs and gains: parts of `bench migration` and `bench rollout`."""

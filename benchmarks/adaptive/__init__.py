"""What `bench profile` and `bench drafting` share: pairs, recorded states, the oracle, runs."""

"""Parts of `bench drafting`: pairs, recorded states, the oracle, runs."""

"""The parts of `bench engine`, one a file."""

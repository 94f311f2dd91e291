"""Topology, the RL loop, weight publication, run folder and the command line."""

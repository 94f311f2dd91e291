"""Records, config, errors and metric names shared by every layer."""

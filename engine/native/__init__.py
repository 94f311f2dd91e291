"""Code of our own for one CPU thread: whole forwards in one call (docs/decisions/0009, 0010)."""

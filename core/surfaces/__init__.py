"""What others' inputs may hold, a table for each kind.

Lives here: the tables (`*.toml`), and the rule by which a reader goes through its table.
Must not live here: the readers themselves, and keys of our own config (`core.settings`).
"""

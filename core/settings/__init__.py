"""Every setting of a run, its default and its meaning, one room a section; `core.config` holds the whole tree.

Lives here: what YAML files may say, what contradicts itself, what a section asks of others (called by `core.config`).
Must not live here: what needs files or machines to be known (`cluster.plan`).
"""

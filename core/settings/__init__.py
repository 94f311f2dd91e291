"""Every setting of a run, its default and its meaning, one room a section; `core.config` holds the whole tree.

Lives here: what YAML files may say, and what contradicts itself within one section.
Must not live here: what two sections must agree on (`core.config`).
"""

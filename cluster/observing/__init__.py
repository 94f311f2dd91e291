"""Seeing a run while it goes: what the loop tells of itself, and the commands and dashboards that read it.

Lives here: the observer in the loop's process, its page, `status`, `diagnose`, Grafana dashboard and alert rules.
Must not live here: anything that decides; a run without it is the same run.
"""

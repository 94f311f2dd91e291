"""What people, Prometheus and Perfetto see of a run, while it lives and from its folder.

Lives here: metrics of an iteration, console, summary, tables, timeline, the live page, found runs, dashboard.
Must not live here: anything that decides; what is written into the run folder (`rlhfspec.cluster.folder`).
"""

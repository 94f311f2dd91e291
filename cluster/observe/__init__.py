"""What people and Prometheus see of a run.

Lives here: the dashboard, alerts and scrape settings.
Must not live here: what is written into the run folder; metrics themselves (`core.metrics`).
"""

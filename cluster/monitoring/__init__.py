"""What Prometheus and Grafana need to know of a run: panels, alerts, and the files that they read.

Lives here: queries over `core.exported_metrics`, Grafana's dashboard, Prometheus' rules and scrape settings.
Must not live here: metrics themselves; anything that a run imports.
"""

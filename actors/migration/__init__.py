"""An instance's part in moving samples: the protocol's machines joined to engine, transfer threads and peers.

Lives here: both sides of a live migration, run between decode steps.
Must not live here: the protocol's decisions (`policies.migration`), how bytes travel (`actors.transport`).
"""

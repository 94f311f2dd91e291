"""What is read and proven before a run starts.

Lives here: the check of config, models and data, the demo pair on demand, the profile of a run.
Must not live here: anything that needs a running system.
"""

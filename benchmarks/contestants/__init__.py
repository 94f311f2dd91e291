"""What `bench drafters` sets side by side.

Lives here: the drafters as contestants, the head that is made for them, acceptance by depth, other prompts.
Must not live here: drafters, or what judges them: the benchmark alone.
"""

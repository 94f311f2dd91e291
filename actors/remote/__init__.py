"""Ray as everyone here uses it: typed remote calls, waits that end, causes of death in plain words.

Lives here: helpers that know Ray and nothing of RLHF, pools of actors without state.
Must not live here: actors.
"""

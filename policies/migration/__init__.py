"""The two-stage live migration of one sample as state machines (RLHFSpec, arXiv 2512.04752, section 6).

Lives here: both sides of one move (`source`, `destination`) and their messages; messages in, actions out.
Must not live here: clocks, threads, transports (`actors.migration`), ownership (`policies.scheduling.ownership`).
"""

"""The two-stage live migration of one sample as state machines (design 3.4; RLHFSpec, arXiv 2512.04752, section 6).

source      leased -> shipping -> handed over -> settled          `policies.migration.source`
destination reserved -> landed -> running -> settled              `policies.migration.destination`
arbiter     who owns the sample, under which epoch                `policies.scheduling.scheduler`

Messages in, actions out; no clock, no thread, no transport.
"""

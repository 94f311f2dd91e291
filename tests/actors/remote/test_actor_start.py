"""What an actor keeps out of collections: what it was forked with, and from then on what is its own."""

import json

from forked_script import output_of

SCRIPT = """
import gc, json, weakref
from rlhfspec.actors.remote.actor_start import set_heap_aside

class Ring:
    def __init__(self):
        self.own = self

gc.disable()
found = weakref.ref(Ring())
# as what forks does, which has imported it before
gc.freeze()
own, held = weakref.ref(Ring()), Ring()
last = weakref.ref(held)
looked_at = []
for _ in range(2):
    set_heap_aside()
    looked_at.append([found() is None, own() is None, last() is None])
    held = None
print(json.dumps(looked_at))
"""


def test_what_was_set_aside_is_not_looked_at_again_by_a_fork_either() -> None:
    assert json.loads(output_of(SCRIPT)) == [[False, True, False], [False, True, False]]

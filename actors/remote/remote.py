"""`ray.remote` and actor handles without Ray's stubs, which know no concurrency groups and no options."""

from typing import Any

import ray

remote: Any = ray.remote
Handle = Any
"What `Actor.options(...).remote(...)` returns."

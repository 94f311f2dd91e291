"""The OpenAI-compatible server: what it is asked, the pool that generates, what it answers.

Lives here: bodies of requests, the thread that keeps the pool, the Serve deployment, new weights from a folder.
Must not live here: how a response is decoded (`engine`), the pool's parts (`cluster.system`), rewards as a service.
"""
